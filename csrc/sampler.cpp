#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace minivllm {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Entries are summed in eight lanes over blocks of this many, blocks in order.
constexpr int64_t kBlock = 64;

double sum_block(const double* x, int64_t n) {
    double lane[8] = {};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) lane[j] += x[i + j];
    for (; i < n; i++) lane[0] += x[i];
    return ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
}

double sum(const std::vector<double>& x) {
    const auto n = static_cast<int64_t>(x.size());
    double total = 0;
    for (int64_t i = 0; i < n; i += kBlock) total += sum_block(x.data() + i, std::min(kBlock, n - i));
    return total;
}

// The ids of the `count` largest values into `ids`, the largest first, equals by lowest id.
template <class T>
void likeliest(const T* x, int64_t n, int64_t count, std::vector<int32_t>& ids) {
    const auto before = [x](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
    ids.clear();
    count = std::min(count, n);
    if (count <= 0) return;
    // A few candidates too many, thinned out from time to time: one comparison for nearly every id. An id that
    // equals the count-th so far comes after it.
    const auto room = static_cast<size_t>(2 * count + 64);
    T least = -std::numeric_limits<T>::infinity();
    bool thinned = false;
    const auto thin = [&] {
        std::nth_element(ids.begin(), ids.begin() + (count - 1), ids.end(), before);
        ids.resize(static_cast<size_t>(count));
        least = x[ids[static_cast<size_t>(count - 1)]];
        thinned = true;
    };
    for (int32_t i = 0; i < n; i++) {
        if (thinned && !(x[i] > least)) continue;
        ids.push_back(i);
        if (ids.size() == room) thin();
    }
    if (static_cast<int64_t>(ids.size()) > count) thin();
    std::sort(ids.begin(), ids.end(), before);
}

}  // namespace

double uniform(uint64_t seed, int32_t position, int32_t choice) {
    // Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    uint32_t c[4] = {0, static_cast<uint32_t>(position), static_cast<uint32_t>(choice), 0};
    uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = uint64_t{0xD2511F53} * c[0], p1 = uint64_t{0xCD9E8D57} * c[2];
        const uint32_t c1 = c[1], c3 = c[3];
        c[0] = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ key[0];
        c[1] = static_cast<uint32_t>(p1);
        c[2] = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ key[1];
        c[3] = static_cast<uint32_t>(p0);
        key[0] += 0x9E3779B9;
        key[1] += 0xBB67AE85;
    }
    return ((c[0] >> 5) * 67108864. + (c[1] >> 6)) / 9007199254740992.;
}

StepResult::StepResult(const SamplingBatch& batch) : num_rows(batch.num_logprobs.size), num_top(0) {
    for (int64_t row = 0; row < num_rows; row++) num_top = std::max<int64_t>(num_top, batch.num_logprobs[row]);
    const auto rows = static_cast<size_t>(num_rows), cells = static_cast<size_t>(num_rows * num_top);
    const float nan = std::numeric_limits<float>::quiet_NaN();
    token_ids.assign(rows, -1);
    logprobs.assign(rows, nan);
    ranks.assign(rows, 0);
    top_token_ids.assign(cells, -1);
    top_logprobs.assign(cells, nan);
}

bool Sampler::sample(const float* logits, const SamplingBatch& batch, int64_t row, StepResult& result) {
    const int64_t token = draw(logits, batch, row);
    result.token_ids[static_cast<size_t>(row)] = static_cast<int32_t>(token);
    if (token < 0) return false;
    if (batch.num_logprobs[row] >= 0) write_logprobs(logits, row, token, batch.num_logprobs[row], result);
    return true;
}

int64_t Sampler::draw(const float* logits, const SamplingBatch& b, int64_t row) {
    const int64_t likeliest_raw = kernels_->argmax(logits, vocab_size_);
    if (likeliest_raw < 0) return -1;
    const bool changed = b.bias_start[row] != b.bias_start[row + 1] || b.penalty_start[row] != b.penalty_start[row + 1];
    if (b.temperature[row] == 0 && !changed) return likeliest_raw;

    x_.assign(logits, logits + vocab_size_);
    for (int64_t i = b.bias_start[row]; i < b.bias_start[row + 1]; i++)
        x_[static_cast<size_t>(b.bias_token_ids[i])] += b.bias_values[i];
    for (int64_t i = b.penalty_start[row]; i < b.penalty_start[row + 1]; i++) {
        double& x = x_[static_cast<size_t>(b.penalty_token_ids[i])];
        const double repetition = b.repetition_penalty[row];
        x = x > 0 ? x / repetition : x * repetition;
        x -= static_cast<double>(b.frequency_penalty[row]) * b.penalty_counts[i];
        x -= static_cast<double>(b.presence_penalty[row]) * (b.penalty_counts[i] > 0);
    }
    int64_t best = likeliest_raw;
    if (changed) best = std::max_element(x_.begin(), x_.end()) - x_.begin();  // the first of equals
    const double largest = x_[static_cast<size_t>(best)];
    if (!(std::abs(largest) < kInfinity)) return -1;
    if (b.temperature[row] == 0) return best;

    // From here on x ≤ 0 is relative to the largest; −inf is out of the race; weight = e^x.
    const double temperature = b.temperature[row], shift = largest / temperature;
    for (double& x : x_) x = x / temperature - shift;
    weights_.resize(x_.size());
    kernels_->exp_double(x_.data(), 0, weights_.data(), vocab_size_);
    if (const double min_p = b.min_p[row]; min_p > 0) {
        for (size_t i = 0; i < x_.size(); i++) {
            if (weights_[i] >= min_p) continue;
            x_[i] = -kInfinity;
            weights_[i] = 0;
        }
    }
    if (b.top_k[row] > 0 && b.top_k[row] < vocab_size_) {
        likeliest(x_.data(), vocab_size_, b.top_k[row], ids_);
        keep_ids();
    }
    if (b.top_p[row] < 1) keep_top_p(b.top_p[row]);

    const double target = uniform(b.seed[row], b.position[row], b.choice[row]) * sum(weights_);
    double passed = 0;
    int64_t last = best;
    for (int64_t start = 0; start < vocab_size_; start += kBlock) {
        const int64_t end = std::min(start + kBlock, vocab_size_);
        const double next = passed + sum_block(weights_.data() + start, end - start);
        if (next > target) {
            for (int64_t i = start; i < end; i++) {
                const double weight = weights_[static_cast<size_t>(i)];
                if (weight == 0) continue;
                passed += weight;
                last = i;
                if (passed > target) return i;
            }
        }
        passed = next;
    }
    return last;  // the sums of the lanes and of the ids in order may differ in the last bit
}

void Sampler::keep_top_p(double p) {
    const double target = p * sum(weights_);
    // Sorts only as many of the likeliest as are needed; usually some dozens.
    for (int64_t count = 64;; count *= 8) {
        likeliest(x_.data(), vocab_size_, count, ids_);
        double passed = 0;
        for (size_t i = 0; i < ids_.size(); i++) {
            passed += weights_[static_cast<size_t>(ids_[i])];
            if (passed < target && i + 1 < x_.size()) continue;
            ids_.resize(i + 1);
            return keep_ids();
        }
    }
}

// Only the ids in ids_ stay in the race.
void Sampler::keep_ids() {
    std::sort(ids_.begin(), ids_.end());
    auto kept = ids_.begin();
    for (size_t i = 0; i < x_.size(); i++) {
        if (kept != ids_.end() && static_cast<size_t>(*kept) == i) {
            ++kept;
        } else {
            x_[i] = -kInfinity;
            weights_[i] = 0;
        }
    }
}

void Sampler::write_logprobs(const float* logits, int64_t row, int64_t token, int64_t num_top, StepResult& result) {
    const double largest = logits[kernels_->argmax(logits, vocab_size_)];
    x_.assign(logits, logits + vocab_size_);
    kernels_->exp_double(x_.data(), largest, x_.data(), vocab_size_);
    const double log_sum = largest + std::log(sum(x_));
    const float chosen = logits[token];
    int32_t ahead = 0;
    for (int64_t i = 0; i < vocab_size_; i++) ahead += logits[i] > chosen;
    for (int64_t i = 0; i < token; i++) ahead += logits[i] == chosen;
    result.logprobs[static_cast<size_t>(row)] = static_cast<float>(chosen - log_sum);
    result.ranks[static_cast<size_t>(row)] = 1 + ahead;
    likeliest(logits, vocab_size_, num_top, ids_);
    for (size_t i = 0; i < ids_.size(); i++) {
        const size_t at = static_cast<size_t>(row * result.num_top) + i;
        result.top_token_ids[at] = ids_[i];
        result.top_logprobs[at] = static_cast<float>(logits[ids_[i]] - log_sum);
    }
}

void check_batch(const SamplingBatch& b, int64_t rows, int64_t vocab_size) {
    const auto fail = [](const std::string& what) { throw std::invalid_argument("sampling batch: " + what); };
    const std::pair<const char*, int64_t> sizes[] = {
        {"temperature", b.temperature.size},
        {"top_k", b.top_k.size},
        {"top_p", b.top_p.size},
        {"min_p", b.min_p.size},
        {"repetition_penalty", b.repetition_penalty.size},
        {"presence_penalty", b.presence_penalty.size},
        {"frequency_penalty", b.frequency_penalty.size},
        {"seed", b.seed.size},
        {"choice", b.choice.size},
        {"position", b.position.size},
        {"num_logprobs", b.num_logprobs.size},
        {"penalty_start", b.penalty_start.size - 1},
        {"bias_start", b.bias_start.size - 1},
    };
    for (const auto& [name, size] : sizes)
        if (size != rows) fail(std::string(name) + " is not for " + std::to_string(rows) + " rows");
    const auto check_entries = [&](const char* name, Array<int32_t> start, Array<int32_t> ids, int64_t num_values) {
        if (start[0] != 0 || start[rows] != ids.size || ids.size != num_values)
            fail(std::string(name) + "_start does not span its entries");
        for (int64_t row = 0; row < rows; row++)
            if (start[row] > start[row + 1]) fail(std::string(name) + "_start descends");
        for (int64_t i = 0; i < ids.size; i++)
            if (ids[i] < 0 || ids[i] >= vocab_size)
                fail(std::string(name) + "_token_ids: no token " + std::to_string(ids[i]));
    };
    check_entries("penalty", b.penalty_start, b.penalty_token_ids, b.penalty_counts.size);
    check_entries("bias", b.bias_start, b.bias_token_ids, b.bias_values.size);
}

}  // namespace minivllm
