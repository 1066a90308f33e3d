// Which matmul kernel serves which format. Part of kernels.cpp.

#if defined(__AMX_BF16__)
constexpr bool kTiled = true;
#else
constexpr bool kTiled = false;
#endif

static void matmul(const Matmul& m, int64_t row, int64_t row_end, int64_t unit, int64_t unit_end, void* scratch) {
    (void)scratch;
    switch (m.format) {
        case Format::f32: return matmul_fma<float>(m, row, row_end, unit, unit_end);
#if defined(__AMX_BF16__)
        case Format::bf16: return matmul_bf16_tiles(m, row, row_end, unit, unit_end, scratch);
        case Format::int8: return matmul_int_tiles<false>(m, row, row_end, unit, unit_end, scratch);
        case Format::int4: return matmul_int_tiles<true>(m, row, row_end, unit, unit_end, scratch);
#else
        case Format::bf16: return matmul_fma<uint16_t>(m, row, row_end, unit, unit_end);
        case Format::int8: return matmul_int<false>(m, row, row_end, unit, unit_end);
        case Format::int4: return matmul_int<true>(m, row, row_end, unit, unit_end);
#endif
    }
}

static int64_t matmul_rows(Format format, int64_t k) {
    if (!kTiled || format == Format::f32) return 96;
    // Activations take half of a 2 MiB second-level cache, and weights are read again as seldom as that allows.
    const int64_t rows = (1 << 20) / (2 * (k + 1)) / 32 * 32;
    return rows < 64 ? 64 : rows > 512 ? 512 : rows;
}
