// PagedAttention: the attention of a step's rows over the blocks of their sequences, cut into pieces for the threads.
//
// Rows are cut into tiles that attend together: some rows of one sequence, or, if the first splits of their contexts are
// the same blocks, one row of each of several sequences, so that what they share is read and repacked once. A tile is one
// piece of work, or several: by kv heads, by splits of the context (attention.inl), or both. All ways to cut give the same
// numbers, bit for bit.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "aligned_buffer.h"
#include "batch.h"
#include "kernels/kernels.h"
#include "thread_pool.h"

namespace minivllm {

class PagedAttention {
public:
    PagedAttention(const ModelConfig& config, int64_t block_size, const Kernels& kernels, ThreadPool& threads);

    // Plans for rows [row, row_end) of a checked batch, which must stay until they have attended. Row 0 of q and out is
    // then number `row` of the batch.
    void plan(const Batch& batch, int64_t row, int64_t row_end);
    // All of them, in one layer.
    void attend(const Attention& job);

private:
    // If the tile is attended in several pieces: how many for a kv head, and where its partial sums start.
    struct Tile {
        QueryTile query;
        int64_t num_splits, shared;  // splits of the longest context, and of them those that rows share
        int64_t num_pieces = 0, partials = 0;
    };
    // Of a tile: one split, or all of them (−1); one row, or all of them (−1); kv heads [kv_head, kv_head_end).
    struct Piece {
        int32_t tile, split, row, kv_head, kv_head_end;
    };

    int64_t shared_splits(const Batch& batch, int64_t sequence, int64_t other) const;
    void cut();
    void attend_split(const Attention& job, const Piece& piece, const NextKeys& next, float* scratch);
    QueryTile rows_of(const Piece& piece) const;
    NextKeys first_keys(int64_t piece) const;

    const int64_t heads_, kv_heads_, head_dim_, block_size_;
    const int64_t query_rows_;  // rows of a tile, at most
    const Kernels& kernels_;
    ThreadPool& threads_;
    std::vector<AlignedBuffer> scratch_;  // one for each thread
    AlignedBuffer partials_;              // float32, of each tile [kv heads][splits][rows], see kernels.h
    std::vector<Tile> tiles_;
    std::vector<Piece> pieces_;
    std::vector<std::atomic<int64_t>> pieces_left_;  // [tile][kv head] to be summed up in this layer
    int64_t table_width_ = 0;
};

}  // namespace minivllm
