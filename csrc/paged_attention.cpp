#include "paged_attention.h"

#include <algorithm>

#include "model.h"

namespace minivllm {
namespace {

constexpr int64_t kQueries = 192;            // rows × heads of a group that attend together
constexpr int64_t kPartialBytes = 32 << 20;  // partial sums, at most

}  // namespace

PagedAttention::PagedAttention(const ModelConfig& config, int64_t block_size, const Kernels& kernels, ThreadPool& threads)
    : heads_(config.num_heads),
      kv_heads_(config.num_kv_heads),
      head_dim_(config.head_dim),
      block_size_(block_size),
      query_rows_(std::max<int64_t>(1, kQueries * kv_heads_ / heads_)),
      kernels_(kernels),
      threads_(threads) {
    const int64_t size = attention_scratch_size(query_rows_ * heads_ / kv_heads_, head_dim_);
    for (int thread = 0; thread < threads.num_threads(); thread++) scratch_.emplace_back(size * 4);
}

// How many splits of the context are the same blocks for two sequences that compute one row each, which sees them whole.
int64_t PagedAttention::shared_splits(const Batch& b, int64_t sequence, int64_t other) const {
    const int32_t* table = b.block_tables.data + sequence * b.table_width;
    const int32_t* others = b.block_tables.data + other * b.table_width;
    const int64_t context = std::min(b.context_lens[sequence], b.context_lens[other]) / kContextSplit * kContextSplit;
    const int64_t blocks = ceil_div(context, block_size_);
    const int64_t same = std::mismatch(table, table + blocks, others).first - table;
    return (same == blocks ? context : same * block_size_) / kContextSplit;
}

void PagedAttention::plan(const Batch& batch, int64_t row, int64_t row_end) {
    tiles_.clear();
    int64_t sequence = std::upper_bound(batch.query_start.data, batch.query_start.data + batch.query_start.size,
                                        static_cast<int32_t>(row)) - batch.query_start.data - 1;
    const int64_t row_bytes = heads_ * partial_size(head_dim_) * 4;  // of partial sums, for each split
    int64_t bytes = 0;
    const auto lone_row = [&](int64_t s, int64_t r) {
        return r < row_end && batch.query_start[s] == r && batch.query_start[s + 1] == r + 1;
    };
    for (int64_t r = row; r < row_end;) {
        const int32_t* table = batch.block_tables.data + sequence * batch.table_width;
        const auto splits_of = [&](int64_t at) { return batch.positions[at] / kContextSplit + 1; };
        if (lone_row(sequence, r)) {
            int64_t rows = 1, shared = 0, splits = splits_of(r);
            for (; rows < query_rows_ && lone_row(sequence + rows, r + rows); rows++) {
                const int64_t with_next = shared_splits(batch, sequence, sequence + rows);
                const int64_t all_splits = std::max(splits, splits_of(r + rows));
                if (with_next == 0 || (rows > 1 && with_next < shared)) break;
                if (bytes + all_splits * (rows + 1) * row_bytes > kPartialBytes) break;
                shared = rows > 1 ? shared : with_next;
                splits = all_splits;
            }
            tiles_.push_back({{r - row, rows, batch.positions.data + r, table}, splits, shared});
            bytes += shared ? splits * rows * row_bytes : 0;
            r += rows;
            sequence += rows;
            continue;
        }
        const int64_t end = std::min<int64_t>(row_end, batch.query_start[sequence + 1]);
        for (int64_t rows; r < end; r += rows) {
            rows = std::min(query_rows_, end - r);
            tiles_.push_back({{r - row, rows, batch.positions.data + r, table}, splits_of(r + rows - 1), 0});
        }
        sequence++;
    }
    table_width_ = batch.table_width;
    cut();
}

// Tiles become pieces: by splits where rows share them, and everywhere if the tiles alone are too few. Where there are
// enough pieces, all heads stay together: claimed and looked up once, and the next head's keys can be fetched in time.
void PagedAttention::cut() {
    const int64_t threads = threads_.num_threads();
    const auto size_of = [&](const Tile& tile) {
        return tile.num_splits * tile.query.rows * heads_ * partial_size(head_dim_);
    };
    int64_t all_partials = 0;
    for (const Tile& tile : tiles_) all_partials += size_of(tile);
    // The longest contexts first, so that the threads end together.
    std::stable_sort(tiles_.begin(), tiles_.end(), [](const Tile& a, const Tile& b) { return a.num_splits > b.num_splits; });
    const auto num_tiles = static_cast<int64_t>(tiles_.size());
    const bool split = threads > 1 && num_tiles * kv_heads_ < 8 * threads && all_partials * 4 <= kPartialBytes;
    pieces_left_ = std::vector<std::atomic<int64_t>>(static_cast<size_t>(num_tiles * kv_heads_));
    pieces_.clear();
    int64_t partials = 0;
    for (int64_t index = 0; index < num_tiles; index++) {
        Tile& tile = tiles_[static_cast<size_t>(index)];
        const auto add = [&](int64_t at, int64_t row, bool together) {
            const int64_t heads = together ? kv_heads_ : 1;
            for (int64_t head = 0; head < kv_heads_; head += heads)
                pieces_.push_back({static_cast<int32_t>(index), static_cast<int32_t>(at), static_cast<int32_t>(row),
                                   static_cast<int32_t>(head), static_cast<int32_t>(head + heads)});
        };
        if (tile.shared == 0 && (!split || tile.num_splits == 1)) {
            add(-1, -1, num_tiles >= 8 * threads);
            continue;
        }
        const int64_t whole = tile.shared ? tile.shared : tile.num_splits;
        for (int64_t at = 0; at < whole; at++) add(at, -1, false);
        tile.num_pieces = whole;
        if (tile.shared)
            for (int64_t r = 0; r < tile.query.rows; r++)
                for (int64_t at = tile.shared; at <= tile.query.positions[r] / kContextSplit; at++, tile.num_pieces++)
                    add(at, r, tile.query.rows >= 4 * threads);
        for (int64_t head = 0; head < kv_heads_; head++)
            pieces_left_[static_cast<size_t>(index * kv_heads_ + head)] = tile.num_pieces;
        tile.partials = partials;
        partials += size_of(tile);
    }
    partials_.reserve(partials * 4);
}

QueryTile PagedAttention::rows_of(const Piece& piece) const {
    const QueryTile& all = tiles_[static_cast<size_t>(piece.tile)].query;
    if (piece.row < 0) return all;
    return {all.row + piece.row, 1, all.positions + piece.row, all.block_table + piece.row * table_width_};
}

// The keys that the piece begins with.
NextKeys PagedAttention::first_keys(int64_t index) const {
    if (index >= static_cast<int64_t>(pieces_.size())) return {};
    const Piece& piece = pieces_[static_cast<size_t>(index)];
    const QueryTile rows = rows_of(piece);
    const int64_t start = std::max<int64_t>(0, piece.split) * kContextSplit;
    return {rows.block_table, piece.kv_head, start, rows.positions[rows.rows - 1] + 1};
}

void PagedAttention::attend(const Attention& job) {
    threads_.run(static_cast<int64_t>(pieces_.size()), [&](int64_t at, int thread) {
        const Piece& piece = pieces_[static_cast<size_t>(at)];
        float* scratch = scratch_[static_cast<size_t>(thread)].as<float>();
        const NextKeys next = first_keys(at + threads_.num_threads());
        if (piece.split >= 0) return attend_split(job, piece, next, scratch);
        const QueryTile& query = tiles_[static_cast<size_t>(piece.tile)].query;
        kernels_.attend(job, query, piece.kv_head, piece.kv_head_end, next, scratch);
    });
}

void PagedAttention::attend_split(const Attention& job, const Piece& piece, const NextKeys& next, float* scratch) {
    const Tile& tile = tiles_[static_cast<size_t>(piece.tile)];
    const QueryTile rows = rows_of(piece);
    const int64_t row = std::max<int32_t>(0, piece.row), start = piece.split * kContextSplit;
    const int64_t split_size = tile.query.rows * heads_ / kv_heads_ * partial_size(head_dim_);
    for (int64_t head = piece.kv_head; head < piece.kv_head_end; head++) {
        float* partials = partials_.as<float>() + tile.partials + head * tile.num_splits * split_size;
        const NextKeys next_head{rows.block_table, head + 1, start, rows.positions[rows.rows - 1] + 1};
        kernels_.attend_split(job, rows, head, piece.split, head + 1 < piece.kv_head_end ? next_head : next, scratch,
                              partials + piece.split * split_size, row, tile.query.rows);
        // Whoever is through last merges, in the order of the splits; and sets the count for the next layer.
        std::atomic<int64_t>& left = pieces_left_[static_cast<size_t>(piece.tile * kv_heads_ + head)];
        if (left.fetch_sub(1) > 1) continue;
        left = tile.num_pieces;
        kernels_.merge_splits(job, tile.query, head, partials);
    }
}

}  // namespace minivllm
