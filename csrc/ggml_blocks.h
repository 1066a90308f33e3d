// ggml's quantised blocks (github.com/ggml-org/ggml, ggml-common.h), 32 weights at a time. Knows nothing of rows.
//
// Little-endian; d, m and dmin are float16, s a scale of a few bits:
//   q4_0    d | 16 bytes of nibbles                                       32 weights, w = d (q − 8)
//   q4_1    d | m | 16 bytes of nibbles                                               w = d q + m
//   q5_0    d | 32 fifth bits | 16 bytes of nibbles                                   w = d (q − 16)
//   q5_1    d | m | 32 fifth bits | 16 bytes of nibbles                               w = d q + m
//   q8_0    d | 32 int8                                                               w = d q
//   iq4_nl  d | 16 bytes of nibbles                                                   w = d kUneven[q]
//   q2_k    16 bytes: s low, t high | 64 bytes of pairs | d | dmin       256 weights, w = d s q − dmin t
//   q3_k    256 third bits | 64 bytes of pairs | 12 bytes of s | d                    w = d (s − 32) (q − 4)
//   q4_k    d | dmin | 12 bytes of s and t | 128 bytes of nibbles                     w = d s q − dmin t
//   q5_k    d | dmin | 12 bytes of s and t | 256 fifth bits | 128 bytes of nibbles    w = d s q − dmin t
//   q6_k    128 bytes of nibbles | 64 bytes of pairs | 16 int8 s | d                  w = d s (q − 32)
//   iq4_xs  d | 8 pairs | 8 nibbles | 128 bytes of nibbles                            w = d (s − 32) kUneven[q]
// Where 16 bytes have the nibbles of 32 weights, byte i has weight i (low) and i + 16 (high). Longer runs go in lines of
// 32 bytes, of which one group of 32 weights takes the lowest bits, the next group the bits above, and so on. q2_k, q3_k
// and q6_k have a scale for 16 weights, q4_k, q5_k and iq4_xs for 32.
#pragma once

#include "halves.h"

namespace minivllm {

// 32 consecutive weights of a row: weight i is d[i / 16] q[i] + m[i / 16], which float32 holds but for one rounding.
struct Group {
    int8_t q[32];
    float d[2], m[2];
};

namespace ggml {

// The steps of iq4_nl and iq4_xs: finer where weights are many.
constexpr int8_t kUneven[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

inline float half_at(const uint8_t* from) { return from_half(load_u16(from)); }

inline Group with_scale(float d, float m = 0) { return {{}, {d, d}, {m, m}}; }

inline void read_nibbles(const uint8_t* packed, int8_t* q) {
    for (int i = 0; i < 16; i++) {
        q[i] = static_cast<int8_t>(packed[i] & 15);
        q[16 + i] = static_cast<int8_t>(packed[i] >> 4);
    }
}

inline void add_fifth_bits(const uint8_t* bits, int8_t* q) {
    for (int i = 0; i < 32; i++) q[i] = static_cast<int8_t>(q[i] | (bits[i / 8] >> i % 8 & 1) << 4);
}

inline Group q4_0(const uint8_t* block) {
    const float d = half_at(block);
    Group group = with_scale(d, -8 * d);
    read_nibbles(block + 2, group.q);
    return group;
}

inline Group q4_1(const uint8_t* block) {
    Group group = with_scale(half_at(block), half_at(block + 2));
    read_nibbles(block + 4, group.q);
    return group;
}

inline Group q5_0(const uint8_t* block) {
    Group group = with_scale(half_at(block));
    read_nibbles(block + 6, group.q);
    add_fifth_bits(block + 2, group.q);
    for (int8_t& q : group.q) q = static_cast<int8_t>(q - 16);
    return group;
}

inline Group q5_1(const uint8_t* block) {
    Group group = with_scale(half_at(block), half_at(block + 2));
    read_nibbles(block + 8, group.q);
    add_fifth_bits(block + 4, group.q);
    return group;
}

inline Group q8_0(const uint8_t* block) {
    Group group = with_scale(half_at(block));
    std::memcpy(group.q, block + 2, 32);
    return group;
}

inline Group iq4_nl(const uint8_t* block) {
    Group group = with_scale(half_at(block));
    read_nibbles(block + 2, group.q);
    for (int8_t& q : group.q) q = kUneven[q];
    return group;
}

// Of the blocks of 256, `part` is the group of 32, 0 … 7.

inline Group q2_k(const uint8_t* block, int64_t part) {
    const uint8_t *scales = block + 2 * part, *line = block + 16 + part / 4 * 32;
    const float d = half_at(block + 80), dmin = half_at(block + 82);
    Group group;
    for (int half = 0; half < 2; half++) {
        group.d[half] = d * static_cast<float>(scales[half] & 15);
        group.m[half] = -(dmin * static_cast<float>(scales[half] >> 4));
    }
    for (int i = 0; i < 32; i++) group.q[i] = static_cast<int8_t>(line[i] >> 2 * (part % 4) & 3);
    return group;
}

// Scale g of 16: its lower four bits are nibble g of eight bytes (first all low ones), its upper two pair g of the four
// bytes after them (first all lowest ones).
inline int scale_q3_k(const uint8_t* packed, int64_t g) {
    const int low = g < 8 ? packed[g] & 15 : packed[g - 8] >> 4;
    return low | (packed[8 + g % 4] >> 2 * (g / 4) & 3) << 4;
}

inline Group q3_k(const uint8_t* block, int64_t part) {
    const uint8_t *third_bits = block, *line = block + 32 + part / 4 * 32, *scales = block + 96;
    Group group = with_scale(half_at(block + 108));
    for (int half = 0; half < 2; half++) group.d[half] *= static_cast<float>(scale_q3_k(scales, 2 * part + half) - 32);
    for (int i = 0; i < 32; i++) {
        const int q = (line[i] >> 2 * (part % 4) & 3) | (third_bits[i] >> part & 1) << 2;
        group.q[i] = static_cast<int8_t>(q - 4);
    }
    return group;
}

// Scale and minimum of q4_k and q5_k. The first four parts have six bits in a byte each; in the upper two bits of those
// bytes, and in the nibbles of the last four, are the others.
inline Group scaled_q45_k(const uint8_t* block, int64_t part) {
    const uint8_t *scales = block + 4 + part % 4, *minimums = scales + 4, *rest = scales + 8;
    const int s = part < 4 ? *scales & 63 : (*rest & 15) | *scales >> 6 << 4;
    const int t = part < 4 ? *minimums & 63 : *rest >> 4 | *minimums >> 6 << 4;
    return with_scale(half_at(block) * static_cast<float>(s), -(half_at(block + 2) * static_cast<float>(t)));
}

inline Group q4_k(const uint8_t* block, int64_t part) {
    const uint8_t* line = block + 16 + part / 2 * 32;
    Group group = scaled_q45_k(block, part);
    for (int i = 0; i < 32; i++) group.q[i] = static_cast<int8_t>(line[i] >> 4 * (part % 2) & 15);
    return group;
}

inline Group q5_k(const uint8_t* block, int64_t part) {
    const uint8_t *fifth_bits = block + 16, *line = block + 48 + part / 2 * 32;
    Group group = scaled_q45_k(block, part);
    for (int i = 0; i < 32; i++)
        group.q[i] = static_cast<int8_t>((line[i] >> 4 * (part % 2) & 15) | (fifth_bits[i] >> part & 1) << 4);
    return group;
}

// Nibbles are in lines of 64 bytes here, pairs in lines of 32.
inline Group q6_k(const uint8_t* block, int64_t part) {
    const int64_t quarter = part % 4;
    const uint8_t *low = block + part / 4 * 64 + quarter % 2 * 32, *high = block + 128 + part / 4 * 32;
    Group group = with_scale(half_at(block + 208));
    for (int half = 0; half < 2; half++)
        group.d[half] *= static_cast<float>(static_cast<int8_t>(block[192 + 2 * part + half]));
    for (int i = 0; i < 32; i++) {
        const int q = (low[i] >> 4 * (quarter / 2) & 15) | (high[i] >> 2 * quarter & 3) << 4;
        group.q[i] = static_cast<int8_t>(q - 32);
    }
    return group;
}

inline Group iq4_xs(const uint8_t* block, int64_t part) {
    const int low = block[4 + part / 2] >> 4 * (part % 2) & 15, high = load_u16(block + 2) >> 2 * part & 3;
    Group group = with_scale(half_at(block) * static_cast<float>((low | high << 4) - 32));
    read_nibbles(block + 8 + 16 * part, group.q);
    for (int8_t& q : group.q) q = kUneven[q];
    return group;
}

}  // namespace ggml
}  // namespace minivllm
