// A tile of keys and values in scratch memory, and the queries that meet it, as attention.inl says. Part of kernels.cpp.

constexpr int64_t kGroupQueries = 16;  // queries that meet a tile together: a tile register's rows
constexpr int64_t kKeyStep = 32;       // keys that a tile register takes at a time

// A query head over some keys: in memory, maxima [queries], sums [queries], weighted values [queries][head].
struct Partials {
    float *maximum, *sum, *values;

    Partials(float* memory, int64_t queries) : maximum(memory), sum(memory + queries), values(memory + 2 * queries) {}
};

INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t rounded_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

template <class T>
struct AttentionScratch {
    static constexpr int64_t kPair = sizeof(T) == 2 ? 2 : 1;

    int64_t head, room;   // padded head_dim, padded number of queries
    T *keys, *values;     // [head / kPair][kKeyTile][kPair], [kKeyTile / kPair][head][kPair]
    T* queries;           // [room][head]
    float* scores;        // [2][kGroupQueries][kKeyTile]: one group's, and the next one's
    T* weights;           // [kGroupQueries][kKeyTile]
    float* lanes;         // [room][16]: each query's sum of weights, not yet summed over the lanes
    float *split, *total;  // Partials of room queries
    T* cells;             // [kKeyTile][head_dim]: of an 8-bit cache

    AttentionScratch(float* memory, int64_t num_queries, int64_t head_dim) {
        head = padded_head(head_dim);
        room = rounded_up(num_queries, kGroupQueries);
        keys = reinterpret_cast<T*>(memory);  // keys and values first: their padding stays where it is, and zero
        values = keys + head * kKeyTile;
        queries = values + head * kKeyTile;
        weights = queries + room * head;
        scores = reinterpret_cast<float*>(weights + kGroupQueries * kKeyTile);
        lanes = scores + 2 * kGroupQueries * kKeyTile;
        split = lanes + room * 16;
        total = split + room * partial_size(head_dim);
        cells = reinterpret_cast<T*>(total + room * partial_size(head_dim));
    }
};

// ---- repacking ----

// Keys, or values, that a tile will need soon, fetched a few cells at a time while this one is repacked: all at once,
// they would fill the processor's queue for memory, and it would wait.
struct CellsAhead {
    const char* cells;  // of the layer
    int64_t cell_bytes, head_bytes, block_bytes, block_size;
    const int32_t* block_table;
    int64_t head, position, end;
    const char* at = nullptr;
    int64_t in_block = 0;  // cells from `at` on

    INLINE void some(CellsAhead& a, int64_t count) {
        for (; count > 0 && a.position < a.end; count--, a.position++) {
            if (a.in_block == 0) {
                const int64_t offset = a.position % a.block_size;
                a.at = a.cells + a.block_table[a.position / a.block_size] * a.block_bytes + a.head * a.head_bytes +
                       offset * a.cell_bytes;
                a.in_block = a.block_size - offset;
            }
            for (int64_t i = 0; i < a.cell_bytes; i += 64) __builtin_prefetch(a.at + i, 0, 2);
            a.at += a.cell_bytes;
            a.in_block--;
        }
    }
};

// keys [from, from + count) of one kv head, within one block, into lanes [lane, …) of the tile; for each of them, fetches
// `each` cells ahead.
template <class T>
INLINE void pack_keys(const T* from, int64_t count, int64_t head_dim, T* keys, int64_t lane, CellsAhead& ahead,
                      int64_t each) {
    constexpr int64_t kPair = AttentionScratch<T>::kPair;  // numbers in a word of 4 bytes
    const int64_t words = head_dim / kPair;
    int64_t j = 0;
    for (; j + kWidth <= count; j += kWidth) {
        const T* row = from + j * head_dim;
        int64_t w = 0;
        for (; w + kWidth <= words; w += kWidth) {
            vf square[kWidth];
            UNROLL
            for (int i = 0; i < kWidth; i++) square[i] = load_as<vf>(row + i * head_dim + w * kPair);
            transpose(square);
            UNROLL
            for (int i = 0; i < kWidth; i++) store_as(keys + ((w + i) * kKeyTile + lane + j) * kPair, square[i]);
            CellsAhead::some(ahead, (each * kWidth * kWidth + words - 1) / words);
        }
        for (int64_t d = w * kPair; d < head_dim; d++)
            for (int i = 0; i < kWidth; i++)
                keys[(d / kPair * kKeyTile + lane + j + i) * kPair + d % kPair] = row[i * head_dim + d];
    }
    for (; j < count; j++)
        for (int64_t d = 0; d < head_dim; d++)
            keys[(d / kPair * kKeyTile + lane + j) * kPair + d % kPair] = from[j * head_dim + d];
}

INLINE void pack_values(const float* from, int64_t count, int64_t head_dim, float* values, int64_t head, int64_t lane,
                        CellsAhead& ahead, int64_t each) {
    for (int64_t j = 0; j < count; j++) {
        __builtin_memcpy(values + (lane + j) * head, from + j * head_dim, static_cast<size_t>(head_dim) * 4);
        CellsAhead::some(ahead, each);
    }
}

INLINE void pack_values(const uint16_t* from, int64_t count, int64_t head_dim, uint16_t* values, int64_t head,
                        int64_t lane, CellsAhead& ahead, int64_t each) {
    for (int64_t j = 0; j < count;) {
        CellsAhead::some(ahead, 2 * each);
        const uint16_t* row = from + j * head_dim;
        uint16_t* to = values + (lane + j) / 2 * head * 2;
        int64_t d = 0;
        if ((lane + j) % 2 == 0 && j + 1 < count) {  // a pair of keys
            for (; d + kWidth <= head_dim; d += kWidth) {
                const vu even = __builtin_convertvector(load_as<vh>(row + d), vu);
                const vu odd = __builtin_convertvector(load_as<vh>(row + head_dim + d), vu);
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
    constexpr int64_t kPair = AttentionScratch<T>::kPair;
    for (; lane % kPair != 0 && lane < end; lane++)
        for (int64_t d = 0; d < head; d++) values[(lane / kPair * head + d) * kPair + lane % kPair] = 0;
    for (int64_t i = lane * head; i < end * head; i++) values[i] = 0;
}

// Fills scratch with keys [start, start + count) of the sequence, values followed by zeros up to the next key step.
// Meanwhile fetches the tile after it, at the end of the context the first one of kv head `next`, if that is not −1.
template <class T>
static void load_tile(const CacheLayer& c, const QueryTile& tile, int64_t kv_head, int64_t next, int64_t start,
                      int64_t count, int64_t context, const AttentionScratch<T>& s) {
    const char *keys = static_cast<const char*>(c.keys), *values = static_cast<const char*>(c.values);
    const int64_t bytes = cell_bytes(c.format, c.head_dim), head_bytes = c.block_size * bytes;
    const auto numbers = [&](const char* cells, [[maybe_unused]] int64_t cells_count) {
        if constexpr (sizeof(T) == 2)
            if (c.format == CacheFormat::int8) {
                dequantize_cells(cells, cells_count, c.head_dim, s.cells);
                return static_cast<const T*>(s.cells);
            }
        return reinterpret_cast<const T*>(cells);
    };
    const bool goes_on = start + kKeyTile < context;
    const int64_t head = goes_on ? kv_head : next, first = goes_on ? start + kKeyTile : 0;
    const int64_t end = head < 0 ? first : min_of(first + kKeyTile, context), each = (end - first + count - 1) / count;
    CellsAhead keys_ahead{keys, bytes, head_bytes, c.kv_heads * head_bytes, c.block_size, tile.block_table, head, first, end};
    CellsAhead values_ahead = keys_ahead;
    values_ahead.cells = values;
    for (int64_t lane = 0; lane < count;) {
        const int64_t position = start + lane, offset = position % c.block_size, in_block = c.block_size - offset;
        const int64_t run = min_of(count - lane, in_block);
        const int64_t at = (tile.block_table[position / c.block_size] * c.kv_heads + kv_head) * head_bytes + offset * bytes;
        // The rest of the block, whatever is there: whole squares are faster, and scores of unseen keys go unused.
        const int64_t most = min_of(kKeyTile - lane, in_block);
        pack_keys(numbers(keys + at, most), most, c.head_dim, s.keys, lane, keys_ahead, each);
        pack_values(numbers(values + at, run), run, c.head_dim, s.values, s.head, lane, values_ahead, each);
        lane += run;
    }
    clear_values(s.values, s.head, count, rounded_up(count, kKeyStep));
}

template <class T>
static void load_queries(const Attention& a, const QueryTile& tile, int64_t kv_head, const AttentionScratch<T>& s) {
    const int64_t group = a.heads / a.cache.kv_heads, head_dim = a.cache.head_dim;
    for (int64_t r = 0; r < tile.rows; r++)  // the heads of a group lie side by side
        for (int64_t h = 0; h < group; h++) {
            const float* from = a.q + (tile.row + r) * a.q_stride + (kv_head * group + h) * head_dim;
            T* to = s.queries + (r * group + h) * s.head;
            put_all(to, from, head_dim);
            for (int64_t d = head_dim; d < s.head; d++) to[d] = 0;
        }
}
