// The sampler against its definition written out naively: whole sorts, sums in ascending order, std::exp.
#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>

#include "check.h"

using namespace minivllm;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A batch of one row that owns its arrays.
struct Row {
    std::vector<float> temperature{1}, top_p{1}, min_p{0}, repetition{1}, presence{0}, frequency{0};
    std::vector<int32_t> top_k{0}, choice{0}, position{0}, num_logprobs{-1}, given{-1};
    std::vector<uint64_t> seed{0};
    std::vector<int32_t> penalty_start{0, 0}, penalty_ids, penalty_counts, bias_start{0, 0}, bias_ids;
    std::vector<float> bias_values;
    std::vector<int32_t> mask_row{-1};
    std::vector<uint32_t> masks;

    SamplingBatch batch() {
        penalty_start[1] = static_cast<int32_t>(penalty_ids.size());
        bias_start[1] = static_cast<int32_t>(bias_ids.size());
        const auto array = [](const auto& v) {
            return Array<std::decay_t<decltype(v[0])>>{v.data(), static_cast<int64_t>(v.size())};
        };
        return {array(temperature), array(top_k),        array(top_p),         array(min_p),       array(repetition),
                array(presence),    array(frequency),    array(seed),          array(choice),      array(position),
                array(num_logprobs), array(given),    array(penalty_start), array(penalty_ids), array(penalty_counts),
                array(bias_start),  array(bias_ids), array(bias_values), array(mask_row), array(masks),
                static_cast<int64_t>(masks.size())};
    }
};

std::vector<int32_t> sorted(const std::vector<double>& x) {
    std::vector<int32_t> ids(x.size());
    std::iota(ids.begin(), ids.end(), 0);
    std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) { return x[a] > x[b]; });
    return ids;
}

int32_t naive(const std::vector<float>& logits, const Row& row) {
    std::vector<double> x(logits.begin(), logits.end());
    for (size_t i = 0; row.mask_row[0] >= 0 && i < x.size(); i++)
        if (!(row.masks[i / 32] >> i % 32 & 1)) x[i] = -kInfinity;
    for (size_t i = 0; i < row.bias_ids.size(); i++) x[row.bias_ids[i]] += row.bias_values[i];
    for (size_t i = 0; i < row.penalty_ids.size(); i++) {
        double& v = x[row.penalty_ids[i]];
        v = v > 0 ? v / row.repetition[0] : v * row.repetition[0];
        v -= double(row.frequency[0]) * row.penalty_counts[i];
        v -= row.penalty_counts[i] > 0 ? row.presence[0] : 0;
    }
    std::vector<int32_t> order = sorted(x);
    if (row.temperature[0] == 0) return order[0];
    for (double& v : x) v /= row.temperature[0];
    const double largest = x[order[0]];
    size_t kept = 0;
    const auto weight = [&](int32_t id) { return std::exp(x[id] - largest); };
    while (kept < order.size() && weight(order[kept]) >= row.min_p[0]) kept++;
    if (row.top_k[0] > 0) kept = std::min<size_t>(kept, row.top_k[0]);
    order.resize(kept);
    if (row.top_p[0] < 1) {
        double total = 0, passed = 0;
        for (int32_t id : order) total += weight(id);
        for (size_t i = 0; i < order.size(); i++) {
            passed += weight(order[i]);
            if (passed >= row.top_p[0] * total) {
                order.resize(i + 1);
                break;
            }
        }
    }
    std::sort(order.begin(), order.end());
    double total = 0, passed = 0;
    for (int32_t id : order) total += weight(id);
    const double u = uniform(row.seed[0], row.position[0], row.choice[0]);
    for (int32_t id : order) {
        passed += weight(id);
        if (passed > u * total) return id;
    }
    return -1;
}

void test_uniform() {
    // Known answer of Philox4x32-10 for counter 0, key 0 (Random123's kat_vectors): 6627e8d5 e169c58d …
    CHECK(uniform(0, 0, 0) == ((0x6627e8d5u >> 5) * 67108864. + (0xe169c58du >> 6)) / 9007199254740992.);
    CHECK(uniform(1, 0, 0) != uniform(uint64_t{1} << 32, 0, 0));
    CHECK(uniform(7, 1, 0) != uniform(7, 0, 1));
    double sum = 0;
    for (int32_t i = 0; i < 10000; i++) {
        const double u = uniform(5, i, 3);
        CHECK(u >= 0 && u < 1);
        sum += u;
    }
    CHECK(std::abs(sum / 10000 - .5) < .01);
}

void test_against_naive() {
    std::mt19937 generator(3);
    const auto pick = [&](auto... values) {
        const float choices[] = {static_cast<float>(values)...};
        return choices[generator() % (sizeof choices / sizeof(float))];
    };
    for (const std::string& isa : supported_isas()) {
        for (int trial = 0; trial < 1500; trial++) {
            const int64_t vocabulary = trial % 100 == 0 ? 5000 : 1 + generator() % 700;
            Sampler sampler(kernels_for(isa), vocabulary);
            std::normal_distribution<float> normal(0, pick(0.01, 1, 5));
            std::vector<float> logits(static_cast<size_t>(vocabulary));
            for (float& x : logits) x = normal(generator);
            if (trial % 3 == 0)
                for (float& x : logits) x = std::round(x);  // many ties
            Row row;
            row.temperature[0] = pick(0, .01, .7, 1, 3);
            row.top_k[0] = static_cast<int32_t>(pick(0, 0, 1, 5, 50, 1000));
            row.top_p[0] = pick(1, 1, .5, .9, .999, 1e-6);
            row.min_p[0] = pick(0, 0, .05, .5, 1);
            row.seed[0] = generator();
            row.position[0] = trial;
            row.choice[0] = static_cast<int32_t>(generator() % 4);
            if (trial % 4 == 0) {
                row.repetition[0] = pick(.8, 1, 1.3);
                row.presence[0] = pick(-.5, 0, .5);
                row.frequency[0] = pick(-.1, 0, .2);
                for (int32_t id = 0; id < vocabulary; id += 1 + static_cast<int32_t>(generator() % 9)) {
                    row.penalty_ids.push_back(id);
                    row.penalty_counts.push_back(static_cast<int32_t>(generator() % 3));
                }
            }
            if (trial % 5 == 0 && vocabulary > 1) {
                row.bias_ids = {0, static_cast<int32_t>(vocabulary) - 1};
                row.bias_values = {-static_cast<float>(kInfinity), 3};
            }
            if (trial % 7 == 0) {
                row.mask_row[0] = 0;
                for (int64_t id = 0; id < vocabulary; id += 32) row.masks.push_back(generator() % 2 ? ~0u : static_cast<uint32_t>(generator()));
                row.masks.back() |= 1u << (vocabulary - 1) % 32;  // a token at the least, and one that is not biased
                row.bias_ids.clear(), row.bias_values.clear();
            }
            const SamplingBatch batch = row.batch();
            StepResult result(batch);
            CHECK(sampler.sample(logits.data(), batch, 0, result));
            CHECK(result.token_ids[0] == naive(logits, row));
        }
    }
}

void test_logprobs() {
    std::vector<float> logits = {1, 3, 3, -2, -static_cast<float>(kInfinity), 0.5};
    double sum = 0;
    for (float x : logits) sum += std::exp(double(x));
    Sampler sampler(kernels_for(""), 6);
    Row row;
    row.temperature[0] = 0;
    row.bias_ids = {1};
    row.bias_values = {-1};  // so that 2 is chosen; the logprobs are of the raw logits
    row.num_logprobs[0] = 4;
    const SamplingBatch batch = row.batch();
    StepResult result(batch);
    CHECK(sampler.sample(logits.data(), batch, 0, result));
    CHECK(result.token_ids[0] == 2 && result.ranks[0] == 2 && result.num_top == 4);
    CHECK(std::abs(result.logprobs[0] - (3 - std::log(sum))) < 1e-6);
    const int32_t expected[] = {1, 2, 0, 5};
    for (size_t i = 0; i < 4; i++) {
        CHECK(result.top_token_ids[i] == expected[i]);
        CHECK(std::abs(result.top_logprobs[i] - (logits[static_cast<size_t>(expected[i])] - std::log(sum))) < 1e-6);
    }
    row.given[0] = 0;  // whatever the temperature
    row.temperature[0] = 5;
    const SamplingBatch told = row.batch();
    StepResult given(told);
    CHECK(sampler.sample(logits.data(), told, 0, given));
    CHECK(given.token_ids[0] == 0 && given.ranks[0] == 3 && given.top_token_ids[0] == 1);
    CHECK(std::abs(given.logprobs[0] - (1 - std::log(sum))) < 1e-6);
    row.given[0] = -1;
    row.num_logprobs[0] = 20;  // more than the vocabulary holds
    const SamplingBatch all = row.batch();
    StepResult all_result(all);
    CHECK(sampler.sample(logits.data(), all, 0, all_result));
    CHECK(all_result.top_token_ids[5] == 4 && all_result.top_logprobs[5] == -static_cast<float>(kInfinity));
    CHECK(all_result.top_token_ids[6] == -1 && std::isnan(all_result.top_logprobs[6]));
}

void test_nothing_to_choose() {
    const float infinity = static_cast<float>(kInfinity), nan = std::numeric_limits<float>::quiet_NaN();
    for (float temperature : {0.f, 1.f}) {
        Row row;
        row.temperature[0] = temperature;
        Sampler sampler(kernels_for(""), 3);
        const SamplingBatch batch = row.batch();
        StepResult result(batch);
        for (const std::vector<float>& logits :
             {std::vector<float>{0, nan, 1}, {-infinity, -infinity, -infinity}, {0, infinity, 0}}) {
            CHECK(!sampler.sample(logits.data(), batch, 0, result));
            CHECK(result.token_ids[0] == -1);
        }
        row.bias_ids = {0, 1, 2};
        row.bias_values = {-infinity, -infinity, -infinity};
        const std::vector<float> logits = {1, 2, 3};
        CHECK(!sampler.sample(logits.data(), row.batch(), 0, result));
    }
}

void test_check() {
    Row row;
    check_batch(row.batch(), 1, 10);
    CHECK_THROWS(std::invalid_argument, "sampling batch: temperature is not for 2 rows",
                 check_batch(row.batch(), 2, 10));
    row.penalty_ids = {10};
    row.penalty_counts = {1};
    CHECK_THROWS(std::invalid_argument, "sampling batch: penalty_token_ids: no token 10",
                 check_batch(row.batch(), 1, 10));
    row.penalty_counts = {};
    CHECK_THROWS(std::invalid_argument, "sampling batch: penalty_start does not span its entries",
                 check_batch(row.batch(), 1, 11));
}

}  // namespace

int main() {
    test_uniform();
    test_against_naive();
    test_logprobs();
    test_nothing_to_choose();
    test_check();
    return check::report();
}
