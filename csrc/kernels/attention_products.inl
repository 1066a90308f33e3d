// Attention's products on vectors, as attention.inl uses them: queries times keys, and weights times values. Part of
// kernels.cpp.

// acc[r][v] += Σ_k a[r][k] · b[k][v], k ascending: b [k / kPair, rounded up][ldb][kPair].
template <int R, int V, class T>
INLINE void add_products(const T* a, int64_t lda, const T* b, int64_t ldb, int64_t k, vf (&acc)[R][V]) {
    for (int64_t i = 0; i < k; i += kPair<T>) {
        vf column[V];
        UNROLL
        for (int v = 0; v < V; v++) column[v] = load_as<vf>(b + i * ldb + v * kWidth * kPair<T>);
        UNROLL
        for (int r = 0; r < R; r++)
            UNROLL
            for (int v = 0; v < V; v++) acc[r][v] = add_product(acc[r][v], a + r * lda + i, column[v]);
    }
}

// out[R][columns] (+)= a · b, columns a multiple of the vector width.
template <int R, int V, bool Add, class T>
INLINE void multiply_columns(const T* a, int64_t lda, const T* b, int64_t ldb, int64_t k, float* out, int64_t ldo) {
    vf acc[R][V] = {};
    if (Add)
        UNROLL
        for (int r = 0; r < R; r++)
            UNROLL
            for (int v = 0; v < V; v++) acc[r][v] = load(out + r * ldo + v * kWidth);
    add_products<R, V>(a, lda, b, ldb, k, acc);
    UNROLL
    for (int r = 0; r < R; r++)
        UNROLL
        for (int v = 0; v < V; v++) store(out + r * ldo + v * kWidth, acc[r][v]);
}

template <int R, bool Add, class T>
static void multiply_rows(const T* a, int64_t lda, const T* b, int64_t ldb, int64_t k, float* out, int64_t ldo,
                          int64_t columns) {
    constexpr int V = tile_vectors<R>();
    int64_t i = 0;
    for (; i + V * kWidth <= columns; i += V * kWidth)
        multiply_columns<R, V, Add>(a, lda, b + i * kPair<T>, ldb, k, out + i, ldo);
    for (; i < columns; i += kWidth) multiply_columns<R, 1, Add>(a, lda, b + i * kPair<T>, ldb, k, out + i, ldo);
}

// out[rows][columns] (+)= a · b.
template <bool Add, class T>
INLINE void multiply(int64_t rows, const T* a, int64_t lda, const T* b, int64_t ldb, int64_t k, float* out,
                     int64_t ldo, int64_t columns) {
    for (int64_t r = 0; r < rows;) {
        const int64_t height = next_rows(rows - r, kTileRows);
        const T* x = a + r * lda;
        float* to = out + r * ldo;
        with_rows(height, [&](auto tile) { multiply_rows<tile.count, Add>(x, lda, b, ldb, k, to, ldo, columns); });
        r += height;
    }
}

// Around the products of a split.
template <class T>
INLINE void begin_products(const AttentionScratch<T>&, int64_t, bool) {}
template <class T>
INLINE void end_products(const AttentionScratch<T>&) {}

// ---- few queries, in place ----
//
// Where one register tile takes all queries, nothing is gained by repacking for others: keys are transposed in registers,
// and values are used as they lie. On AMX, bfloat16 has its own way (attention_amx.inl).

template <class T>
INLINE bool reads_in_place(const AttentionScratch<T>&, const CacheLayer& c, int64_t queries) {
    return c.format != CacheFormat::int8 && queries <= kTileRows && c.head_dim % 32 == 0 && c.block_size % kWidth == 0;
}

template <int R, class T>
static void score_rows(const KeyTile& k, const AttentionScratch<T>& s) {
    const int64_t words = s.head / kPair<T>;
    for (int64_t key = 0; key < k.count; key += kWidth) {
        const T* keys = reinterpret_cast<const T*>(key_at(k.cells, k.start + key));
        const int64_t ahead = next_from(k, key);
        vf acc[R] = {};
        for (int64_t w = 0; w < words; w += kWidth) {
            vf square[kWidth];
            UNROLL
            for (int i = 0; i < kWidth; i++) square[i] = load_as<vf>(keys + i * s.head + w * kPair<T>);
            transpose(square);
            UNROLL
            for (int i = 0; i < kWidth; i++)
                UNROLL
                for (int r = 0; r < R; r++) acc[r] = add_product(acc[r], s.queries + r * s.head + (w + i) * kPair<T>, square[i]);
            fetch(keys + w * kWidth * kPair<T>, ahead, kWidth * kWidth * 4);
        }
        UNROLL
        for (int r = 0; r < R; r++) store(s.scores + r * kKeyTile + key, acc[r]);
    }
}

// Values of one key, or of two by pairs.
INLINE vf value_word(const float* value, int64_t, bool) { return load(value); }
INLINE vf value_word(const uint16_t* value, int64_t head, bool two) {
    const vu even = zero_extend(load_as<vh>(value));
    return (vf)(two ? even | zero_extend(load_as<vh>(value + head)) << 16 : even);
}

// p.values[R][column … column + V vectors] += s.weights · values.
template <int R, int V, class T>
INLINE void add_value_columns(const KeyTile& k, const AttentionScratch<T>& s, float* sums, int64_t column) {
    const int64_t block_size = k.cells.cache.block_size;
    vf acc[R][V];
    UNROLL
    for (int r = 0; r < R; r++)
        UNROLL
        for (int v = 0; v < V; v++) acc[r][v] = load(sums + r * s.head + column + v * kWidth);
    for (int64_t key = 0, run; key < k.count; key += run) {
        run = min_of(k.count - key, block_size - (k.start + key) % block_size);
        const T* values = reinterpret_cast<const T*>(value_at(k.cells, k.start + key)) + column;
        const int64_t ahead = next_from(k, key), bytes = V * kWidth * static_cast<int64_t>(sizeof(T));
        for (int64_t j = 0; j < run; j += kPair<T>) {
            for (int64_t i = j; i < j + kPair<T>; i++) fetch(values + i * s.head, ahead, bytes);
            vf words[V];
            UNROLL
            for (int v = 0; v < V; v++) words[v] = value_word(values + j * s.head + v * kWidth, s.head, j + 1 < run);
            UNROLL
            for (int r = 0; r < R; r++)
                UNROLL
                for (int v = 0; v < V; v++) acc[r][v] = add_product(acc[r][v], s.weights + r * kKeyTile + key + j, words[v]);
        }
    }
    UNROLL
    for (int r = 0; r < R; r++)
        UNROLL
        for (int v = 0; v < V; v++) store(sums + r * s.head + column + v * kWidth, acc[r][v]);
}

template <int R, class T>
static void add_value_rows(const KeyTile& k, const AttentionScratch<T>& s, float* sums) {
    constexpr int V = tile_vectors<R>();
    int64_t column = 0;
    for (; column + V * kWidth <= s.head; column += V * kWidth) add_value_columns<R, V>(k, s, sums, column);
    for (; column < s.head; column += kWidth) add_value_columns<R, 1>(k, s, sums, column);
}

// s.scores[queries][kKeyTile] of the keys; those beyond the last one mean nothing.
template <class T>
INLINE void score_in_place(const KeyTile& k, const AttentionScratch<T>& s, int64_t queries) {
    with_rows(queries, [&](auto rows) { score_rows<rows.count>(k, s); });
}

// p.values += s.weights · the keys' values, for all queries.
template <class T>
INLINE void add_in_place(const KeyTile& k, const AttentionScratch<T>& s, const Partials& p, int64_t queries) {
    with_rows(queries, [&](auto rows) { add_value_rows<rows.count>(k, s, p.values); });
}
