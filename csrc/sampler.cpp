#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace minivllm {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Orders token ids by descending x, equals by ascending id.
struct Likelier {
    const double* x;
    bool operator()(int32_t a, int32_t b) const { return x[a] > x[b] || (x[a] == x[b] && a < b); }
};

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
    const int64_t largest = kernels_->argmax(logits, vocab_size_);
    if (largest < 0) return false;
    x_.resize(static_cast<size_t>(vocab_size_));
    const int64_t given = batch.given_token_ids[row], token = given >= 0 ? given : draw(logits, largest, batch, row);
    if (token < 0) return false;
    result.token_ids[static_cast<size_t>(row)] = static_cast<int32_t>(token);
    if (const int32_t top = batch.num_logprobs[row]; top >= 0) write_logprobs(logits, largest, row, token, top, result);
    return true;
}

int64_t Sampler::draw(const float* logits, int64_t largest, const SamplingBatch& b, int64_t row) {
    const bool changed = b.bias_start[row] != b.bias_start[row + 1] || b.penalty_start[row] != b.penalty_start[row + 1];
    const double temperature = b.temperature[row];
    if (changed) {
        kernels_->relative(logits, 1, 0, x_.data(), vocab_size_);
        for (int64_t i = b.bias_start[row]; i < b.bias_start[row + 1]; i++)
            x_[static_cast<size_t>(b.bias_token_ids[i])] += b.bias_values[i];
        for (int64_t i = b.penalty_start[row]; i < b.penalty_start[row + 1]; i++) {
            double& x = x_[static_cast<size_t>(b.penalty_token_ids[i])];
            const double repetition = b.repetition_penalty[row];
            x = x > 0 ? x / repetition : x * repetition;
            x -= static_cast<double>(b.frequency_penalty[row]) * b.penalty_counts[i];
            x -= static_cast<double>(b.presence_penalty[row]) * (b.penalty_counts[i] > 0);
        }
        largest = std::max_element(x_.begin(), x_.end()) - x_.begin();  // the first of equals
        if (!(std::abs(x_[static_cast<size_t>(largest)]) < kInfinity)) return -1;
    }
    if (temperature == 0) return largest;

    // From here on x ≤ 0 is relative to the largest, and e^x a token's weight.
    if (changed) {
        const double most = x_[static_cast<size_t>(largest)];
        for (double& x : x_) x = (x - most) / temperature;
    } else {
        const double factor = 1 / temperature;
        kernels_->relative(logits, factor, logits[largest] * factor, x_.data(), vocab_size_);
    }
    const double u = uniform(b.seed[row], b.position[row], b.choice[row]);
    const double min_p = b.min_p[row], top_p = b.top_p[row];
    const bool some = b.top_k[row] > 0 && b.top_k[row] < vocab_size_;
    if (!some && min_p <= 0) {
        const double total = sum_weights();
        if (top_p >= 1) return draw_among_all(u * total, largest);
        find_likeliest(64);  // usually they are enough
        if (!keep_top_p(top_p, total)) keep_top_p_of_all(top_p * total);
        return draw_among_found(u);
    }
    // min_p, top_k and top_p all keep leading tokens of the same order, so the smaller set may as well come first.
    if (some)
        find_likeliest(b.top_k[row]);
    else
        find_at_least(std::log(min_p) - 1e-6);
    weigh_found();
    size_t kept = 0;
    while (kept < ids_.size() && weights_[kept] >= min_p) kept++;
    ids_.resize(kept);
    if (top_p < 1) keep_top_p(top_p, weigh_found());
    return draw_among_found(u);
}

// Σ e^x over the vocabulary, and over each block of it in sums_.
double Sampler::sum_weights() {
    sums_.resize(static_cast<size_t>((vocab_size_ + kExpBlock - 1) / kExpBlock));
    kernels_->exp_sums(x_.data(), 0, sums_.data(), vocab_size_);
    double total = 0;
    for (const double sum : sums_) total += sum;
    return total;
}

// The `count` likeliest tokens into ids_, the likeliest first, equals by lowest id.
void Sampler::find_likeliest(int64_t count) {
    ids_.clear();
    count = std::min(count, vocab_size_);
    if (count <= 0) return;
    // A few candidates too many, thinned out from time to time. An id that equals the count-th so far comes after it.
    const auto room = static_cast<size_t>(2 * count + 64);
    double least = -kInfinity;
    for (int64_t i = 0; (i = kernels_->find_from(x_.data(), i, vocab_size_, least)) < vocab_size_; i++) {
        ids_.push_back(static_cast<int32_t>(i));
        if (ids_.size() < room) continue;
        std::nth_element(ids_.begin(), ids_.begin() + (count - 1), ids_.end(), Likelier{x_.data()});
        ids_.resize(static_cast<size_t>(count));
        least = std::nextafter(x_[static_cast<size_t>(ids_.back())], kInfinity);
    }
    std::sort(ids_.begin(), ids_.end(), Likelier{x_.data()});
    ids_.resize(std::min(ids_.size(), static_cast<size_t>(count)));
}

// All tokens with x ≥ least, in the same way.
void Sampler::find_at_least(double least) {
    ids_.clear();
    for (int64_t i = 0; (i = kernels_->find_from(x_.data(), i, vocab_size_, least)) < vocab_size_; i++)
        ids_.push_back(static_cast<int32_t>(i));
    std::sort(ids_.begin(), ids_.end(), Likelier{x_.data()});
}

// The weights of ids_ into weights_, and their sum.
double Sampler::weigh_found() {
    weights_.resize(ids_.size());
    for (size_t i = 0; i < ids_.size(); i++) weights_[i] = x_[static_cast<size_t>(ids_[i])];
    kernels_->exp_double(weights_.data(), 0, weights_.data(), static_cast<int64_t>(weights_.size()));
    double total = 0;
    for (const double weight : weights_) total += weight;
    return total;
}

// Of ids_, keeps the fewest of the likeliest whose weights reach p · total. False if all together do not.
bool Sampler::keep_top_p(double p, double total) {
    weigh_found();
    double passed = 0;
    for (size_t i = 0; i < ids_.size(); i++) {
        passed += weights_[i];
        if (passed < p * total) continue;
        ids_.resize(i + 1);
        return true;
    }
    return false;
}

// The same for the whole vocabulary, and without sorting it: all tokens are counted by the octave eighth that their
// weight falls in, and only the eighth where the target is reached is sorted.
void Sampler::keep_top_p_of_all(double target) {
    constexpr int kEighths = 512;
    const auto eighth_of = [](double x) { return x > -44 ? static_cast<int>(x * (-8 / 0.6931471805599453)) : kEighths - 1; };
    weights_.resize(x_.size());
    kernels_->exp_double(x_.data(), 0, weights_.data(), vocab_size_);
    double sums[kEighths] = {};
    for (size_t i = 0; i < x_.size(); i++) sums[eighth_of(x_[i])] += weights_[i];
    int last = 0;
    double passed = 0;
    while (last < kEighths - 1 && passed + sums[last] < target) passed += sums[last++];
    ids_.clear();
    std::vector<int32_t> edge;
    for (size_t i = 0; i < x_.size(); i++) {
        const int eighth = eighth_of(x_[i]);
        if (eighth <= last) (eighth < last ? ids_ : edge).push_back(static_cast<int32_t>(i));
    }
    std::sort(edge.begin(), edge.end(), Likelier{x_.data()});
    const auto whole = static_cast<std::ptrdiff_t>(ids_.size());
    for (size_t i = 0; i < edge.size() && passed < target; i++) {
        passed += weights_[static_cast<size_t>(edge[i])];
        ids_.push_back(edge[i]);
    }
    std::sort(ids_.begin() + whole, ids_.end());
    std::inplace_merge(ids_.begin(), ids_.begin() + whole, ids_.end());
}

int64_t Sampler::draw_among_found(double u) {
    if (!std::is_sorted(ids_.begin(), ids_.end())) std::sort(ids_.begin(), ids_.end());  // the definition's order
    const double target = u * weigh_found();
    double passed = 0;
    for (size_t i = 0; i < ids_.size(); i++) {
        passed += weights_[i];
        if (passed > target) return ids_[i];
    }
    return ids_.back();
}

// The token at which the weights, added up in order of ids, exceed the target. After sum_weights.
int64_t Sampler::draw_among_all(double target, int64_t likeliest) {
    double passed = 0;
    int64_t last = likeliest;  // the sums of the lanes and of the ids in order may differ in the last bit
    weights_.resize(kExpBlock);
    for (size_t block = 0; block < sums_.size(); block++) {
        const double next = passed + sums_[block];
        if (next > target) {
            const int64_t start = static_cast<int64_t>(block) * kExpBlock, size = std::min(kExpBlock, vocab_size_ - start);
            kernels_->exp_double(x_.data() + start, 0, weights_.data(), size);
            for (int64_t i = 0; i < size; i++) {
                const double weight = weights_[static_cast<size_t>(i)];
                if (weight == 0) continue;
                passed += weight;
                last = start + i;
                if (passed > target) return last;
            }
        }
        passed = next;
    }
    return last;
}

void Sampler::write_logprobs(const float* logits, int64_t largest, int64_t row, int64_t token, int64_t num_top,
                             StepResult& result) {
    kernels_->relative(logits, 1, 0, x_.data(), vocab_size_);
    sums_.resize(static_cast<size_t>((vocab_size_ + kExpBlock - 1) / kExpBlock));
    kernels_->exp_sums(x_.data(), logits[largest], sums_.data(), vocab_size_);
    double total = 0;
    for (const double sum : sums_) total += sum;
    const double log_sum = logits[largest] + std::log(total);
    const float chosen = logits[token];
    int32_t ahead = 0;
    for (int64_t i = 0; i < vocab_size_; i++) ahead += logits[i] > chosen;
    for (int64_t i = 0; i < token; i++) ahead += logits[i] == chosen;
    result.logprobs[static_cast<size_t>(row)] = static_cast<float>(chosen - log_sum);
    result.ranks[static_cast<size_t>(row)] = 1 + ahead;
    find_likeliest(num_top);
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
        {"given_token_ids", b.given_token_ids.size},
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
    for (int64_t row = 0; row < rows; row++)
        if (b.given_token_ids[row] < -1 || b.given_token_ids[row] >= vocab_size)
            fail("given_token_ids: no token " + std::to_string(b.given_token_ids[row]));
    check_entries("penalty", b.penalty_start, b.penalty_token_ids, b.penalty_counts.size);
    check_entries("bias", b.bias_start, b.bias_token_ids, b.bias_values.size);
}

}  // namespace minivllm
