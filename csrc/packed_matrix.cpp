#include "packed_matrix.h"

#include <algorithm>
#include <cmath>

namespace minivllm {
namespace {

static_assert(kBlock == kGroup, "groups of quantised weights are taken over one for one");

// A group of int8 or int4 weights of one output.
struct Quantized {
    uint8_t q[kGroup];  // int8: 128 + q
    uint16_t d, m;      // float16
};

// NaN if one of them is not finite, for the scale of such a group; else 0.
float not_finite(const float* x) {
    float sum = 0;
    for (int64_t i = 0; i < kGroup; i++) sum += x[i] * 0.f;
    return sum;
}

Quantized quantize8(const float* x) {
    float most = 0;
    for (int64_t i = 0; i < kGroup; i++) most = std::max(most, std::abs(x[i]));
    Quantized result;
    result.d = to_half(most / 127 + not_finite(x));
    const float d = from_half(result.d);
    for (int64_t i = 0; i < kGroup; i++) {
        const float q = d > 0 ? x[i] / d + 12582912.f - 12582912.f : 0;  // 1.5 · 2^23: adding it rounds to an integer
        result.q[i] = static_cast<uint8_t>(128 + static_cast<int>(std::max(-127.f, std::min(127.f, q == q ? q : 0))));
    }
    return result;
}

// The steps nearest to x with that scale and minimum; returns the squared error.
float nearest4(const float* x, uint16_t d_half, uint16_t m_half, uint8_t* q) {
    const float d = from_half(d_half), m = from_half(m_half), inverse = d > 0 ? 1 / d : 0;
    float error = 0;
    for (int64_t i = 0; i < kGroup; i++) {
        const float step = std::max(0.f, std::min(15.f, (x[i] - m) * inverse + .5f));
        q[i] = static_cast<uint8_t>(step == step ? step : 0);
        const float difference = d * static_cast<float>(q[i]) + m - x[i];
        error += difference * difference;
    }
    return error;
}

// Starts from several widths of the range, narrower ones cutting off the extremes; each is followed by the least-squares
// line through the steps found (d and m are then rounded to float16, and the steps chosen again).
Quantized quantize4(const float* x) {
    float low = x[0], high = x[0];
    for (int64_t i = 1; i < kGroup; i++) {
        low = std::min(low, x[i]);
        high = std::max(high, x[i]);
    }
    Quantized best{{}, 0, 0}, trial;
    float best_error = -1;
    for (const float width : {1.f, .95f, .9f, .85f, .8f, .7f}) {
        const float cut = (high - low) * (1 - width) / 2;
        float d = (high - low - 2 * cut) / 15, m = low + cut;
        for (int round = 0; round < 3; round++) {
            trial.d = to_half(d);
            trial.m = to_half(m);
            const float error = nearest4(x, trial.d, trial.m, trial.q);
            if (best_error < 0 || error < best_error) {
                best_error = error;
                best = trial;
            }
            float sum_q = 0, sum_qq = 0, sum_x = 0, sum_qx = 0;
            for (int64_t i = 0; i < kGroup; i++) {
                const float q = trial.q[i];
                sum_q += q;
                sum_qq += q * q;
                sum_x += x[i];
                sum_qx += q * x[i];
            }
            const float spread = kGroup * sum_qq - sum_q * sum_q;
            if (!(spread > 0)) break;
            d = (kGroup * sum_qx - sum_q * sum_x) / spread;
            m = (sum_x - d * sum_q) / kGroup;
        }
    }
    if (std::isnan(not_finite(x))) best.d = best.m = to_half(std::nanf(""));
    return best;
}

// Whether groups of that type are groups of that format: steps of 4 bits upwards from a minimum, or of 8 bits about zero.
bool is_kept(Stored stored, Format format) {
    switch (stored) {
        case Stored::q4_0:
        case Stored::q4_1:
        case Stored::q4_k: return format == Format::int4;
        case Stored::q5_0:
        case Stored::q8_0:
        case Stored::iq4_nl:
        case Stored::iq4_xs: return format == Format::int8;
        default: return false;
    }
}

// A scale or minimum of a file as our groups have it; where float16 has no number for it, the weights are none either.
uint16_t finite_half(float x) { return to_half(std::abs(x) <= 65504.f ? x : std::nanf("")); }

Quantized take_over(const Group& group, Format format) {
    const int offset = format == Format::int8 ? 128 : 0;
    Quantized result{{}, finite_half(group.d[0]), finite_half(group.m[0])};
    for (int64_t i = 0; i < kGroup; i++) result.q[i] = static_cast<uint8_t>(group.q[i] + offset);
    return result;
}

constexpr int64_t kGroupBytes8 = kPanel * (kGroup + 2), kGroupBytes4 = kPanel * (kGroup / 2 + 4);

uint16_t* scales8(char* group) { return reinterpret_cast<uint16_t*>(group + kPanel * kGroup); }
uint16_t* scales4(char* group) { return reinterpret_cast<uint16_t*>(group + kPanel * kGroup / 2); }

void put8(char* group, int64_t lane, const Quantized& from) {
    for (int64_t i = 0; i < kGroup; i += 4) std::memcpy(group + (i / 4 * kPanel + lane) * 4, from.q + i, 4);
    scales8(group)[lane] = from.d;
}

void put4(char* group, int64_t lane, const Quantized& from) {
    for (int64_t i = 0; i < kGroup / 2; i++)
        group[(i / 4 * kPanel + lane) * 4 + i % 4] = static_cast<char>(from.q[i] | from.q[kGroup / 2 + i] << 4);
    scales4(group)[lane] = from.d;
    scales4(group)[kPanel + lane] = from.m;
}

}  // namespace

PackedMatrix::PackedMatrix(Format format_, bool bf16_tiles, int64_t num_panels_, int64_t k_)
    : format(format_),
      k(k_),
      num_panels(num_panels_),
      panel_bytes_(panel_bytes(format_, k_, bf16_tiles)),
      bf16_tiles_(bf16_tiles) {}

// Where a bfloat16 panel has weight i of an output.
int64_t PackedMatrix::half_index(int64_t lane, int64_t i) const {
    if (!bf16_tiles_) return (i / 2 * kPanel + lane) * 2 + i % 2;
    return ((i / 32 * (kPanel / 16) + lane / 16) * 16 + i % 32 / 2) * 32 + lane % 16 * 2 + i % 2;
}

void PackedMatrix::pack(Stored stored, const char* rows, int64_t panel, int64_t lane, int64_t count) {
    const int64_t row_bytes = stored_bytes(stored, k);
    const bool kept = is_kept(stored, format);
    char* to = panel_at(panel);
    for (int64_t at = 0; at < k; at += kGroup) {
        const int64_t size = std::min(kGroup, k - at);
        for (int64_t row = 0; row < count; row++) {
            const char* from = rows + row * row_bytes;
            const int64_t l = lane + row;
            float x[kGroup] = {};
            if (!kept) read_stored(stored, from, at, size, x);
            switch (format) {
                case Format::f32:
                    for (int64_t i = 0; i < size; i++) reinterpret_cast<float*>(to)[(at + i) * kPanel + l] = x[i];
                    break;
                case Format::bf16: {
                    auto* group = reinterpret_cast<uint16_t*>(to) + half_index(l, at);
                    const int64_t step = half_index(0, 2);
                    for (int64_t i = 0; i < size; i++) group[i / 2 * step + i % 2] = narrow(x[i]);
                    break;
                }
                case Format::int8:
                    put8(to + at / kGroup * kGroupBytes8, l,
                         kept ? take_over(read_group(stored, from, at), format) : quantize8(x));
                    break;
                case Format::int4:
                    put4(to + at / kGroup * kGroupBytes4, l,
                         kept ? take_over(read_group(stored, from, at), format) : quantize4(x));
                    break;
            }
        }
    }
}

void PackedMatrix::read_row(int64_t output, float* to) const {
    char* panel = panel_at(output / kPanel);
    const int64_t lane = output % kPanel;
    switch (format) {
        case Format::f32:
            for (int64_t i = 0; i < k; i++) to[i] = reinterpret_cast<const float*>(panel)[i * kPanel + lane];
            break;
        case Format::bf16:
            for (int64_t i = 0; i < k; i++) to[i] = widen(reinterpret_cast<const uint16_t*>(panel)[half_index(lane, i)]);
            break;
        case Format::int8:
            for (int64_t i = 0; i < k; i++) {
                char* group = panel + i / kGroup * kGroupBytes8;
                const auto byte = static_cast<uint8_t>(group[(i % kGroup / 4 * kPanel + lane) * 4 + i % 4]);
                to[i] = from_half(scales8(group)[lane]) * static_cast<float>(byte - 128);
            }
            break;
        case Format::int4:
            for (int64_t i = 0; i < k; i++) {
                char* group = panel + i / kGroup * kGroupBytes4;
                const auto byte = static_cast<uint8_t>(group[(i % 16 / 4 * kPanel + lane) * 4 + i % 4]);
                const int q = i % kGroup < 16 ? byte & 15 : byte >> 4;
                to[i] = from_half(scales4(group)[lane]) * static_cast<float>(q) + from_half(scales4(group)[kPanel + lane]);
            }
            break;
    }
}

}  // namespace minivllm
