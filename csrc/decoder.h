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

#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "batch.h"
#include "model.h"
#include "paged_attention.h"
#include "sampler.h"

namespace minivllm {

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
    void copy_blocks(const Batch& batch);
    void run_rows(const Batch& batch, int64_t row, int64_t row_end);
    void run_layer(int64_t layer, const int32_t* slots, int64_t rows);
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
    PagedAttention attention_;
    std::mutex mutex_;

    // Widths of the rows below.
    const int64_t hidden_stride_, qkv_stride_, attention_stride_, inner_stride_, vocab_stride_;
    // Memory of a step, grown to what it needs. "Input": float32 or bfloat16, as the model has it.
    AlignedBuffer residual_;      // float32 [rows][hidden]
    AlignedBuffer normed_;        // input [rows][hidden]
    AlignedBuffer qkv_;           // float32 [rows][q, k, v]
    AlignedBuffer attended_;      // input [rows][q]
    AlignedBuffer inner_;         // input [rows][intermediate]
    AlignedBuffer prepared_;      // rows of inner_, normed_ … as a quantised matrix reads them
    AlignedBuffer cos_sin_;       // float32 [rows][head_dim]
    AlignedBuffer last_hidden_;   // input [yielding rows][hidden]
    AlignedBuffer asked_hidden_;  // float32 [rows asked for][hidden]
    AlignedBuffer logits_;        // float32 [slice][vocabulary]
    std::vector<AlignedBuffer> matmul_scratch_;  // one for each thread
    std::vector<Sampler> samplers_;              // one for each thread
    std::vector<int32_t> yielding_;  // rows that yield tokens, each once
    std::vector<int64_t> draws_;     // of each of them, the first of its entries in logit_rows; then their number
};

}  // namespace minivllm
