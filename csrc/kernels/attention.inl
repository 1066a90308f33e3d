// Paged attention with an online softmax. Part of kernels.cpp.
//
//   keys       0      64     128           512           1024         position of the row
//              |tile  |tile  |  …   |tile  |tile  |  …   |   …   |part of a tile|
//              '------- split 0 -----------'------ split 1 -----'--- split 2 ---'
//
// Tiles and splits lie at fixed absolute positions. A split is summed up by itself, tile after tile; splits are
// merged in order. A score is reduced over head_dim in ascending order, a weighted value over the keys in ascending
// order, in one accumulator each. So a row's result is the same whoever computes which splits, and whatever rows
// keep it company. A tile of K (transposed) and V is widened into scratch once for all query rows and heads of the
// group; no row reads a key beyond its own position, whatever lies there.

struct AttentionScratch {
    float *keys, *values;   // [head_dim][kKeyTile], [kKeyTile][padded head_dim]
    float *queries;         // [queries][head_dim]
    float *scores;          // [queries][kKeyTile]
    float *split, *total;   // [queries][partial_size]

    AttentionScratch(float* memory, int64_t queries_, int64_t head_dim) {
        const int64_t head = padded_head(head_dim), partial = queries_ * partial_size(head_dim);
        keys = memory;
        values = keys + head * kKeyTile;
        queries = values + head * kKeyTile;
        scores = queries + queries_ * head;
        split = scores + queries_ * kKeyTile;
        total = split + partial;
    }
};

INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

// keys [from, from + count) of one kv head, a run within one block, into lanes [lane, …) of the transposed tile.
template <class T>
INLINE void transpose_keys(const T* from, int64_t count, int64_t head_dim, float* keys, int64_t lane) {
    int64_t j = 0;
    for (; j + kWidth <= count; j += kWidth) {
        int64_t d = 0;
        for (; d + kWidth <= head_dim; d += kWidth) {
            vf square[kWidth];
            UNROLL
            for (int i = 0; i < kWidth; i++) square[i] = load_wide(from + (j + i) * head_dim + d);
            transpose(square);
            UNROLL
            for (int i = 0; i < kWidth; i++) store(keys + (d + i) * kKeyTile + lane + j, square[i]);
        }
        for (; d < head_dim; d++)
            UNROLL
            for (int i = 0; i < kWidth; i++) keys[d * kKeyTile + lane + j + i] = wide(from[(j + i) * head_dim + d]);
    }
    for (; j < count; j++)
        for (int64_t d = 0; d < head_dim; d++) keys[d * kKeyTile + lane + j] = wide(from[j * head_dim + d]);
}

// Fills scratch with keys [start, start + count) of the sequence. Lanes from count on keep what they had: scores are
// computed for them, and never used.
template <class T>
static void load_tile(const CacheLayer& c, const QueryTile& tile, int64_t kv_head, int64_t start, int64_t count,
                      const AttentionScratch& s) {
    const int64_t head = padded_head(c.head_dim);
    for (int64_t lane = 0; lane < count;) {
        const int64_t position = start + lane, offset = position % c.block_size;
        const int64_t run = min_of(count - lane, c.block_size - offset);
        const int64_t block = tile.block_table[position / c.block_size];
        const int64_t cell = ((block * c.kv_heads + kv_head) * c.block_size + offset) * c.head_dim;
        transpose_keys(static_cast<const T*>(c.keys) + cell, run, c.head_dim, s.keys, lane);
        const T* value = static_cast<const T*>(c.values) + cell;
        for (int64_t j = 0; j < run; j++)
            for (int64_t d = 0; d < c.head_dim; d++)
                s.values[(lane + j) * head + d] = wide(value[j * c.head_dim + d]);
        lane += run;
    }
}

// scores[R][kKeyTile] = queries · keys
template <int R>
INLINE void score_rows(const float* queries, int64_t head_dim, const float* keys, float* scores) {
    constexpr int V = tile_vectors<R>();
    for (int64_t lane = 0; lane < kKeyTile; lane += V * kWidth) {
        vf acc[R][V] = {};
        accumulate<R, V>(queries, head_dim, keys + lane, kKeyTile, head_dim, acc);
        UNROLL
        for (int r = 0; r < R; r++)
            UNROLL
            for (int v = 0; v < V; v++) store(scores + r * kKeyTile + lane + v * kWidth, acc[r][v]);
    }
}

// One row's scores over `count` keys → weights e^(score − maximum) in place; updates maximum and sum, and gives
// what the values summed so far must be scaled by.
INLINE float soften(float* scores, float scale, int64_t count, float* partial) {
    constexpr int V = kKeyTile / kWidth;
    vf score[V], largest = splat(-__builtin_inff());
    vi lane;
    UNROLL
    for (int i = 0; i < kWidth; i++) lane[i] = i;
    UNROLL
    for (int v = 0; v < V; v++) {
        const vi seen = lane < splat(static_cast<int32_t>(count - v * kWidth));
        score[v] = seen ? load(scores + v * kWidth) * scale : splat(-__builtin_inff());
        largest = max(score[v], largest);
    }
    const float before = partial[0], tile_max = max_lanes(largest);
    const float maximum = before > tile_max ? before : tile_max;
    vf sum = {};
    UNROLL
    for (int v = 0; v < V; v++) {
        const vf weight = exp(score[v] - maximum);
        sum += weight;
        store(scores + v * kWidth, weight);
    }
    const float shrink = exp(before - maximum);
    partial[0] = maximum;
    partial[1] = partial[1] * shrink + sum_lanes(sum);
    return shrink;
}

// partial's values [R] = values · shrink + weights · V over `count` keys.
template <int R, int V>
INLINE void weigh_columns(const float* weights, const float* values, int64_t head, int64_t count,
                          const float* shrink, float* sums, int64_t stride) {
    vf acc[R][V];
    UNROLL
    for (int r = 0; r < R; r++)
        UNROLL
        for (int v = 0; v < V; v++) acc[r][v] = load(sums + r * stride + v * kWidth) * shrink[r];
    accumulate<R, V>(weights, kKeyTile, values, head, count, acc);
    UNROLL
    for (int r = 0; r < R; r++)
        UNROLL
        for (int v = 0; v < V; v++) store(sums + r * stride + v * kWidth, acc[r][v]);
}

template <int R>
INLINE void weigh_rows(const float* weights, const float* values, int64_t head, int64_t count, const float* shrink,
                       float* sums, int64_t stride) {
    constexpr int V = kWidth == 16 ? 4 : 2;
    int64_t d = 0;
    for (; d + V * kWidth <= head; d += V * kWidth)
        weigh_columns<R, V>(weights, values + d, head, count, shrink, sums + d, stride);
    for (; d < head; d += kWidth) weigh_columns<R, 1>(weights, values + d, head, count, shrink, sums + d, stride);
}

// Queries [first, first + R) against the tile in scratch; all see `count` keys of it.
template <int R>
static void attend_rows(const AttentionScratch& s, int64_t head_dim, float scale, int64_t first, int64_t count) {
    const int64_t head = padded_head(head_dim), stride = partial_size(head_dim);
    float* scores = s.scores + first * kKeyTile;
    float shrink[R];
    score_rows<R>(s.queries + first * head_dim, head_dim, s.keys, scores);
    UNROLL
    for (int r = 0; r < R; r++)
        shrink[r] = soften(scores + r * kKeyTile, scale, count, s.split + (first + r) * stride);
    weigh_rows<R>(scores, s.values, head, count, shrink, s.split + first * stride + 2, stride);
}

// Merges the next split into the total, in place.
static void merge(float* total, const float* split, int64_t head) {
    const float maximum = total[0] > split[0] ? total[0] : split[0];
    const float a = exp(total[0] - maximum), b = exp(split[0] - maximum);
    total[0] = maximum;
    total[1] = total[1] * a + split[1] * b;
    for (int64_t d = 0; d < head; d++) total[2 + d] = total[2 + d] * a + split[2 + d] * b;
}

static void copy_partial(float* to, const float* from, int64_t head) {
    __builtin_memcpy(to, from, static_cast<size_t>(2 + head) * 4);
}

// Query number i of a tile is (row i / group, head i % group).
static void write_output(const Attention& a, const QueryTile& tile, int64_t kv_head, int64_t query,
                         const float* total) {
    const int64_t group = a.heads / a.cache.kv_heads, head_dim = a.cache.head_dim;
    const int64_t at = (tile.row + query / group) * a.out_stride + (kv_head * group + query % group) * head_dim;
    const float scale = 1.f / total[1];
    for (int64_t d = 0; d < head_dim; d++) {
        const float y = total[2 + d] * scale;
        if (a.out_number == Number::f32)
            static_cast<float*>(a.out)[at + d] = y;
        else
            static_cast<uint16_t*>(a.out)[at + d] = narrow(y);
    }
}

static void load_queries(const Attention& a, const QueryTile& tile, int64_t kv_head, const AttentionScratch& s) {
    const int64_t group = a.heads / a.cache.kv_heads, head_dim = a.cache.head_dim;
    for (int64_t r = 0; r < tile.rows; r++)  // the heads of a group lie side by side
        __builtin_memcpy(s.queries + r * group * head_dim,
                         a.q + (tile.row + r) * a.q_stride + kv_head * group * head_dim,
                         static_cast<size_t>(group * head_dim) * 4);
}

// Sums up one split for every query of the tile into s.split. Queries that see none of it are not touched.
static void sum_split(const Attention& a, const QueryTile& tile, int64_t kv_head, int64_t split,
                      const AttentionScratch& s) {
    const int64_t group = a.heads / a.cache.kv_heads, head_dim = a.cache.head_dim;
    const int64_t queries = tile.rows * group, stride = partial_size(head_dim);
    for (int64_t i = 0; i < queries; i++) {
        float* partial = s.split + i * stride;
        partial[0] = -__builtin_inff();
        for (int64_t d = 1; d < stride; d++) partial[d] = 0;
    }
    const int64_t context = tile.positions[tile.rows - 1] + 1;
    const int64_t end = min_of(context, (split + 1) * kContextSplit);
    for (int64_t start = split * kContextSplit; start < end; start += kKeyTile) {
        const int64_t keys = min_of(kKeyTile, end - start);
        if (a.cache.number == Number::f32)
            load_tile<float>(a.cache, tile, kv_head, start, keys, s);
        else
            load_tile<uint16_t>(a.cache, tile, kv_head, start, keys, s);
        // Runs of queries that see equally many keys of this tile.
        for (int64_t i = 0; i < queries;) {
            const auto count_of = [&](int64_t query) {
                return min_of(keys, tile.positions[query / group] + 1 - start);
            };
            const int64_t count = count_of(i);
            int64_t run = 1;
            while (run < kTileRows && i + run < queries && count_of(i + run) == count) run++;
            if (count > 0) switch (run) {
                    case 1: attend_rows<1>(s, head_dim, a.scale, i, count); break;
                    case 2: attend_rows<2>(s, head_dim, a.scale, i, count); break;
                    case 3: attend_rows<3>(s, head_dim, a.scale, i, count); break;
                    case 4: attend_rows<4>(s, head_dim, a.scale, i, count); break;
                    case 5: attend_rows<5>(s, head_dim, a.scale, i, count); break;
                    default: attend_rows<6>(s, head_dim, a.scale, i, count); break;
                }
            i += run;
        }
    }
}

// Whether a query sees any key of the split.
INLINE bool sees(const QueryTile& tile, int64_t query, int64_t group, int64_t split) {
    return tile.positions[query / group] >= split * kContextSplit;
}

static void attend(const Attention& a, const QueryTile& tile, int64_t kv_head, float* scratch) {
    const int64_t group = a.heads / a.cache.kv_heads, head_dim = a.cache.head_dim, head = padded_head(head_dim);
    const int64_t queries = tile.rows * group, stride = partial_size(head_dim);
    const AttentionScratch s(scratch, queries, head_dim);
    load_queries(a, tile, kv_head, s);
    const int64_t splits = tile.positions[tile.rows - 1] / kContextSplit + 1;
    for (int64_t split = 0; split < splits; split++) {
        sum_split(a, tile, kv_head, split, s);
        for (int64_t i = 0; i < queries; i++) {
            if (split == 0)
                copy_partial(s.total + i * stride, s.split + i * stride, head);
            else if (sees(tile, i, group, split))
                merge(s.total + i * stride, s.split + i * stride, head);
        }
    }
    for (int64_t i = 0; i < queries; i++) write_output(a, tile, kv_head, i, s.total + i * stride);
}

static void attend_split(const Attention& a, const QueryTile& tile, int64_t kv_head, int64_t split, float* scratch,
                         float* partials) {
    const int64_t group = a.heads / a.cache.kv_heads, head_dim = a.cache.head_dim, head = padded_head(head_dim);
    const int64_t queries = tile.rows * group, stride = partial_size(head_dim);
    const AttentionScratch s(scratch, queries, head_dim);
    load_queries(a, tile, kv_head, s);
    sum_split(a, tile, kv_head, split, s);
    for (int64_t i = 0; i < queries; i++)
        if (sees(tile, i, group, split)) copy_partial(partials + i * stride, s.split + i * stride, head);
}

static void merge_splits(const Attention& a, const QueryTile& tile, int64_t kv_head, float* partials) {
    const int64_t group = a.heads / a.cache.kv_heads, head = padded_head(a.cache.head_dim);
    const int64_t queries = tile.rows * group, stride = partial_size(a.cache.head_dim);
    for (int64_t i = 0; i < queries; i++) {
        float* total = partials + i * stride;
        for (int64_t split = 1; sees(tile, i, group, split); split++)
            merge(total, partials + (split * queries + i) * stride, head);
        write_output(a, tile, kv_head, i, total);
    }
}
