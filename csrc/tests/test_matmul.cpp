// Packed matrices and the matmul of every ISA that this processor has: close to plain double arithmetic on the numbers
// that the format and the instruction set are defined to use, bit for bit the same however the job is cut up, and
// quantised blocks of files kept as they are.
//   cmake -S . -B build/native -DMINIVLLM_TESTS=ON -DMINIVLLM_PYTHON=OFF && cmake --build build/native &&
//   build/native/test_matmul
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "packed_matrix.h"

using namespace minivllm;

namespace {

using Floats = std::vector<float>;
std::mt19937 generator(1);

Floats random_floats(int64_t n, float scale = 1) {
    std::normal_distribution<float> normal(0, scale);
    Floats x(static_cast<size_t>(n));
    for (float& value : x) value = normal(generator);
    return x;
}

double silu(double x) { return x / (1 + std::exp(-x)); }

// A matrix in its own memory.
struct Packed {
    PackedMatrix matrix;
    AlignedBuffer memory;

    Packed(Format format, bool tiles, int64_t panels, int64_t k) : matrix(format, tiles, panels, k), memory(matrix.num_bytes()) {
        matrix.place(memory.as<char>());
    }
    Packed(Format format, bool tiles, int64_t panels, int64_t k, const Floats& w) : Packed(format, tiles, panels, k) {
        for (int64_t p = 0; p < panels; p++)  // in two parts, as q and k may share a panel
            for (const auto& [lane, count] : {std::pair<int64_t, int64_t>{0, 5}, {5, kPanel - 5}})
                matrix.pack(Stored::f32, reinterpret_cast<const char*>(w.data() + (p * kPanel + lane) * k), p, lane, count);
    }
    Floats row(int64_t output) const {
        Floats values(static_cast<size_t>(matrix.k));
        matrix.read_row(output, values.data());
        return values;
    }
};

// A row of x as the kernel reads it, in float32.
Floats as_input(Input input, Floats x, int64_t planes = 1) {
    if (input == Input::bf16)
        for (float& value : x) value = widen(narrow(value));
    if (input != Input::groups) return x;
    Floats sum(x.size());
    for (int64_t plane = 0; plane < planes; plane++)
        for (size_t at = 0; at < x.size(); at += kGroup) {
            const size_t end = std::min(x.size(), at + kGroup);
            float most = 0;
            for (size_t i = at; i < end; i++) most = std::max(most, std::abs(x[i]));
            for (size_t i = at; i < end; i++) {
                const float y = most > 0 ? most / 127.f * std::nearbyint(x[i] * (127.f / most)) : 0;
                x[i] -= y;
                sum[i] += y;
            }
        }
    return sum;
}

void test_matmul(const Kernels& kernels, Format format, Number number, int64_t k, int64_t units, Epilogue epilogue,
                 bool with_bias, int64_t rows, int64_t planes = 1) {
    const bool gated = epilogue == Epilogue::activate_gated, activated = gated || epilogue == Epilogue::activate;
    const int64_t panels = units * (gated ? 2 : 1), stride = padded(k) + 32, out_stride = units * kPanel;
    const auto at = [](int64_t i) { return static_cast<size_t>(i); };
    const Packed w(format, kernels.bf16_tiles, panels, k,
                   random_floats(panels * kPanel * k, 1 / std::sqrt(static_cast<float>(k))));
    const Floats bias = random_floats(panels * kPanel), before = random_floats(rows * out_stride), x = random_floats(rows * stride, 2);
    std::vector<uint16_t> x_half(x.size());
    std::transform(x.begin(), x.end(), x_half.begin(), [](float v) { return narrow(v); });

    const Input input = input_of(format);
    const int64_t row_bytes = input_bytes(input, k, kernels.group_bytes, planes);
    AlignedBuffer prepared((rows + 15) * row_bytes), scratch(matmul_scratch_size(k));
    const Prepare prepare{number, number == Number::f32 ? static_cast<const void*>(x.data()) : x_half.data(), stride, k, input,
                          prepared.as<char>(), row_bytes, planes};
    for (int64_t r = 0; r < rows; r += 3) kernels.prepare(prepare, r, std::min(rows, r + 3));

    std::vector<uint16_t> next_half(before.size());
    Floats out = before;
    Matmul job{format, prepared.as<char>(), row_bytes, w.matrix.panels(), k, with_bias ? bias.data() : nullptr, epilogue,
               Activation::silu, number, nullptr, out_stride, units, 1, planes};
    const auto run = [&](Floats& to, std::vector<uint16_t>& to_half, int64_t height, int64_t width) {
        job.out = activated && number == Number::bf16 ? static_cast<void*>(to_half.data()) : to.data();
        for (int64_t r = 0; r < rows; r += height)
            for (int64_t unit = 0; unit < units; unit += width)
                kernels.matmul(job, r, std::min(rows, r + height), unit, std::min(units, unit + width), scratch.as<char>());
    };
    run(out, next_half, rows, units);

    const double tolerance = planes == 2 ? 3e-5 : 1e-6;  // the last bit of what is left over may fall either way
    std::vector<Floats> weights;
    for (int64_t o = 0; o < panels * kPanel; o++) weights.push_back(w.row(o));
    for (int64_t r = 0; r < rows; r++) {
        Floats row(x.begin() + r * stride, x.begin() + r * stride + k);
        if (number == Number::bf16) row = as_input(Input::bf16, row);
        row = as_input(input, row, planes);
        for (int64_t o = 0; o < out_stride; o++) {
            double size = 1;  // of what is summed up: errors are in proportion to it
            const auto product = [&](int64_t output) {
                double y = with_bias ? bias[at(output)] : 0;
                for (int64_t i = 0; i < k; i++) {
                    const double term = double(row[at(i)]) * weights[at(output)][at(i)];
                    y += term;
                    size += std::abs(term);
                }
                return y;
            };
            double y = gated ? silu(product(o / kPanel * 2 * kPanel + o % kPanel)) * product((o / kPanel * 2 + 1) * kPanel + o % kPanel)
                             : product(o);
            if (gated) size *= size;
            if (epilogue == Epilogue::activate) y = silu(y);
            if (epilogue == Epilogue::add) y += before[at(r * out_stride + o)];
            const bool half = activated && number == Number::bf16;
            const double ours = half ? widen(next_half[at(r * out_stride + o)]) : out[at(r * out_stride + o)];
            CHECK(std::abs(ours - y) <= (half ? 4e-3 * std::abs(y) : 0) + tolerance * size);
        }
    }

    for (int64_t height : {1, 2, 3, 5, 7, 15, 16, 17, 31, 33}) {
        for (int64_t width : {int64_t{1}, units}) {
            std::vector<uint16_t> half_again(before.size());
            Floats again = before;
            run(again, half_again, height, width);
            CHECK(again == out && half_again == next_half);
        }
    }
}

constexpr Format kFormats[] = {Format::f32, Format::bf16, Format::int8, Format::int4};

void test_isa(const Kernels& kernels) {
    const int before = check::failures();
    for (Format format : kFormats)
        for (Number number : {Number::f32, Number::bf16}) {
            for (int64_t k : {1, 2, 33, 200, 320})
                for (Epilogue e : {Epilogue::store, Epilogue::add, Epilogue::activate, Epilogue::activate_gated})
                    test_matmul(kernels, format, number, k, k == 200 ? 3 : 1, e, k % 2 == 0, k == 33 ? 41 : 7);
            test_matmul(kernels, format, number, 64, 5, Epilogue::activate_gated, true, 70);
            test_matmul(kernels, format, number, 70, 3, Epilogue::store, true, 37, 2);
        }
    std::fprintf(stderr, "%s: %s\n", kernels.isa, check::failures() == before ? "good" : "BAD");
}

// NaN and infinity in a row are not lost, and stay there.
void test_not_finite(const Kernels& kernels) {
    for (Format format : kFormats)
        for (float bad : {std::nanf(""), INFINITY}) {
            const int64_t k = 70, rows = 3;
            const Packed w(format, kernels.bf16_tiles, 1, k, random_floats(kPanel * k));
            Floats x = random_floats(rows * k), out(rows * kPanel);
            x[k + 40] = bad;
            const Input input = input_of(format);
            const int64_t row_bytes = input_bytes(input, k, kernels.group_bytes);
            AlignedBuffer prepared((rows + 15) * row_bytes), scratch(matmul_scratch_size(k));
            kernels.prepare({Number::f32, x.data(), k, k, input, prepared.as<char>(), row_bytes}, 0, rows);
            kernels.matmul({format, prepared.as<char>(), row_bytes, w.matrix.panels(), k, nullptr, Epilogue::store,
                            Activation::silu, Number::f32, out.data(), kPanel}, 0, rows, 0, 1, scratch.as<char>());
            for (size_t i = 0; i < out.size(); i++) CHECK(std::isfinite(out[i]) == (i / kPanel != 1));
        }
}

// Nor are they in a weight, wherever it is in its group.
void test_not_finite_weights() {
    for (Format format : {Format::int8, Format::int4})
        for (int64_t i = 0; i < kGroup; i++)
            for (float bad : {std::nanf(""), INFINITY, -INFINITY}) {
                const int64_t k = 2 * kGroup;
                Floats weights = random_floats(kPanel * k);
                weights[static_cast<size_t>(3 * k + i)] = bad;
                const Packed w(format, false, 1, k, weights);
                for (int64_t output : {2, 3}) {
                    const Floats row = w.row(output);
                    for (int64_t at = 0; at < k; at++)
                        CHECK(std::isfinite(row[static_cast<size_t>(at)]) == (output == 2 || at >= kGroup));
                }
            }
}

void test_halves() {
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        const auto half = static_cast<uint16_t>(bits);
        const float value = from_half(half);
        if ((half & 0x7c00) == 0x7c00) {
            CHECK(half & 0x3ff ? std::isnan(value) && std::isnan(from_half(to_half(value))) : std::isinf(value));
            continue;
        }
        CHECK(value == std::ldexp(static_cast<float>(half & 0x7c00 ? (half & 0x3ff) | 0x400 : half & 0x3ff),
                                  std::max(1, half >> 10 & 31) - 25) * (half & 0x8000 ? -1.f : 1.f));
        CHECK(to_half(value) == half);
        if ((half & 0x7fff) == 0x7bff) continue;
        const float next = from_half(half + 1), middle = (value + next) / 2;
        CHECK(to_half(middle) == (half & 1 ? half + 1 : half));
        CHECK(to_half(std::nextafter(middle, next)) == half + 1 && to_half(std::nextafter(middle, value)) == half);
    }
    CHECK(to_half(1e9f) == 0x7bff && to_half(-1e9f) == 0xfbff);
}

// Where a block has d and, if it has one, the minimum (or its scale), the minimum's size in d, and which format has such
// groups (f32: none), up to scales that are finer than float16.
struct BlockLayout {
    Stored stored;
    size_t d, m;
    float minimum;
    Format kept;
    bool finer;
};
constexpr size_t kNowhere = 0xffff;
const BlockLayout kLayouts[] = {
    {Stored::q4_0, 0, kNowhere, 0, Format::int4, false},     {Stored::q4_1, 0, 2, -7.3f, Format::int4, false},
    {Stored::q5_0, 0, kNowhere, 0, Format::int8, false},     {Stored::q5_1, 0, 2, -15.3f, Format::f32, false},
    {Stored::q8_0, 0, kNowhere, 0, Format::int8, false},     {Stored::q2_k, 80, 82, 1.6f, Format::f32, false},
    {Stored::q3_k, 108, kNowhere, 0, Format::f32, false},    {Stored::q4_k, 0, 2, 7.3f, Format::int4, true},
    {Stored::q5_k, 0, 2, 15.3f, Format::f32, false},         {Stored::q6_k, 208, kNowhere, 0, Format::f32, false},
    {Stored::iq4_nl, 0, kNowhere, 0, Format::int8, false},   {Stored::iq4_xs, 0, kNowhere, 0, Format::int8, true},
};

std::vector<char> random_blocks(const BlockLayout& layout, int64_t size) {
    std::vector<char> blocks(static_cast<size_t>(size));
    for (char& byte : blocks) byte = static_cast<char>(generator());
    for (size_t i = 0; i < blocks.size(); i += static_cast<size_t>(block_size(layout.stored).bytes)) {
        const float scale = std::ldexp(1 + static_cast<float>(generator() % 1024) / 1024, -static_cast<int>(generator() % 24));
        const uint16_t d = to_half(generator() % 9 ? scale : 0), m = to_half(layout.minimum * scale);
        std::memcpy(&blocks[i + layout.d], &d, 2);
        if (layout.m != kNowhere) std::memcpy(&blocks[i + layout.m], &m, 2);
    }
    return blocks;
}

// Blocks of every type in every format: the one that has such groups keeps them, others come near, 8 bits within 1 %.
void test_blocks() {
    for (const BlockLayout& layout : kLayouts)
        for (bool tiles : {false, true}) {
            const int64_t k = 512, bytes = stored_bytes(layout.stored, k);
            const std::vector<char> rows = random_blocks(layout, kPanel * bytes);
            for (Format format : kFormats) {
                Packed packed(format, tiles, 1, k);
                packed.matrix.pack(layout.stored, rows.data(), 0, 0, kPanel);
                const bool kept = format == layout.kept, exact = format == Format::f32 || (kept && !layout.finer);
                // The least squared error of 4 bits may cut off an extreme.
                const float step = kept ? 1.f / 500 : format == Format::bf16 ? 1.f / 256 : format == Format::int8 ? 1.f / 253 : 1.f / 5;
                double error = 0, sum = 0;
                for (int64_t o = 0; o < kPanel; o++) {
                    const Floats ours = packed.row(o);
                    for (int64_t at = 0; at < k; at += kBlock) {
                        float x[kBlock], most = 0;
                        read_stored(layout.stored, rows.data() + o * bytes, at, kBlock, x);
                        for (float value : x) most = std::max(most, std::abs(value));
                        for (int64_t i = 0; i < kBlock; i++) {
                            const float y = ours[static_cast<size_t>(at + i)];
                            CHECK(exact ? y == x[i] : std::abs(y - x[i]) <= step * most + 1e-5f);
                            error += std::pow(y - x[i], 2);
                            sum += std::pow(x[i], 2);
                        }
                    }
                }
                if (format == Format::int8 || kept) CHECK(sum > 0 && std::sqrt(error / sum) < .01);
            }
        }
}

// A scale that float16 does not hold makes weights that are no numbers, not smaller ones.
void test_blocks_without_numbers() {
    for (const BlockLayout& layout : kLayouts)
        for (float bad : {std::nanf(""), INFINITY})
            for (Format format : kFormats) {
                const int64_t k = 256;
                std::vector<char> rows = random_blocks(layout, kPanel * stored_bytes(layout.stored, k));
                const uint16_t d = bad == bad ? 0x7c00 : 0x7e00;
                std::memcpy(&rows[layout.d], &d, 2);
                Packed packed(format, false, 1, k);
                packed.matrix.pack(layout.stored, rows.data(), 0, 0, kPanel);
                const Floats first = packed.row(0);
                CHECK(!std::all_of(first.begin(), first.end(), [](float w) { return std::isfinite(w); }));
            }
}

// 4 bits: no worse than plain rounding between the smallest and the largest.
void test_quality_of_int4() {
    for (int trial = 0; trial < 200; trial++) {
        const Floats x = random_floats(kGroup * kPanel, trial % 2 ? 1e-3f : 1);
        const Packed packed(Format::int4, false, 1, kGroup, x);
        for (int64_t o = 0; o < kPanel; o++) {
            const auto row = x.begin() + o * kGroup;
            const auto [low, high] = std::minmax_element(row, row + kGroup);
            const float d = (*high - *low) / 15;
            const Floats ours = packed.row(o);
            double error = 0, plain = 0;
            for (int64_t i = 0; i < kGroup; i++) {
                error += std::pow(ours[static_cast<size_t>(i)] - row[i], 2);
                plain += std::pow(*low + d * std::round((row[i] - *low) / d) - row[i], 2);
            }
            CHECK(error <= 1.01 * plain);
        }
    }
}

}  // namespace

int main() {
    test_halves();
    test_blocks();
    test_blocks_without_numbers();
    test_quality_of_int4();
    test_not_finite_weights();
    for (const std::string& isa : supported_isas()) {
        test_isa(kernels_for(isa));
        test_not_finite(kernels_for(isa));
    }
    return check::report();
}
