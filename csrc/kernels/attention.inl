// Paged attention with an online softmax. Part of kernels.cpp.
//
//   keys       0        128       …        512              1024         position of the row
//              |  tile  |  tile  |  …  |  tile  |  tile  |  …   |   …   |part of a tile|
//              '----------- split 0 ------------'------ split 1 -----'--- split 2 ---'
//
// Tiles and splits lie at fixed absolute positions. A split is summed up by itself, tile after tile; splits are
// merged in order. So a row's result is the same whoever computes which splits, and whatever rows keep it company:
// for each query and tile, a score is reduced over head_dim and a weighted value over the keys in one order, by the
// same instructions for a single row as for many. A key that a query does not see has weight 0, which adds nothing;
// as long as all is finite, no row's result depends on what lies in the cache beyond its own position.
//
// A tile of K and V is repacked in scratch memory once for all query rows and heads of the group, so that queries
// times keys, and weights times values, are both products as the matrix kernels have them. A few queries use a
// float32 or bfloat16 cache where it lies. T is the number format of the tile: the cache's, or bfloat16 for an 8-bit
// cache. With bfloat16, queries and weights are rounded to it too. Maxima and exponents are base 2.

// ---- softmax ----

// Queries first … first + rows − 1 meet a tile together; each sees so many of its keys, the first ones, none fewer than
// the query before. Past the last query there are none: rows ≤ 0.
struct Group {
    int64_t first, rows;
    int64_t counts[kGroupQueries];

    int64_t most() const { return counts[rows - 1]; }
};

template <class T>
INLINE Group group_of(const AttentionScratch<T>& s, int64_t first, int64_t queries, int64_t start, int64_t keys) {
    Group group{first, min_of(kGroupQueries, queries - first), {}};
    for (int64_t r = 0; r < group.rows; r++) {
        const int64_t seen = s.ends[first + r] - start;
        group.counts[r] = seen < 0 ? 0 : min_of(keys, seen);
    }
    return group;
}

// s.scores → s.weights 2^(scale · score − maximum), or 0 for keys that a query does not see, up to a step of keys;
// updates maximum and sum, and scales the values summed so far. A larger score need not become the maximum at once: so
// far beyond it, weights keep their precision, and sums are seldom scaled. Whole: all see the whole tile.
template <bool Whole, class T>
INLINE void soften(const AttentionScratch<T>& s, const Group& group, const Partials& p, float scale) {
    constexpr float kBeyond = 8;  // of exponents
    vi lane;
    UNROLL
    for (int i = 0; i < kWidth; i++) lane[i] = i;
    const vf nothing = splat(-__builtin_inff()), factor = splat(scale);
    vf largest[kGroupQueries / kWidth][kWidth];
    for (int64_t r = 0; r < kGroupQueries; r++) largest[r / kWidth][r % kWidth] = nothing;
    for (int64_t r = 0; r < group.rows; r++) {
        const float* scores = s.scores + r * kKeyTile;
        const int64_t count = Whole ? kKeyTile : group.counts[r], whole = count / kWidth * kWidth;
        vf most = nothing;
        for (int64_t i = 0; i < whole; i += kWidth) most = max(load(scores + i), most);
        if (whole < count) {
            const vi seen = lane < splat(static_cast<int32_t>(count - whole));
            most = max(seen ? load(scores + whole) : nothing, most);
        }
        largest[r / kWidth][r % kWidth] = most;
    }
    float *maximum = p.maximum + group.first, shrink[kGroupQueries];
    for (int64_t r = 0; r < kGroupQueries; r += kWidth) {
        const vf before = load(maximum + r), now = max_of_rows(largest[r / kWidth]) * factor;
        const vf after = now > before + splat(kBeyond) ? now : before;
        store(shrink + r, (before == after) | (before == nothing) ? splat(1.f) : exp2(before - after));
        store(maximum + r, after);
    }
    const int64_t end = rounded_up(group.most(), kKeyStep);
    for (int64_t r = 0; r < group.rows; r++) {
        const float* scores = s.scores + r * kKeyTile;
        T* weights = s.weights + r * kKeyTile;
        float* lanes = s.lanes + (group.first + r) * 16;
        const int64_t count = Whole ? kKeyTile : group.counts[r], whole = count / kWidth * kWidth;
        const vf shift = splat(-maximum[r]);
        vf sum = load(lanes);
        if (shrink[r] != 1) {
            sum *= shrink[r];
            float* values = p.values + (group.first + r) * s.head;
            for (int64_t d = 0; d < s.head; d += kWidth) store(values + d, load(values + d) * shrink[r]);
        }
        int64_t i = 0;
        for (; i + 2 * kWidth <= whole; i += 2 * kWidth) {
            const vf one = exp2<T>(fma(load(scores + i), factor, shift));
            const vf other = exp2<T>(fma(load(scores + i + kWidth), factor, shift));
            sum += one;
            sum += other;
            put(weights + i, one, other);
        }
        for (; i < whole; i += kWidth) {
            const vf weight = exp2<T>(fma(load(scores + i), factor, shift));
            sum += weight;
            put(weights + i, weight);
        }
        if (i < count) {
            const vi seen = lane < splat(static_cast<int32_t>(count - i));
            const vf weight = seen ? exp2<T>(fma(load(scores + i), factor, shift)) : vf{};
            sum += weight;
            put(weights + i, weight);
            i += kWidth;
        }
        if (!Whole)
            for (; i < end; i += kWidth) put(weights + i, vf{});
        store(lanes, sum);
    }
}

template <class T>
INLINE void soften(const AttentionScratch<T>& s, const Group& group, const Partials& p, float scale) {
    if (group.counts[0] == kKeyTile)
        soften<true>(s, group, p, scale);
    else
        soften<false>(s, group, p, scale);
}

// ---- splits ----

// Sums up one split for every query of the tile into s.split. What it leaves for queries that see none of it means
// nothing.
template <class T>
static void sum_split(const Attention& a, const QueryTile& tile, int64_t kv_head, int64_t split, const NextKeys& next,
                      const AttentionScratch<T>& s) {
    const int64_t head_dim = a.cache.head_dim, queries = tile.rows * (a.heads / a.cache.kv_heads);
    const float scale = a.scale * 1.44269504f;  // to base 2
    const Partials p(s.split, s.room);
    for (int64_t i = 0; i < s.room; i++) p.maximum[i] = -__builtin_inff();
    for (int64_t i = 0; i < s.room * 16; i++) s.lanes[i] = 0;
    const int64_t context = tile.positions[tile.rows - 1] + 1;
    const int64_t end = min_of(context, (split + 1) * kContextSplit);
    const bool in_place = reads_in_place(s, a.cache, queries);
    if (in_place)  // or the first tile's values are not added to anything
        for (int64_t i = 0; i < s.room * s.head; i++) p.values[i] = 0;
    begin_products(s, queries, in_place);
    for (int64_t start = split * kContextSplit; start < end; start += kKeyTile) {
        const int64_t after = start + kKeyTile, keys = min_of(kKeyTile, end - start);
        const NextKeys own_next{tile.block_table, kv_head, after, end};
        const KeyTile key_tile{{a.cache, tile.block_table, kv_head}, start, keys, after < end ? own_next : next};
        if (in_place) {
            score_in_place(key_tile, s, queries);
            soften(s, group_of(s, 0, queries, start, keys), p, scale);
            add_in_place(key_tile, s, p, queries);
            continue;
        }
        load_tile<T>(key_tile, s);
        for (int64_t first = 0; first < queries; first += kGroupQueries) {
            const Group group = group_of(s, first, queries, start, keys);
            if (group.most() == 0) continue;  // they see nothing yet
            multiply<false>(group.rows, s.queries + first * s.head, s.head, s.keys, kKeyTile, head_dim, s.scores, kKeyTile,
                            rounded_up(group.most(), kWidth));
            soften(s, group, p, scale);
            float* values = p.values + first * s.head;
            if (start % kContextSplit == 0)
                multiply<false>(group.rows, s.weights, kKeyTile, s.values, s.head, group.most(), values, s.head, s.head);
            else
                multiply<true>(group.rows, s.weights, kKeyTile, s.values, s.head, group.most(), values, s.head, s.head);
        }
    }
    end_products(s);
    for (int64_t i = 0; i < queries; i++) p.sum[i] = sum_lanes(load(s.lanes + i * 16));
}

// Merges the next split into the total, in place.
INLINE void merge(const Partials& total, const Partials& split, int64_t query, int64_t head) {
    const float before = total.maximum[query], next = split.maximum[query];
    const float maximum = before > next ? before : next;
    const float a = exp2(splat(before - maximum))[0], b = exp2(splat(next - maximum))[0];
    total.maximum[query] = maximum;
    total.sum[query] = total.sum[query] * a + split.sum[query] * b;
    float* to = total.values + query * head;
    const float* from = split.values + query * head;
    for (int64_t d = 0; d < head; d += kWidth) store(to + d, load(to + d) * a + load(from + d) * b);
}

INLINE void copy_partial(const Partials& to, int64_t at, const Partials& from, int64_t query, int64_t head) {
    to.maximum[at] = from.maximum[query];
    to.sum[at] = from.sum[query];
    __builtin_memcpy(to.values + at * head, from.values + query * head, static_cast<size_t>(head) * 4);
}

// Query number i of a tile is (row i / group, head i % group).
static void write_output(const Attention& a, const QueryTile& tile, int64_t kv_head, int64_t query,
                         const Partials& total) {
    const int64_t group = a.heads / a.cache.kv_heads, head_dim = a.cache.head_dim, head = padded_head(head_dim);
    const int64_t at = (tile.row + query / group) * a.out_stride + (kv_head * group + query % group) * head_dim;
    float* values = total.values + query * head;
    const float scale = 1.f / total.sum[query];
    for (int64_t d = 0; d < head; d += kWidth) store(values + d, load(values + d) * scale);
    if (a.out_number == Number::f32)
        put_all(static_cast<float*>(a.out) + at, values, head_dim);
    else
        put_all(static_cast<uint16_t*>(a.out) + at, values, head_dim);
}

// Whether a query sees any key of the split.
INLINE bool sees(const QueryTile& tile, int64_t query, int64_t group, int64_t split) {
    return tile.positions[query / group] >= split * kContextSplit;
}

template <class T>
static void attend_tile(const Attention& a, const QueryTile& tile, int64_t kv_head, const NextKeys& next, float* scratch) {
    const int64_t group = a.heads / a.cache.kv_heads, queries = tile.rows * group;
    const AttentionScratch<T> s(scratch, queries, a.cache.head_dim);
    const Partials part(s.split, s.room), total(s.total, s.room);
    load_queries(a, tile, kv_head, s);
    const int64_t context = tile.positions[tile.rows - 1] + 1, splits = (context - 1) / kContextSplit + 1;
    for (int64_t split = 0; split < splits; split++) {
        const int64_t after = (split + 1) * kContextSplit;
        const NextKeys next_split{tile.block_table, kv_head, after, context};
        sum_split(a, tile, kv_head, split, after < context ? next_split : next, s);
        for (int64_t i = 0; i < queries; i++) {
            if (split == 0)
                copy_partial(total, i, part, i, s.head);
            else if (sees(tile, i, group, split))
                merge(total, part, i, s.head);
        }
    }
    for (int64_t i = 0; i < queries; i++) write_output(a, tile, kv_head, i, total);
}

static void attend(const Attention& a, const QueryTile& tile, int64_t kv_head, int64_t kv_head_end, const NextKeys& next,
                   float* scratch) {
    for (; kv_head < kv_head_end; kv_head++) {
        const NextKeys next_head{tile.block_table, kv_head + 1, 0, tile.positions[tile.rows - 1] + 1};
        const NextKeys& after = kv_head + 1 < kv_head_end ? next_head : next;
        if (a.cache.format == CacheFormat::f32)
            attend_tile<float>(a, tile, kv_head, after, scratch);
        else
            attend_tile<uint16_t>(a, tile, kv_head, after, scratch);
    }
}

template <class T>
static void attend_tile_split(const Attention& a, const QueryTile& tile, int64_t kv_head, int64_t split, const NextKeys& next,
                              float* scratch, float* partials, int64_t partial_row, int64_t partial_rows) {
    const int64_t group = a.heads / a.cache.kv_heads, queries = tile.rows * group;
    const AttentionScratch<T> s(scratch, queries, a.cache.head_dim);
    load_queries(a, tile, kv_head, s);
    sum_split(a, tile, kv_head, split, next, s);
    const Partials to(partials, partial_rows * group), from(s.split, s.room);
    for (int64_t i = 0; i < queries; i++)
        if (sees(tile, i, group, split)) copy_partial(to, partial_row * group + i, from, i, s.head);
}

static void attend_split(const Attention& a, const QueryTile& tile, int64_t kv_head, int64_t split, const NextKeys& next,
                         float* scratch, float* partials, int64_t partial_row, int64_t partial_rows) {
    if (a.cache.format == CacheFormat::f32)
        attend_tile_split<float>(a, tile, kv_head, split, next, scratch, partials, partial_row, partial_rows);
    else
        attend_tile_split<uint16_t>(a, tile, kv_head, split, next, scratch, partials, partial_row, partial_rows);
}

static void merge_splits(const Attention& a, const QueryTile& tile, int64_t kv_head, float* partials) {
    const int64_t group = a.heads / a.cache.kv_heads, head = padded_head(a.cache.head_dim);
    const int64_t queries = tile.rows * group, size = queries * partial_size(a.cache.head_dim);
    const Partials total(partials, queries);
    for (int64_t i = 0; i < queries; i++) {
        for (int64_t split = 1; sees(tile, i, group, split); split++)
            merge(total, Partials(partials + split * size, queries), i, head);
        write_output(a, tile, kv_head, i, total);
    }
}
