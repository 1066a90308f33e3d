// Weights as checkpoint files store them, read as float32. Knows nothing of files.
#pragma once

#include "ggml_blocks.h"

namespace minivllm {

enum class Stored { f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs };

constexpr int64_t kBlock = 32;  // weights in a Group; the blocks of a file are so many or 256

// A row is a run of blocks, by Stored.
struct BlockSize {
    int64_t weights, bytes;
};
constexpr BlockSize kBlockSizes[] = {
    {1, 4}, {1, 2}, {1, 2},                                     // f32, f16, bf16
    {32, 18}, {32, 20}, {32, 22}, {32, 24}, {32, 34},           // q4_0 … q8_0
    {256, 84}, {256, 110}, {256, 144}, {256, 176}, {256, 210},  // q2_k … q6_k
    {32, 18}, {256, 136},                                       // iq4_nl, iq4_xs
};

inline BlockSize block_size(Stored stored) { return kBlockSizes[static_cast<size_t>(stored)]; }

inline bool is_quantized(Stored stored) { return stored >= Stored::q4_0; }

// Bytes of `columns` weights, which are whole blocks.
inline int64_t stored_bytes(Stored stored, int64_t columns) {
    const auto [weights, bytes] = block_size(stored);
    return columns / weights * bytes;
}

// Weights [at, at + kBlock) of a quantised row; `at` is a multiple of kBlock.
inline Group read_group(Stored stored, const char* row, int64_t at) {
    const auto [weights, bytes] = block_size(stored);
    const auto* block = reinterpret_cast<const uint8_t*>(row + at / weights * bytes);
    const int64_t part = at % weights / kBlock;
    switch (stored) {
        case Stored::q4_0: return ggml::q4_0(block);
        case Stored::q4_1: return ggml::q4_1(block);
        case Stored::q5_0: return ggml::q5_0(block);
        case Stored::q5_1: return ggml::q5_1(block);
        case Stored::q8_0: return ggml::q8_0(block);
        case Stored::q2_k: return ggml::q2_k(block, part);
        case Stored::q3_k: return ggml::q3_k(block, part);
        case Stored::q4_k: return ggml::q4_k(block, part);
        case Stored::q5_k: return ggml::q5_k(block, part);
        case Stored::q6_k: return ggml::q6_k(block, part);
        case Stored::iq4_nl: return ggml::iq4_nl(block);
        case Stored::iq4_xs: return ggml::iq4_xs(block, part);
        case Stored::f32:
        case Stored::f16:
        case Stored::bf16: break;
    }
    return {};
}

// Weights [at, at + count) of a row; count ≤ kBlock, and `at` is a multiple of kBlock.
inline void read_stored(Stored stored, const char* row, int64_t at, int64_t count, float* to) {
    if (stored == Stored::f32) {
        std::memcpy(to, row + 4 * at, static_cast<size_t>(4 * count));
    } else if (stored == Stored::f16) {
        for (int64_t i = 0; i < count; i++) to[i] = from_half(load_u16(row + 2 * (at + i)));
    } else if (stored == Stored::bf16) {
        for (int64_t i = 0; i < count; i++) to[i] = widen(load_u16(row + 2 * (at + i)));
    } else {
        const Group group = read_group(stored, row, at);
        for (int64_t i = 0; i < kBlock; i++) to[i] = group.d[i / 16] * static_cast<float>(group.q[i]) + group.m[i / 16];
    }
}

}  // namespace minivllm
