// Every kernel but the matmul (test_matmul.cpp), of every ISA that this processor has: close to the same formula in plain double arithmetic, and bit
// for bit the same however the rows are cut up.
//   cmake -S . -B build/native -DMINIVLLM_TESTS=ON -DMINIVLLM_PYTHON=OFF && cmake --build build/native &&
//   build/native/test_kernels
#include "kernels/kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>

#include "check.h"

using namespace minivllm;

namespace {

using Floats = std::vector<float>;
std::mt19937 generator(1);
const float kNan = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();

Floats random_floats(int64_t n, float scale = 1) {
    std::normal_distribution<float> normal(0, scale);
    Floats x(static_cast<size_t>(n));
    for (float& value : x) value = normal(generator);
    return x;
}

float widen(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

uint16_t narrow(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

std::vector<uint16_t> narrow(const Floats& x) {
    std::vector<uint16_t> result(x.size());
    std::transform(x.begin(), x.end(), result.begin(), [](float v) { return narrow(v); });
    return result;
}

bool close(double a, double b, double tolerance) { return std::abs(a - b) <= tolerance * (1 + std::abs(b)); }

double activation(Activation kind, double x) {
    if (kind == Activation::silu) return x / (1 + std::exp(-x));
    if (kind == Activation::gelu) return x * .5 * std::erfc(-x / std::sqrt(2.));
    return x * .5 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

void test_activations(const Kernels& kernels) {
    Floats x = random_floats(1001, 3);
    for (float special : {0.f, -0.f, 20.f, -20.f, 100.f, -100.f, 1e-20f, 3e38f, -3e38f}) x.push_back(special);
    for (Activation kind : {Activation::silu, Activation::gelu, Activation::gelu_tanh}) {
        Floats y(x.size());
        kernels.activate(kind, x.data(), y.data(), static_cast<int64_t>(x.size()));
        for (size_t i = 0; i < x.size(); i++) {
            const double expected = activation(kind, x[i]);
            // Absolutely near zero, relatively elsewhere; tails to the left go to 0.
            CHECK(std::abs(y[i] - expected) <= 1e-6 * std::max(1., std::abs(expected)));
        }
        float nan = kNan;
        kernels.activate(kind, &nan, &nan, 1);
        CHECK(std::isnan(nan));
    }
}

void test_exp(const Kernels& kernels) {
    for (int64_t n : {1, 7, 8, 1003}) {
        std::vector<double> x(static_cast<size_t>(n)), y(x.size());
        std::uniform_real_distribution<double> uniform(-720, 5);
        for (double& value : x) value = uniform(generator);
        x[0] = 5;
        if (n > 2) x[1] = -std::numeric_limits<double>::infinity(), x[2] = 4.999999999;
        kernels.exp_double(x.data(), 5, y.data(), n);
        CHECK(y[0] == 1);
        for (size_t i = 0; i < x.size(); i++) {
            const double expected = std::exp(x[i] - 5);
            CHECK(std::abs(y[i] - expected) <= (expected < 1e-300 ? 1e-300 : 4e-16 * expected));
        }
    }
}

void test_sampling(const Kernels& kernels) {
    for (int64_t n : {1, 7, 64, 65, 1003}) {
        const Floats logits = random_floats(n, 4);
        std::vector<double> x(static_cast<size_t>(n)), sums(static_cast<size_t>((n + kExpBlock - 1) / kExpBlock));
        kernels.relative(logits.data(), .3, 7, x.data(), n);
        for (size_t i = 0; i < x.size(); i++) CHECK(x[i] == double(logits[i]) * .3 - 7);
        x[x.size() / 2] = -std::numeric_limits<double>::infinity();
        kernels.exp_sums(x.data(), 3, sums.data(), n);
        for (size_t block = 0; block < sums.size(); block++) {
            double expected = 0;
            for (size_t i = block * kExpBlock; i < std::min(x.size(), (block + 1) * kExpBlock); i++) expected += std::exp(x[i] - 3);
            CHECK(std::abs(sums[block] - expected) <= 1e-14 * expected);
        }
        const double highest = *std::max_element(x.begin(), x.end());
        for (double least : {highest, highest - .1, -7., -std::numeric_limits<double>::infinity(), highest + 1})
            for (int64_t start : {int64_t{0}, n / 3, n - 1, n}) {
                int64_t expected = start;
                while (expected < n && x[static_cast<size_t>(expected)] < least) expected++;
                CHECK(kernels.find_from(x.data(), start, n, least) == expected);
            }
    }
}

void test_argmax(const Kernels& kernels) {
    for (int64_t n : {1, 3, 16, 17, 100, 1000}) {
        Floats x = random_floats(n);
        const auto largest = std::max_element(x.begin(), x.end());
        CHECK(kernels.argmax(x.data(), n) == largest - x.begin());
        x.back() = *largest;  // a tie: the first counts
        CHECK(kernels.argmax(x.data(), n) == std::max_element(x.begin(), x.end()) - x.begin());
        for (float bad : {kNan, kInfinity}) {
            for (size_t at : {size_t{0}, x.size() / 2, x.size() - 1}) {
                Floats y = x;
                y[at] = bad;
                CHECK(kernels.argmax(y.data(), n) == -1);
            }
        }
        Floats nothing(x.size(), -kInfinity);
        CHECK(kernels.argmax(nothing.data(), n) == -1);
        nothing.back() = -5;
        CHECK(kernels.argmax(nothing.data(), n) == n - 1);
    }
}

void test_norm(const Kernels& kernels) {
    for (int64_t size : {1, 20, 64, 577}) {
        const int64_t rows = 3, stride = padded(size);
        const Floats x = random_floats(rows * stride, 2), weight = random_floats(size), bias = random_floats(size);
        for (Norm kind : {Norm::layernorm, Norm::rmsnorm}) {
            Floats y(x.size(), kNan);
            std::vector<uint16_t> y_half(x.size(), 0x7fc0);
            NormRows job{kind, Number::f32, x.data(), stride, size, weight.data(), bias.data(), 1e-5f, y.data(), stride};
            kernels.norm(job, 0, rows);
            job.out = y_half.data();
            job.out_number = Number::bf16;
            for (int64_t r = 0; r < rows; r++) kernels.norm(job, r, r + 1);
            CHECK(narrow(y) == y_half);
            for (int64_t r = 0; r < rows; r++) {
                const float* row = x.data() + r * stride;
                double mean = 0, squares = 0;
                if (kind == Norm::layernorm)
                    for (int64_t i = 0; i < size; i++) mean += row[i] / static_cast<double>(size);
                for (int64_t i = 0; i < size; i++) squares += (row[i] - mean) * (row[i] - mean) / static_cast<double>(size);
                for (int64_t i = 0; i < stride; i++) {
                    const auto at = static_cast<size_t>(i);
                    const double expected =
                        i < size ? (row[i] - mean) / std::sqrt(squares + 1e-5) * weight[at] + bias[at] : 0;
                    CHECK(close(y[static_cast<size_t>(r * stride + i)], expected, 1e-5));
                }
            }
        }
    }
}

// A cache of one layer, the last `context` positions of one sequence in shuffled blocks, all else NaN.
struct Cache {
    int64_t kv_heads, block_size, head_dim, num_blocks;
    std::vector<int32_t> table;
    Floats keys, values;             // what the cells say
    std::vector<char> cells;         // [blocks][kv_heads][K, V][block_size]
    CacheFormat format;

    Cache(int64_t kv_heads_, int64_t block_size_, int64_t head_dim_, int64_t context, CacheFormat format_)
        : kv_heads(kv_heads_), block_size(block_size_), head_dim(head_dim_), format(format_) {
        num_blocks = (context + block_size - 1) / block_size + 2;
        for (int32_t i = 0; i < num_blocks; i++) table.push_back(i);
        std::shuffle(table.begin(), table.end(), generator);
        keys = values = Floats(static_cast<size_t>(num_blocks * kv_heads * block_size * head_dim), kNan);
        cells = std::vector<char>(2 * keys.size() / static_cast<size_t>(head_dim) * bytes(), '\xff');  // NaN in every format
        for (int64_t position = 0; position < context; position++)
            for (int64_t head = 0; head < kv_heads; head++) {
                write(random_floats(head_dim), cell(position, head, false));
                write(random_floats(head_dim), cell(position, head, true));
                for (int64_t d = 0; d < head_dim; d++) {
                    keys[at(position, head, d)] = read(cell(position, head, false), d);
                    values[at(position, head, d)] = read(cell(position, head, true), d);
                }
            }
    }

    size_t bytes() const { return static_cast<size_t>(cell_bytes(format, head_dim)); }

    char* cell(int64_t position, int64_t head, bool value) {
        const int64_t block = table[static_cast<size_t>(position / block_size)];
        const int64_t run = (block * kv_heads + head) * 2 + (value ? 1 : 0);
        return cells.data() + static_cast<size_t>(run * block_size + position % block_size) * bytes();
    }

    // A number as its cell says; that of 8 bits rounded to bfloat16, as attention reads it.
    float read(const char* cell, int64_t d) const {
        float x;
        uint16_t half;
        switch (format) {
            case CacheFormat::f32: std::memcpy(&x, cell + 4 * d, 4); return x;
            case CacheFormat::bf16: std::memcpy(&half, cell + 2 * d, 2); return widen(half);
            default:
                std::memcpy(&x, cell + head_dim, 4);
                return widen(narrow(static_cast<float>(static_cast<int8_t>(cell[d])) * x));
        }
    }

    void write(const Floats& x, char* cell) const {
        float largest = 0;
        for (float value : x) largest = std::max(largest, std::abs(value));
        const float scale = largest / 127;
        for (size_t d = 0; d < x.size(); d++) {
            const uint16_t half = narrow(x[d]);
            if (format == CacheFormat::f32) std::memcpy(cell + 4 * d, &x[d], 4);
            if (format == CacheFormat::bf16) std::memcpy(cell + 2 * d, &half, 2);
            if (format == CacheFormat::int8) cell[d] = static_cast<char>(std::lrint(x[d] / scale));
        }
        if (format == CacheFormat::int8) std::memcpy(cell + x.size(), &scale, 4);
    }

    size_t at(int64_t position, int64_t head, int64_t d) const {
        const int64_t block = table[static_cast<size_t>(position / block_size)];
        return static_cast<size_t>(((block * kv_heads + head) * block_size + position % block_size) * head_dim + d);
    }

    CacheLayer layer() { return {format, cells.data(), kv_heads, block_size, head_dim}; }
};

void test_attention(const Kernels& kernels, int64_t block_size, int64_t head_dim, int64_t context, CacheFormat format) {
    const bool half = format != CacheFormat::f32;
    const int64_t kv_heads = 2, group = 3, heads = kv_heads * group, rows = std::min<int64_t>(context, 9);
    const int64_t stride = padded(heads * head_dim);
    Cache cache(kv_heads, block_size, head_dim, context, format);
    const Floats q = random_floats(rows * stride), angles = random_floats(rows * head_dim);
    const int64_t turned = head_dim % 2 ? 0 : head_dim / 2;  // queries of odd heads are left as they are
    Floats cos_sin;
    for (int64_t i = 0; i < rows * head_dim; i++) {
        const bool cos = i % head_dim < turned;
        const float angle = 9 * angles[static_cast<size_t>(cos ? i : i - turned)];
        cos_sin.push_back(cos ? std::cos(angle) : std::sin(angle));
    }
    std::vector<int32_t> positions;
    for (int64_t r = 0; r < rows; r++) positions.push_back(static_cast<int32_t>(context - rows + r));
    Floats scratch(static_cast<size_t>(attention_scratch_size(rows * group, head_dim)));

    Floats out(q.size());
    Attention job{cache.layer(), q.data(), stride, heads, turned ? cos_sin.data() : nullptr, .3f, Number::f32, out.data(), stride};
    const QueryTile tile{0, rows, positions.data(), cache.table.data()};
    kernels.attend(job, tile, 0, kv_heads, {}, scratch.data());

    // But with a float32 cache, queries are rounded to bfloat16, and so are the weights, which the tolerance is for.
    const auto query = [&](int64_t r, int64_t h, int64_t d) {
        const float* x = q.data() + r * stride + h * head_dim;
        float value = x[d];
        if (turned) {
            const float *cos = cos_sin.data() + r * head_dim, *sin = cos + turned;
            value = d < turned ? x[d] * cos[d] - x[d + turned] * sin[d]
                               : x[d] * cos[d - turned] + x[d - turned] * sin[d - turned];
        }
        return half ? widen(narrow(value)) : value;
    };
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < heads; h++) {
            const int64_t keys = positions[static_cast<size_t>(r)] + 1;
            std::vector<double> weight, sum(static_cast<size_t>(head_dim));
            double total = 0;
            for (int64_t j = 0; j < keys; j++) {
                double score = 0;
                for (int64_t d = 0; d < head_dim; d++)
                    score += double(query(r, h, d)) * cache.keys[cache.at(j, h / group, d)];
                weight.push_back(std::exp(.3 * score));
                total += weight.back();
            }
            for (int64_t j = 0; j < keys; j++)
                for (int64_t d = 0; d < head_dim; d++)
                    sum[static_cast<size_t>(d)] += weight[static_cast<size_t>(j)] / total * cache.values[cache.at(j, h / group, d)];
            for (int64_t d = 0; d < head_dim; d++)
                CHECK(close(out[static_cast<size_t>(r * stride + h * head_dim + d)], sum[static_cast<size_t>(d)], half ? 6e-3 : 2e-5));
        }

    // Bit for bit the same row by row, two by two, and split by split.
    for (int64_t height : {1, 2}) {
        Floats by_rows(out.size());
        job.out = by_rows.data();
        for (int64_t r = 0; r < rows; r += height)
            for (int64_t head = 0; head < kv_heads; head++)
                kernels.attend(job, {r, std::min(height, rows - r), positions.data() + r, cache.table.data()}, head, head + 1, {},
                               scratch.data());
        CHECK(by_rows == out);
    }
    Floats by_split(out.size());
    job.out = by_split.data();
    const int64_t splits = positions.back() / kContextSplit + 1, partial = rows * group * partial_size(head_dim);
    Floats partials(static_cast<size_t>(splits * partial), kNan);
    for (int64_t head = 0; head < kv_heads; head++) {
        for (int64_t split = splits - 1; split >= 0; split--)
            kernels.attend_split(job, tile, head, split, {}, scratch.data(), partials.data() + split * partial, 0, rows);
        kernels.merge_splits(job, tile, head, partials.data());
    }
    CHECK(by_split == out);
}

void test_rope_and_store(const Kernels& kernels, CacheFormat format) {
    const int64_t heads = 4, kv_heads = 2, head_dim = 10, rows = 3, stride = padded((heads + 2 * kv_heads) * head_dim);
    Cache cache(kv_heads, 5, head_dim, 4, format);
    const Floats before = random_floats(rows * stride);
    Floats qkv = before, cos_sin;
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t i = 0; i < 5; i++) cos_sin.push_back(std::cos(static_cast<float>(r * 5 + i)));
        for (int64_t i = 0; i < 5; i++) cos_sin.push_back(std::sin(static_cast<float>(r * 5 + i)));
    }
    // Positions 4, 5 and 6: the fifth of one block, the first two of another.
    std::vector<int32_t> slots = {cache.table[0] * 5 + 4, cache.table[1] * 5, cache.table[1] * 5 + 1};
    kernels.rope_and_store({cache.layer(), qkv.data(), stride, heads, cos_sin.data(), slots.data()}, 0, rows);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t head = 0; head < heads + 2 * kv_heads; head++)
            for (int64_t d = 0; d < head_dim; d++) {
                const int64_t i = d % 5, other = d < 5 ? d + 5 : d - 5;
                const float* x = before.data() + r * stride + head * head_dim;
                const double angle = static_cast<double>(r * 5 + i);
                const double turned = x[d] * std::cos(angle) + (d < 5 ? -1 : 1) * x[other] * std::sin(angle);
                const auto stored = [&](int64_t kv_head, bool value) {
                    return cache.read(cache.cell(4 + r, kv_head, value), d);
                };
                const double tolerance = format == CacheFormat::f32 ? 1e-6 : format == CacheFormat::bf16 ? 5e-3 : 2e-2;
                if (head < heads)
                    CHECK(qkv[static_cast<size_t>(r * stride + head * head_dim + d)] == x[d]);  // attention turns it
                else if (head < heads + kv_heads)
                    CHECK(close(stored(head - heads, false), turned, tolerance));
                else
                    CHECK(close(stored(head - heads - kv_heads, true), x[d], tolerance));
            }
}

void test_isa(const Kernels& kernels) {
    const int before = check::failures();
    test_activations(kernels);
    test_exp(kernels);
    test_sampling(kernels);
    test_argmax(kernels);
    test_norm(kernels);
    for (CacheFormat format : {CacheFormat::f32, CacheFormat::bf16, CacheFormat::int8}) {
        test_rope_and_store(kernels, format);
        for (int64_t block_size : {1, 16, 256})
            for (int64_t context : {1, 63, 65, 520, 1100}) test_attention(kernels, block_size, 20, context, format);
        test_attention(kernels, 48, 64, 1030, format);
        test_attention(kernels, 16, 128, 130, format);
        test_attention(kernels, 16, 96, 200, format);
        test_attention(kernels, 32, 32, 77, format);
        test_attention(kernels, 7, 3, 70, format);
    }
    std::fprintf(stderr, "%s: %s\n", kernels.isa, check::failures() == before ? "good" : "BAD");
}

}  // namespace

int main() {
    for (const std::string& isa : supported_isas()) test_isa(kernels_for(isa));
    CHECK(kernels_for("").isa == supported_isas().front());
    CHECK(supported_isas().back() == "scalar");
    bool thrown = false;
    try {
        kernels_for("sse9");
    } catch (const std::invalid_argument& error) {
        thrown = std::string(error.what()).find("'sse9'") != std::string::npos;
    }
    CHECK(thrown);
    return check::report();
}
