// Weights as checkpoint files store them, read as float32. Knows nothing of files.
//
// ggml's quantised blocks (github.com/ggml-org/ggml, ggml-common.h), little-endian, d and m float16:
//   q4_0  d | 16 bytes of nibbles      w = d (q − 8)
//   q4_1  d | m | 16 bytes of nibbles  w = d q + m
//   q8_0  d | 32 int8                  w = d q
//   q6_k  128 bytes of low nibbles | 64 bytes of high bit pairs | 16 int8 scales s | d      256 weights, w = d s (q − 32)
// The other blocks are 32 weights along the inputs; byte i of the nibbles holds weight i (low half) and i + 16 (high
// half). In a half of q6_k's weights, quarter j takes the low (j < 2) or high nibbles of bytes 32 (j % 2) …, and bits 2j,
// 2j + 1 of the half's 32 bytes of pairs; each 16 weights have a scale.
#pragma once

#include <cstdint>
#include <cstring>

namespace minivllm {

enum class Stored { f32, f16, bf16, q4_0, q4_1, q8_0, q6_k };

constexpr int64_t kBlock = 32, kSuperBlock = 256;

inline bool is_quantized(Stored stored) { return stored >= Stored::q4_0; }

// Weights in a block; columns are a multiple of them.
inline int64_t stored_block(Stored stored) { return stored == Stored::q6_k ? kSuperBlock : is_quantized(stored) ? kBlock : 1; }

// Bytes of `columns` weights.
inline int64_t stored_bytes(Stored stored, int64_t columns) {
    switch (stored) {
        case Stored::f32: return 4 * columns;
        case Stored::f16:
        case Stored::bf16: return 2 * columns;
        case Stored::q4_0: return columns / kBlock * 18;
        case Stored::q4_1: return columns / kBlock * 20;
        case Stored::q8_0: return columns / kBlock * 34;
        case Stored::q6_k: return columns / kSuperBlock * 210;
    }
    return 0;
}

inline float widen(uint16_t bf16) {
    const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// To bfloat16, to nearest even; NaN stays NaN.
inline uint16_t narrow(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return static_cast<uint16_t>(x == x ? rounded : (bits >> 16) | 0x40);
}

inline float from_half(uint16_t half) {
    const uint32_t rest = half & 0x7fffu, sign = (half & 0x8000u) << 16;
    uint32_t bits = rest << 13;
    float value;
    std::memcpy(&value, &bits, 4);
    value *= 0x1p112f;  // right for subnormal numbers too
    std::memcpy(&bits, &value, 4);
    if (rest >= 0x7c00) bits = rest << 13 | 0x7f800000u;
    bits |= sign;
    std::memcpy(&value, &bits, 4);
    return value;
}

// To the nearest finite float16, to even; NaN stays NaN.
inline uint16_t to_half(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
    if (x != x) return sign | 0x7e00;
    float size = x < 0 ? -x : x;
    if (size > 65504.f) size = 65504.f;
    // Adding this leaves just the bits that a float16 of that size has: ten after the first, or units of 2^-24.
    uint32_t exponent;
    std::memcpy(&exponent, &size, 4);
    exponent = (exponent & 0x7f800000u) < (113u << 23) ? 113u << 23 : exponent & 0x7f800000u;
    const uint32_t magic_bits = exponent + (13u << 23);
    float magic;
    std::memcpy(&magic, &magic_bits, 4);
    volatile float sum = size + magic;
    const float rounded = (sum - magic) * 0x1p-112f;
    std::memcpy(&bits, &rounded, 4);
    return static_cast<uint16_t>(sign | bits >> 13);
}

inline uint16_t load_u16(const void* from) {
    uint16_t value;
    std::memcpy(&value, from, 2);
    return value;
}

// Weights [at, at + count) of a row; count ≤ kBlock, and `at` is a multiple of kBlock.
inline void read_stored(Stored stored, const char* row, int64_t at, int64_t count, float* to) {
    switch (stored) {
        case Stored::f32: std::memcpy(to, row + 4 * at, static_cast<size_t>(4 * count)); break;
        case Stored::f16:
            for (int64_t i = 0; i < count; i++) to[i] = from_half(load_u16(row + 2 * (at + i)));
            break;
        case Stored::bf16:
            for (int64_t i = 0; i < count; i++) to[i] = widen(load_u16(row + 2 * (at + i)));
            break;
        case Stored::q8_0: {
            const char* block = row + stored_bytes(stored, at);
            const float d = from_half(load_u16(block));
            for (int64_t i = 0; i < kBlock; i++) to[i] = d * static_cast<float>(static_cast<signed char>(block[2 + i]));
            break;
        }
        case Stored::q6_k: {
            const auto* block = reinterpret_cast<const unsigned char*>(row + stored_bytes(stored, at));
            const int64_t half = at % kSuperBlock / 128, quarter = at % 128 / 32;
            const unsigned char *low = block + 64 * half + quarter % 2 * 32, *high = block + 128 + 32 * half;
            for (int64_t i = 0; i < kBlock; i++) {
                const int q = (quarter < 2 ? low[i] & 15 : low[i] >> 4) | (high[i] >> 2 * quarter & 3) << 4;
                const auto scale = static_cast<signed char>(block[192 + (at % kSuperBlock + i) / 16]);
                to[i] = from_half(load_u16(block + 208)) * static_cast<float>(scale) * static_cast<float>(q - 32);
            }
            break;
        }
        case Stored::q4_0:
        case Stored::q4_1: {
            const char* block = row + stored_bytes(stored, at);
            const bool has_minimum = stored == Stored::q4_1;
            const float d = from_half(load_u16(block)), m = has_minimum ? from_half(load_u16(block + 2)) : -8 * d;
            const auto* nibbles = reinterpret_cast<const unsigned char*>(block + (has_minimum ? 4 : 2));
            for (int64_t i = 0; i < kBlock / 2; i++) {
                to[i] = d * static_cast<float>(nibbles[i] & 15) + m;
                to[kBlock / 2 + i] = d * static_cast<float>(nibbles[i] >> 4) + m;
            }
            break;
        }
    }
}

}  // namespace minivllm
