// Packed matmul with 8- and 4-bit weights in integer arithmetic. The products of a group of 32 are summed up exactly;
// then, group after group in ascending order (and plane after plane of x),
//
//   y = fma(scale of the weights · scale of x, sum, y), and with 4 bits y = fma(minimum, scale of x · Σ q of x, y).
//
// One accumulator for each output, whatever the number of rows, so all tile heights agree bit for bit. Part of
// kernels.cpp.

INLINE vf widen_half(const uint16_t* from) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(load_as<__m256i>(from));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtph_ps(load_as<__m128i>(from));
#else
    const vu half = __builtin_convertvector(load_as<vh>(from), vu), rest = half & 0x7fff;
    const vu sign = (half & 0x8000) << 16;
    const vf number = (vf)(rest << 13) * 0x1p112f;  // right for subnormal numbers too
    const vu special = (rest << 13) | 0x7f800000u;
    return (vf)(sign | (rest >= 0x7c00 ? special : (vu)number));
#endif
}

// Four activations for every lane, as `dot` takes them.
#if defined(MINIVLLM_DOT4)
struct Four {
    vi x;
};
INLINE Four four(const Quant* q) {
    int32_t word;
    __builtin_memcpy(&word, q, 4);
    return {splat(word)};
}
#else
struct Four {
    vi even, odd;  // pairs of 16 bits
};
INLINE Four four(const Quant* q) {
    int32_t even, odd;
    __builtin_memcpy(&even, q, 4);
    __builtin_memcpy(&odd, q + 2, 4);
    return {splat(even), splat(odd)};
}
// a's pairs times b's pairs, added up.
INLINE vi dot_pairs(vi a, vi b) {
#if defined(__AVX512F__)
    return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}
#endif

// acc[lane] += Σ of four: unsigned bytes of w times activations.
INLINE vi dot(vi acc, vu w, const Four& x) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x.x);
#elif defined(__AVXVNNI__)
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, (__m256i)x.x);
#else
    return acc + dot_pairs((vi)(w & 0x00ff00ffu), x.even) + dot_pairs((vi)((w >> 8) & 0x00ff00ffu), x.odd);
#endif
}

constexpr int64_t kGroupBytes8 = kPanel * (kGroup + 2), kGroupBytes4 = kPanel * (kGroup / 2 + 4);

// Rows that a tile has, and vectors of outputs at a time: a float and an integer accumulator for each.
constexpr int kIntRows = kWidth == 16 ? 6 : kWidth == 8 ? 2 : 1;
constexpr int kIntVectors = 2;

// sum[r][v] += Σ of a group of 32: weights [kGroup / 4][kPanel][4], or half as many bytes with 4 bits; rows of x are
// `stride` bytes apart.
template <int R, bool Four_bits>
INLINE void add_group(const char* weights, const char* x, int64_t stride, vi (&sum)[R][kIntVectors]) {
    const auto quants = [&](int r, int i) { return reinterpret_cast<const Quant*>(x + r * stride) + i; };
    // A loop, not unrolled: the compiler would load all of x for all of it first, and put it on the stack.
#pragma GCC unroll 1
    for (int i = 0; i < (Four_bits ? 4 : 8); i++) {
        vu w[kIntVectors];
        UNROLL
        for (int v = 0; v < kIntVectors; v++) w[v] = load_as<vu>(weights + (i * kPanel + v * kWidth) * 4);
        UNROLL
        for (int r = 0; r < R; r++) {
            const Four low = four(quants(r, 4 * i));
            UNROLL
            for (int v = 0; v < kIntVectors; v++) sum[r][v] = dot(sum[r][v], Four_bits ? w[v] & 0x0f0f0f0fu : w[v], low);
        }
        if (!Four_bits) continue;
        UNROLL
        for (int r = 0; r < R; r++) {
            const Four high = four(quants(r, kGroup / 2 + 4 * i));
            UNROLL
            for (int v = 0; v < kIntVectors; v++) sum[r][v] = dot(sum[r][v], (w[v] >> 4) & 0x0f0f0f0fu, high);
        }
    }
}

template <int R, bool Four_bits>
static void int_tile(const Matmul& m, const char* x, const char* panel, float* tile, Fetch& fetch) {
    const int64_t groups = (m.k + kGroup - 1) / kGroup, stride = m.x_bytes;
    for (int64_t output = 0; output < kPanel; output += kIntVectors * kWidth) {
        vf acc[R][kIntVectors] = {};
        for (int64_t at = 0; at < groups * m.planes; at++) {
            const int64_t g = m.planes == 1 ? at : at / 2, plane = m.planes == 1 ? 0 : at % 2;
            const char* quants = reinterpret_cast<const char*>(row_quants(x, groups, plane) + g * kGroup);
            const char* x_scales = reinterpret_cast<const char*>(row_scales(x, groups, plane) + g);
            const auto x_scale = [&](int r) { return reinterpret_cast<const GroupScale*>(x_scales + r * stride); };
            fetch_some(fetch);
            const char* group = panel + g * (Four_bits ? kGroupBytes4 : kGroupBytes8);
            vi sum[R][kIntVectors];
            UNROLL
            for (int r = 0; r < R; r++)
                UNROLL
                for (int v = 0; v < kIntVectors; v++) sum[r][v] = Four_bits ? vi{} : splat(x_scale(r)->offset);
            add_group<R, Four_bits>(group + output * 4, quants, stride, sum);
            const auto* scales = reinterpret_cast<const uint16_t*>(group + kPanel * (Four_bits ? kGroup / 2 : kGroup)) + output;
            UNROLL
            for (int v = 0; v < kIntVectors; v++) {
                const vf scale = widen_half(scales + v * kWidth);
                UNROLL
                for (int r = 0; r < R; r++)
                    acc[r][v] = fma(__builtin_convertvector(sum[r][v], vf), scale * x_scale(r)->scale, acc[r][v]);
                if (!Four_bits) continue;
                const vf minimum = widen_half(scales + kPanel + v * kWidth);
                UNROLL
                for (int r = 0; r < R; r++) acc[r][v] = fma(minimum, splat(x_scale(r)->sum), acc[r][v]);
            }
        }
        UNROLL
        for (int r = 0; r < R; r++)
            UNROLL
            for (int v = 0; v < kIntVectors; v++) store(tile + r * kPanel + output + v * kWidth, acc[r][v]);
    }
}

template <bool Four_bits>
static void int_tile(const Matmul& m, int64_t rows, const char* x, const char* panel, float* tile, Fetch& fetch) {
    static_assert(kIntRows <= 6, "");
    switch (rows) {
        case 1: return int_tile<1, Four_bits>(m, x, panel, tile, fetch);
#if defined(__AVX2__)
        case 2: return int_tile<2, Four_bits>(m, x, panel, tile, fetch);
#endif
#if defined(__AVX512F__)
        case 3: return int_tile<3, Four_bits>(m, x, panel, tile, fetch);
        case 4: return int_tile<4, Four_bits>(m, x, panel, tile, fetch);
        case 5: return int_tile<5, Four_bits>(m, x, panel, tile, fetch);
        case 6: return int_tile<6, Four_bits>(m, x, panel, tile, fetch);
#endif
    }
}

template <bool Four_bits>
static void matmul_int(const Matmul& m, int64_t row, int64_t row_end, int64_t unit, int64_t unit_end) {
    const int64_t panel_bytes = (m.k + kGroup - 1) / kGroup * (Four_bits ? kGroupBytes4 : kGroupBytes8);
    alignas(64) float tile[2 * kIntRows * kPanel];
    for_panels(m, unit, unit_end, [&](int64_t at, int64_t first, int panels) {
        const char* panel = static_cast<const char*>(m.panels) + first * panel_bytes;
        Fetch fetch = fetch_next(m, panel_bytes, unit, unit_end, first, panels, (row_end - row + kIntRows - 1) / kIntRows,
                                 panels * ((m.k + kGroup - 1) / kGroup));
        for (int64_t r = row; r < row_end;) {
            const int64_t rows = next_rows(row_end - r, kIntRows);
            const char* x = static_cast<const char*>(m.x) + r * m.x_bytes;
            for (int64_t p = 0; p < panels; p++)
                int_tile<Four_bits>(m, rows, x, panel + p * panel_bytes, tile + p * rows * kPanel, fetch);
            finish_panels(m, r, rows, at, panels, tile);
            r += rows;
        }
    });
}
