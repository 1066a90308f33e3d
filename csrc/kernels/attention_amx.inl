// Attention's products on AMX tiles, as attention.inl uses them. Part of kernels.cpp.

// k and columns round up to 32 and 16. Tile 4 has rows of a, 6 and 7 of b, 0 … 3 sums.
template <bool Add>
INLINE void multiply(int64_t, const uint16_t* a, int64_t lda, const uint16_t* b, int64_t ldb, int64_t k, float* out,
                     int64_t ldo, int64_t columns) {
    const int64_t a_bytes = lda * 2, b_bytes = ldb * 4, out_bytes = ldo * 4;
    compiler_barrier();
    for (int64_t column = 0; column < columns; column += 64) {
        const int64_t left = columns - column;
        const bool two = left > 16, three = left > 32, four = left > 48;
        float* to = out + column;
        if (Add) {
            _tile_loadd(0, to, out_bytes);
            if (two) _tile_loadd(1, to + 16, out_bytes);
            if (three) _tile_loadd(2, to + 32, out_bytes);
            if (four) _tile_loadd(3, to + 48, out_bytes);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t i = 0; i < k; i += 32) {
            const uint16_t* from = b + 2 * column + i * ldb;
            _tile_loadd(4, a + i, a_bytes);
            _tile_loadd(6, from, b_bytes);
            _tile_dpbf16ps(0, 4, 6);
            if (two) {
                _tile_loadd(7, from + 32, b_bytes);
                _tile_dpbf16ps(1, 4, 7);
            }
            if (three) {
                _tile_loadd(6, from + 64, b_bytes);
                _tile_dpbf16ps(2, 4, 6);
            }
            if (four) {
                _tile_loadd(7, from + 96, b_bytes);
                _tile_dpbf16ps(3, 4, 7);
            }
        }
        _tile_stored(0, to, out_bytes);
        if (two) _tile_stored(1, to + 16, out_bytes);
        if (three) _tile_stored(2, to + 32, out_bytes);
        if (four) _tile_stored(3, to + 48, out_bytes);
    }
    compiler_barrier();
}

// ---- few queries, in place ----
//
// For a group of queries (a decoding row's heads) nothing is gained by repacking a tile for others. Keys times queries,
// rather than queries times keys, takes the keys as they lie in the cache, 16 cells to a tile register; a product is the
// same bits whichever factor comes first, and so are its sums. Values are interleaved by pairs, 32 at a time, just before
// they are used, so that they stay in the first cache.
//
// Tiles 0 … 3 are for sums of weighted values and 4 for weights, with a row for each query; 5 … 7 have 16 rows.

INLINE bool reads_in_place(const AttentionScratch<uint16_t>&, const CacheLayer& c, int64_t queries) {
    return c.format == CacheFormat::bf16 && queries <= kGroupQueries && c.head_dim % 32 == 0 && c.block_size % 16 == 0;
}

// Where the queries wait as columns, [head / 2][16][2]; and 32 values by pairs, [16][64][2], twice: in what a repacked
// tile would fill. (Its padding must stay zero, but a head_dim that is taken in place has none.)
INLINE uint16_t* query_columns(const AttentionScratch<uint16_t>& s) { return s.cells; }
INLINE uint16_t* value_pairs(const AttentionScratch<uint16_t>& s, int64_t turn) {
    return s.keys + turn % 2 * (32 * 64);  // and on into s.values if the head is that small
}

static void begin_products(const AttentionScratch<uint16_t>& s, int64_t queries, bool in_place) {
    if (!in_place) return configure_tiles(min_of(queries, kGroupQueries), true);
    TileConfig config;
    for (int tile = 0; tile < 8; tile++) {
        config.row_bytes[tile] = 64;
        config.rows[tile] = static_cast<uint8_t>(tile < 5 ? queries : 16);
    }
    configure(config);
    for (int64_t w = 0; w < s.head / 2; w += kWidth) {
        vf square[kWidth];
        UNROLL
        for (int i = 0; i < kWidth; i++) square[i] = load_as<vf>(s.queries + i * s.head + 2 * w);
        transpose(square);
        UNROLL
        for (int i = 0; i < kWidth; i++) store_as(query_columns(s) + (w + i) * 32, square[i]);
    }
}

INLINE void end_products(const AttentionScratch<uint16_t>&) { _tile_release(); }

// rows[q][0 … 15] = square[0 … 15][q] for the first queries, rounded up to four.
INLINE void columns_to_rows(const float* square, int64_t queries, float* rows) {
    for (int64_t q = 0; q < queries; q += 4) {
        __m512 quarter[4];  // number j has rows j, 4 + j, 8 + j and 12 + j of four columns
        UNROLL
        for (int j = 0; j < 4; j++) {
            const float* from = square + j * 16 + q;
            quarter[j] = _mm512_castps128_ps512(_mm_loadu_ps(from));
            quarter[j] = _mm512_mask_broadcast_f32x4(quarter[j], 0x00f0, _mm_loadu_ps(from + 4 * 16));
            quarter[j] = _mm512_mask_broadcast_f32x4(quarter[j], 0x0f00, _mm_loadu_ps(from + 8 * 16));
            quarter[j] = _mm512_mask_broadcast_f32x4(quarter[j], 0xf000, _mm_loadu_ps(from + 12 * 16));
        }
        const auto a = (__m512d)_mm512_unpacklo_ps(quarter[0], quarter[1]);
        const auto b = (__m512d)_mm512_unpackhi_ps(quarter[0], quarter[1]);
        const auto c = (__m512d)_mm512_unpacklo_ps(quarter[2], quarter[3]);
        const auto d = (__m512d)_mm512_unpackhi_ps(quarter[2], quarter[3]);
        float* to = rows + q * kKeyTile;
        store(to, (vf)_mm512_unpacklo_pd(a, c));
        store(to + kKeyTile, (vf)_mm512_unpackhi_pd(a, c));
        store(to + 2 * kKeyTile, (vf)_mm512_unpacklo_pd(b, d));
        store(to + 3 * kKeyTile, (vf)_mm512_unpackhi_pd(b, d));
    }
}

// s.scores[queries][kKeyTile] of the keys; those beyond the last one mean nothing.
INLINE void score_in_place(const KeyTile& k, const AttentionScratch<uint16_t>& s, int64_t queries) {
    float* squares = s.scores + kGroupQueries * kKeyTile;  // [kKeyTile][16]
    const int64_t steps = s.head / 32, bytes = s.head * 2;
    compiler_barrier();
    for (int64_t key = 0; key < k.count; key += 16) {
        const char* keys = key_at(k.cells, k.start + key);
        const int64_t ahead = next_from(k, key);
        _tile_zero(7);
        for (int64_t step = 0; step < steps; step++) {
            _tile_loadd(5, keys + step * 64, bytes);
            _tile_loadd(6, query_columns(s) + step * 512, 64);
            _tile_dpbf16ps(7, 5, 6);
            fetch(keys + step * 1024, ahead, 1024);
        }
        _tile_stored(7, squares + key * 16, 64);
    }
    compiler_barrier();
    for (int64_t key = 0; key < k.count; key += 16) columns_to_rows(squares + key * 16, queries, s.scores + key);
}

// Values `first` … first + 31, columns [column, column + 64) as far as there are any, by pairs to `to` [16][64][2].
INLINE void pair_values(const KeyTile& k, int64_t first, int64_t column, int64_t head, uint16_t* to) {
    const int64_t columns = min_of(64, head - column), left = k.count - first;
    for (int64_t key = 0; key < 32; key += 16) {
        if (key >= left) {
            for (int64_t i = key * 64; i < 32 * 64; i += 2 * kWidth) store_as(to + i, vi{});
            return;
        }
        const char* cell = value_at(k.cells, k.start + first + key) + 2 * column;
        const int64_t ahead = next_from(k, first + key);
        for (int64_t i = key; i < key + 16; i += 2, cell += 4 * head) {
            uint16_t* pair = to + i * 64;
            const auto* even = reinterpret_cast<const uint16_t*>(cell);
            for (int64_t d = 0; d < columns; d += 32) {
                const __m512i a = i < left ? load_as<__m512i>(even + d) : __m512i{};
                const __m512i b = i + 1 < left ? load_as<__m512i>(even + head + d) : __m512i{};
                store_pairs(a, b, pair + 2 * d);
            }
            fetch(even, ahead, 2 * columns);
            fetch(even + head, ahead, 2 * columns);
        }
    }
}

// p.values += s.weights · the keys' values, for all queries.
INLINE void add_in_place(const KeyTile& k, const AttentionScratch<uint16_t>& s, const Partials& p, int64_t) {
    const int64_t row_bytes = s.head * 4;
    for (int64_t column = 0; column < s.head; column += 64) {
        const bool wide = column + 32 < s.head;
        float* sums = p.values + column;
        pair_values(k, 0, column, s.head, value_pairs(s, 0));
        compiler_barrier();
        _tile_loadd(0, sums, row_bytes);
        _tile_loadd(1, sums + 16, row_bytes);
        if (wide) {
            _tile_loadd(2, sums + 32, row_bytes);
            _tile_loadd(3, sums + 48, row_bytes);
        }
        for (int64_t key = 0; key < k.count; key += 32) {
            // The next pairs first: these ones are on their way to where tile registers load from.
            if (key + 32 < k.count) pair_values(k, key + 32, column, s.head, value_pairs(s, key / 32 + 1));
            compiler_barrier();
            const uint16_t* values = value_pairs(s, key / 32);
            _tile_loadd(4, s.weights + key, kKeyTile * 2);
            _tile_loadd(5, values, 256);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, values + 32, 256);
            _tile_dpbf16ps(1, 4, 6);
            if (!wide) continue;
            _tile_loadd(5, values + 64, 256);
            _tile_dpbf16ps(2, 4, 5);
            _tile_loadd(6, values + 96, 256);
            _tile_dpbf16ps(3, 4, 6);
        }
        _tile_stored(0, sums, row_bytes);
        _tile_stored(1, sums + 16, row_bytes);
        if (wide) {
            _tile_stored(2, sums + 32, row_bytes);
            _tile_stored(3, sums + 48, row_bytes);
        }
        compiler_barrier();
    }
}
