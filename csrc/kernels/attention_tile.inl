// A tile of keys and values in scratch memory, and the queries that meet it, as attention.inl says. Part of kernels.cpp.

constexpr int64_t kKeyStep = 32;  // keys that a tile register takes at a time

// A query head over some keys: in memory, maxima [queries], sums [queries], weighted values [queries][head].
struct Partials {
    float *maximum, *sum, *values;

    Partials(float* memory, int64_t queries) : maximum(memory), sum(memory + queries), values(memory + 2 * queries) {}
};

template <class T>
struct AttentionScratch {
    int64_t head, room;   // padded head_dim, padded number of queries
    T *keys, *values;     // [head / kPair][kKeyTile][kPair], [kKeyTile / kPair][head][kPair]
    T* queries;           // [room][head]
    float* scores;        // [2][kGroupQueries][kKeyTile]: one group's; and room for as many
    T* weights;           // [kGroupQueries][kKeyTile]: one group's
    float* lanes;         // [room][16]: each query's sum of weights, not yet summed over the lanes
    int32_t* ends;        // [room]: a query sees the keys before that position
    float *split, *total;  // Partials of room queries
    T* cells;             // [kKeyTile][head_dim]: of an 8-bit cache

    AttentionScratch(float* memory, int64_t num_queries, int64_t head_dim) {
        head = padded_head(head_dim);
        room = rounded_up(num_queries, kGroupQueries);
        keys = reinterpret_cast<T*>(memory);  // keys and values first: their padding, if any, stays where it is, and zero
        values = keys + head * kKeyTile;
        queries = values + head * kKeyTile;
        weights = queries + room * head;
        scores = reinterpret_cast<float*>(weights + kGroupQueries * kKeyTile);
        lanes = scores + 2 * kGroupQueries * kKeyTile;
        ends = reinterpret_cast<int32_t*>(lanes + room * 16);
        split = lanes + room * 17;
        total = split + room * partial_size(head_dim);
        cells = reinterpret_cast<T*>(total + room * partial_size(head_dim));
    }
};

// ---- repacking ----

// The cells of one kv head of a sequence.
struct Cells {
    CacheLayer cache;
    const int32_t* block_table;
    int64_t kv_head;
};

// The cells of a position's key and value.
INLINE const char* key_at(const Cells& c, int64_t position) {
    const int64_t block = c.block_table[position / c.cache.block_size], in_block = position % c.cache.block_size;
    return keys_of(c.cache, block, c.kv_head) + in_block * cell_bytes(c.cache.format, c.cache.head_dim);
}
INLINE const char* value_at(const Cells& c, int64_t position) {
    return key_at(c, position) + c.cache.block_size * cell_bytes(c.cache.format, c.cache.head_dim);
}

// The keys [start, start + count) of a kv head, from a multiple of kKeyTile on; and those that come next, which are
// fetched meanwhile.
struct KeyTile {
    Cells cells;
    int64_t start, count;
    NextKeys next;
};

// How far from a key (and its value) of the tile, in bytes, that of the next tile lies; 0 if there is none.
INLINE int64_t next_from(const KeyTile& t, int64_t key) {
    const int64_t position = t.next.position + key;
    if (position >= t.next.end) return 0;
    return key_at({t.cells.cache, t.next.block_table, t.next.kv_head}, position) - key_at(t.cells, t.start + key);
}

INLINE void fetch(const void* from, int64_t distance, int64_t bytes) {
    const char* line = static_cast<const char*>(from) + distance;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(line + i, 0, 2);
}

// keys [from, from + count) of one kv head, within one block, into lanes [lane, …) of the tile.
template <class T>
INLINE void pack_keys(const T* from, int64_t count, int64_t head_dim, T* keys, int64_t lane) {
    const int64_t words = head_dim / kPair<T>;
    int64_t j = 0;
    for (; j + kWidth <= count; j += kWidth) {
        const T* row = from + j * head_dim;
        int64_t w = 0;
        for (; w + kWidth <= words; w += kWidth) {
            vf square[kWidth];
            UNROLL
            for (int i = 0; i < kWidth; i++) square[i] = load_as<vf>(row + i * head_dim + w * kPair<T>);
            transpose(square);
            UNROLL
            for (int i = 0; i < kWidth; i++) store_as(keys + ((w + i) * kKeyTile + lane + j) * kPair<T>, square[i]);
        }
        for (int64_t d = w * kPair<T>; d < head_dim; d++)
            for (int i = 0; i < kWidth; i++)
                keys[(d / kPair<T> * kKeyTile + lane + j + i) * kPair<T> + d % kPair<T>] = row[i * head_dim + d];
    }
    for (; j < count; j++)
        for (int64_t d = 0; d < head_dim; d++)
            keys[(d / kPair<T> * kKeyTile + lane + j) * kPair<T> + d % kPair<T>] = from[j * head_dim + d];
}

INLINE void pack_values(const float* from, int64_t count, int64_t head_dim, float* values, int64_t head, int64_t lane) {
    for (int64_t j = 0; j < count; j++)
        __builtin_memcpy(values + (lane + j) * head, from + j * head_dim, static_cast<size_t>(head_dim) * 4);
}

#if defined(__AVX512BW__)
// to[32][2] from 32 numbers of an even and of an odd key.
INLINE void store_pairs(__m512i even, __m512i odd, uint16_t* to) {
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // so that what two halves of lanes give lies in order
    even = _mm512_permutexvar_epi64(order, even);
    odd = _mm512_permutexvar_epi64(order, odd);
    store_as(to, _mm512_unpacklo_epi16(even, odd));
    store_as(to + 32, _mm512_unpackhi_epi16(even, odd));
}
#endif

INLINE void pack_values(const uint16_t* from, int64_t count, int64_t head_dim, uint16_t* values, int64_t head,
                        int64_t lane) {
    for (int64_t j = 0; j < count;) {
        const uint16_t* row = from + j * head_dim;
        uint16_t* to = values + (lane + j) / 2 * head * 2;
        int64_t d = 0;
        if ((lane + j) % 2 == 0 && j + 1 < count) {  // a pair of keys
#if defined(__AVX512BW__)
            for (; d + 2 * kWidth <= head_dim; d += 2 * kWidth)
                store_pairs(load_as<__m512i>(row + d), load_as<__m512i>(row + head_dim + d), to + 2 * d);
#endif
            for (; d + kWidth <= head_dim; d += kWidth) {
                const vu even = zero_extend(load_as<vh>(row + d));
                const vu odd = zero_extend(load_as<vh>(row + head_dim + d));
                store_as(to + 2 * d, even | odd << 16);
            }
            for (; d < head_dim; d++) {
                to[2 * d] = row[d];
                to[2 * d + 1] = row[head_dim + d];
            }
            j += 2;
        } else {
            for (; d < head_dim; d++) to[2 * d + (lane + j) % 2] = row[d];
            j++;
        }
    }
}

template <class T>
INLINE void clear_values(T* values, int64_t head, int64_t lane, int64_t end) {
    for (; lane % kPair<T> != 0 && lane < end; lane++)
        for (int64_t d = 0; d < head; d++) values[(lane / kPair<T> * head + d) * kPair<T> + lane % kPair<T>] = 0;
    for (int64_t i = lane * head; i < end * head; i++) values[i] = 0;
}

// Fills scratch with the tile's keys, and its values followed by zeros up to the next key step.
template <class T>
static void load_tile(const KeyTile& tile, const AttentionScratch<T>& s) {
    const CacheLayer& c = tile.cells.cache;
    const int64_t bytes = cell_bytes(c.format, c.head_dim);
    const auto numbers = [&](const char* from, [[maybe_unused]] int64_t cells_count) {
        if constexpr (sizeof(T) == 2)
            if (c.format == CacheFormat::int8) {
                dequantize_cells(from, cells_count, c.head_dim, s.cells);
                return static_cast<const T*>(s.cells);
            }
        return reinterpret_cast<const T*>(from);
    };
    for (int64_t lane = 0; lane < tile.count;) {
        const int64_t position = tile.start + lane, in_block = c.block_size - position % c.block_size;
        const int64_t run = min_of(tile.count - lane, in_block), ahead = next_from(tile, lane);
        // The rest of the block, whatever is there: whole squares are faster, and scores of unseen keys go unused.
        const int64_t most = min_of(kKeyTile - lane, in_block);
        const char *keys = key_at(tile.cells, position), *values = value_at(tile.cells, position);
        fetch(keys, ahead, run * bytes);
        pack_keys(numbers(keys, most), most, c.head_dim, s.keys, lane);
        fetch(values, ahead, run * bytes);
        pack_values(numbers(values, run), run, c.head_dim, s.values, s.head, lane);
        lane += run;
    }
    clear_values(s.values, s.head, tile.count, rounded_up(tile.count, kKeyStep));
}

template <class T>
static void load_queries(const Attention& a, const QueryTile& tile, int64_t kv_head, const AttentionScratch<T>& s) {
    const int64_t group = a.heads / a.cache.kv_heads, head_dim = a.cache.head_dim;
    for (int64_t r = 0; r < tile.rows; r++)  // the heads of a group lie side by side
        for (int64_t h = 0; h < group; h++) {
            const float* from = a.q + (tile.row + r) * a.q_stride + (kv_head * group + h) * head_dim;
            if (a.cos_sin) {
                rotate(from, a.cos_sin + (tile.row + r) * head_dim, head_dim / 2, s.split);  // which is free as yet
                from = s.split;
            }
            T* to = s.queries + (r * group + h) * s.head;
            put_all(to, from, head_dim);
            for (int64_t d = head_dim; d < s.head; d++) to[d] = 0;
            s.ends[r * group + h] = tile.positions[r] + 1;
        }
}
