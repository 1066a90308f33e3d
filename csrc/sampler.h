// The sampler: one row of logits → a token, and the logprobs asked for. minivllm/sampler.py defines it; this is its
// fast twin. It divides by the temperature by way of a factor, and its sums run in another order (blocks of lanes), so
// both may differ in the last bits of a double.
#pragma once

#include <cstdint>
#include <vector>

#include "batch.h"

namespace minivllm {

// minivllm.batch.SamplingBatch: one entry a row, unless said otherwise there.
struct SamplingBatch {
    Array<float> temperature;
    Array<int32_t> top_k;
    Array<float> top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
    Array<uint64_t> seed;
    Array<int32_t> choice, position, num_logprobs, given_token_ids;
    Array<int32_t> penalty_start, penalty_token_ids, penalty_counts;
    Array<int32_t> bias_start, bias_token_ids;
    Array<float> bias_values;
    Array<int32_t> mask_row;       // of masks; -1: every token is allowed
    Array<uint32_t> masks;         // [M, mask_words] bits, token t's in word t / 32; read while sampling only
    int64_t mask_words;
};

// Throws std::invalid_argument unless all arrays fit `rows` rows and the vocabulary.
void check_batch(const SamplingBatch& batch, int64_t rows, int64_t vocab_size);

// minivllm.batch.StepResult.
struct StepResult {
    explicit StepResult(const SamplingBatch& batch);

    int64_t num_rows, num_top;  // R, K
    std::vector<int32_t> token_ids;
    std::vector<float> logprobs;
    std::vector<int32_t> ranks, top_token_ids;
    std::vector<float> top_logprobs;
    std::vector<float> hidden;  // of the rows that the batch asks for; the decoder's to fill
};

// Draws tokens; keeps its scratch memory. One for each thread.
class Sampler {
public:
    Sampler(const Kernels& kernels, int64_t vocab_size) : kernels_(&kernels), vocab_size_(vocab_size) {}

    // Row `row` of the batch; writes that row of the result. False (and token −1) if there is no token to choose: a
    // logit is NaN or +inf, or all are −inf, or all tokens are banned.
    bool sample(const float* logits, const SamplingBatch& batch, int64_t row, StepResult& result);

private:
    int64_t draw(const float* logits, int64_t largest, const SamplingBatch& batch, int64_t row);
    void write_logprobs(const float* logits, int64_t largest, int64_t row, int64_t token, int64_t num_top,
                        StepResult& result);
    void apply_mask(const uint32_t* mask);
    double sum_weights();
    void find_likeliest(int64_t count);
    void find_at_least(double least);
    double weigh_found();
    bool keep_top_p(double p, double total);
    void keep_top_p_of_all(double target);
    int64_t draw_among_all(double target, int64_t likeliest);
    int64_t draw_among_found(double u);

    const Kernels* kernels_;
    int64_t vocab_size_;
    std::vector<double> x_;        // [vocabulary]
    std::vector<double> sums_;     // of weights e^x, block by block
    std::vector<double> weights_;  // of the tokens in ids_, or of a block
    std::vector<int32_t> ids_;     // tokens that were found
};

// The random number in [0, 1) that belongs to these numbers: Philox4x32-10 with the seed as its key.
double uniform(uint64_t seed, int32_t position, int32_t choice);

}  // namespace minivllm
