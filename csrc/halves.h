// bfloat16 and float16 from and to float32. Knows nothing of what the numbers are.
#pragma once

#include <cstdint>
#include <cstring>

namespace minivllm {

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
    const float sum = size + magic;
    const float rounded = (sum - magic) * 0x1p-112f;
    std::memcpy(&bits, &rounded, 4);
    return static_cast<uint16_t>(sign | bits >> 13);
}

inline uint16_t load_u16(const void* from) {
    uint16_t value;
    std::memcpy(&value, from, 2);
    return value;
}

}  // namespace minivllm
