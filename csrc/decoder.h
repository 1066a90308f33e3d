// Decoder: one step of the model over a paged KV pool: token ids in, tokens and logprobs out.
//
//   block copies
//   up to kRowsAtOnce rows at a time:
//     embedding ─► each layer: norm ─► q, k, v ─► k rotated, cache write ─► attention, q rotated ─► o, + residual
//                              norm ─► gate, up, activation ─► down, + residual
//     final norm of the rows that yield a token, or whose hidden state is asked for
//   head, a slice of rows at a time ─► sampler, once for each token that a row yields
//
// A row's numbers do not depend on the rows beside it, on the chunks its sequence comes in, on the block size, on
// where the blocks lie, or on the number of threads (kernels.h says how). Rows later in the batch may read what
// earlier ones wrote to the cache, never the reverse.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "model.h"
#include "sampler.h"

namespace minivllm {

// minivllm.batch.Batch.
struct Batch {
    Array<int32_t> token_ids, positions, slot_mapping, query_start, context_lens;
    Array<int32_t> block_tables;  // [S, table_width]
    int64_t table_width;
    Array<int32_t> logit_rows;
    Array<int32_t> block_copies;  // [C, 3]
    Array<int32_t> hidden_rows;
};

// minivllm.kv_cache.kv_pool: the memory [layers][K, V][blocks][kv_heads][block_size] cells, owned by the caller.
struct Pool {
    void* data;
    CacheFormat format;
    int64_t num_blocks, block_size;
};

class Decoder {
public:
    // Throws std::invalid_argument for an unknown isa ("" is the best one) or fewer than one thread.
    Decoder(const ModelConfig& config, const Pool& pool, Number number,
            const std::unordered_map<std::string, Format>& formats, int num_threads, const std::string& isa);

    void load(const std::string& name, const void* data, Stored stored, int64_t rows, int64_t columns) {
        model_.load(name, data, stored, rows, columns, threads_);
    }

    // Throws std::invalid_argument if the batch does not fit the model and the pool, before anything is written, and
    // std::runtime_error if a row has no token to choose. One step at a time: a second caller waits.
    // `before_sampling` is called when all layers are done; what masks hold is read only after it.
    StepResult execute(const Batch& batch, const SamplingBatch& sampling,
                       const std::function<void()>& before_sampling = {});

    const Model& model() const { return model_; }
    const char* isa() const { return kernels_.isa; }
    int num_threads() const { return threads_.num_threads(); }

private:
    // An attention tile: rows of one sequence, or, if the first `shared` splits of their contexts are the same blocks, one
    // row of each of several. If it is attended in several pieces: how many for a kv head, and where its partial sums start.
    struct Tile {
        QueryTile query;
        int64_t num_splits, shared, num_pieces = 0, partials = 0;
    };
    // Of a tile: one split, or all of them (−1); one row, or all of them (−1).
    struct Piece {
        int64_t tile, split, row, kv_head, kv_head_end;
    };

    void check(const Batch& batch) const;
    void copy_blocks(const Batch& batch);
    void plan_attention(const Batch& batch, int64_t row, int64_t row_end);
    void run_rows(const Batch& batch, int64_t row, int64_t row_end);
    void run_layer(int64_t layer, const int32_t* slots, int64_t rows);
    int64_t shared_splits(const Batch& batch, int64_t sequence, int64_t other) const;
    void cut_attention();
    QueryTile rows_of(const Piece& piece) const;
    NextKeys first_keys(int64_t piece) const;
    void attend(int64_t layer);
    void sample(const SamplingBatch& sampling, StepResult& result);

    void matmul(const PackedMatrix& matrix, const AlignedBuffer& x, int64_t x_row, int64_t x_stride, int64_t rows,
                Epilogue epilogue, AlignedBuffer& out, int64_t out_stride);
    void norm(const NormWeights& weights, const float* x, int64_t rows, Number number, AlignedBuffer& out, int64_t out_row);
    template <class Body>
    void for_rows(int64_t rows, int64_t grain, const Body& body);
    CacheLayer cache_layer(int64_t layer) const;

    ThreadPool threads_;
    const Kernels& kernels_;
    Model model_;
    const Pool pool_;
    std::mutex mutex_;

    // Widths of the rows below.
    const int64_t hidden_stride_, qkv_stride_, attention_stride_, inner_stride_, vocab_stride_;
    const int64_t query_rows_;  // rows of a sequence that attend together
    // Memory of a step, grown to what it needs. "Input": float32 or bfloat16, as the model has it.
    AlignedBuffer residual_;    // float32 [rows][hidden]
    AlignedBuffer normed_;      // input [rows][hidden]
    AlignedBuffer qkv_;         // float32 [rows][q, k, v]
    AlignedBuffer attended_;    // input [rows][q]
    AlignedBuffer inner_;       // input [rows][intermediate]
    AlignedBuffer prepared_;    // rows of inner_, normed_ … as a quantised matrix reads them
    AlignedBuffer cos_sin_;     // float32 [rows][head_dim]
    AlignedBuffer partials_;    // float32, see kernels.h
    AlignedBuffer last_hidden_;  // input [yielding rows][hidden]
    AlignedBuffer asked_hidden_;  // float32 [rows asked for][hidden]
    AlignedBuffer logits_;      // float32 [slice][vocabulary]
    std::vector<AlignedBuffer> scratch_;  // one for each thread, for attention
    std::vector<AlignedBuffer> matmul_scratch_;
    std::vector<Sampler> samplers_;       // one for each thread
    std::vector<int32_t> yielding_;       // rows that yield tokens, each once
    std::vector<int64_t> draws_;          // of each of them, the first of its entries in logit_rows; then their number
    std::vector<Tile> tiles_;
    std::vector<Piece> pieces_;
    std::vector<std::atomic<int64_t>> pieces_left_;  // [tile][kv head] to be summed up in this layer
    int64_t table_width_ = 0;
};

}  // namespace minivllm
