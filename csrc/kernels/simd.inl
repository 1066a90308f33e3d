// Vectors of floats as wide as the ISA has them: arithmetic operators from the compiler's vector extension,
// intrinsics only where it has no word for something. Part of kernels.cpp; everything here is private to one build.

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float vf __attribute__((vector_size(kWidth * 4)));
typedef int32_t vi __attribute__((vector_size(kWidth * 4)));
typedef uint32_t vu __attribute__((vector_size(kWidth * 4)));
typedef uint16_t vh __attribute__((vector_size(kWidth * 2)));  // kWidth bfloat16 numbers
typedef int8_t vq __attribute__((vector_size(kWidth)));
typedef double vd __attribute__((vector_size(kWidth * 4)));    // kWidth / 2 doubles
typedef int64_t vl __attribute__((vector_size(kWidth * 4)));
constexpr int kWidthDouble = kWidth / 2;
typedef float vf_half __attribute__((vector_size(kWidth * 2)));  // kWidthDouble floats

#define INLINE static inline __attribute__((always_inline))

// Before a loop over registers: it must vanish, or the compiler keeps the accumulators in memory.
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

template <class V, class T>
INLINE V load_as(const T* from) {
    V v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
}

template <class V, class T>
INLINE void store_as(T* to, V v) {
    __builtin_memcpy(to, &v, sizeof v);
}

INLINE vf load(const float* from) { return load_as<vf>(from); }
INLINE void store(float* to, vf v) { store_as(to, v); }
INLINE vf splat(float x) { return x - vf{}; }
INLINE vd splat(double x) { return x - vd{}; }
INLINE vi splat(int32_t x) { return x - vi{}; }

// a * b + c, rounded once where the ISA can.
INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE vd fma(vd a, vd b, vd c) {
#if defined(__AVX512F__)
    return (vd)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__AVX2__)
    return (vd)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
    return a * b + c;
#endif
}

// Keeps a NaN that is in b.
INLINE vf max(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

// Keeps a NaN that is in b.
INLINE vf min(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return a < b ? a : b;
#endif
}

// 1 / x, rounded nearly always as a division would, where neither x nor 1 / x is subnormal.
INLINE vf reciprocal(vf x) {
#if defined(__AVX512F__)
    const vf rough = (vf)_mm512_rcp14_ps((__m512)x);  // to 14 bits; one step of Newton's method doubles them
    return fma(fma(-x, rough, splat(1.f)), rough, rough);
#else
    return 1.f / x;
#endif
}

// Sums and maxima over the lanes, always as the same tree.
INLINE float sum_lanes(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float lane[kWidth];
    store_as(lane, v);
    for (int half = kWidth / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
#endif
}

INLINE float max_lanes(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float lane[kWidth];
    store_as(lane, v);
    for (int half = kWidth / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
    return lane[0];
#endif
}

INLINE vf magnitude(vf v) { return (vf)((vu)v & 0x7fffffffu); }

// Rounded to nearest even; |v| < 2^22. (Adding 1.5 · 2^23 leaves no room for a fraction.)
INLINE vi nearest_integers(vf v) {
    const vf magic = splat(12582912.f);
    return (vi)(v + magic) - (vi)magic;
}

// The first n < kWidth floats, and zeros.
INLINE vf load_part(const float* from, int64_t n) {
    float lane[kWidth] = {};
    __builtin_memcpy(lane, from, static_cast<size_t>(n) * 4);
    return load_as<vf>(lane);
}

// (The compiler takes halves apart to convert 16 of them.)
INLINE vu zero_extend(vh v) {
#if defined(__AVX512F__)
    return (vu)_mm512_cvtepu16_epi32((__m256i)v);
#else
    return __builtin_convertvector(v, vu);
#endif
}

INLINE vf widen(vh v) { return (vf)(zero_extend(v) << 16); }

// To bfloat16, round to nearest even; NaN stays NaN.
INLINE vh narrow(vf v) {
#if defined(__AVX512BF16__)
    return (vh)_mm512_cvtneps_pbh((__m512)v);  // subnormal numbers become 0
#else
    const vu bits = (vu)v;
    const vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const vu kept = (vu)(v == v);
    return __builtin_convertvector((kept & rounded) | (~kept & ((bits >> 16) | 0x40)), vh);
#endif
}

INLINE uint16_t narrow(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE float widen(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

INLINE vf load_wide(const float* from) { return load(from); }
INLINE vf load_wide(const uint16_t* from) { return widen(load_as<vh>(from)); }
INLINE float wide(float x) { return x; }
INLINE float wide(uint16_t x) { return widen(x); }

INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t rounded_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

// Products of float32 or bfloat16 numbers take a word of 4 bytes of each factor at a time.
template <class T>
constexpr int64_t kPair = 4 / static_cast<int64_t>(sizeof(T));  // numbers in it

// acc plus the products of a word at x, the same for all lanes, and a word of each lane. (vdpbf16ps adds the pair's second
// product first; subnormal numbers count as zero.)
INLINE vf add_product(vf acc, const float* x, vf words) { return fma(splat(*x), words, acc); }
INLINE vf add_product(vf acc, const uint16_t* x, vf words) {
    const vu pair = (vu)splat(load_as<int32_t>(x)), column = (vu)words;
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)pair, (__m512bh)column);
#else
    acc = fma((vf)(pair << 16), (vf)(column << 16), acc);
    return fma((vf)(pair & 0xffff0000u), (vf)(column & 0xffff0000u), acc);
#endif
}

// Rows ↔ columns of a square of kWidth vectors.
INLINE void transpose(vf (&row)[kWidth]) {
#if defined(__AVX512F__) || defined(__AVX2__)
    // Three (four) rounds, each exchanging the odd half of row i with the even half of row i + step, for
    // halves of 1, 2, 4 (, 8) lanes.
    vf other[kWidth];
#if defined(__AVX512F__)
    const auto lo32 = [](vf a, vf b) { return (vf)_mm512_unpacklo_ps((__m512)a, (__m512)b); };
    const auto hi32 = [](vf a, vf b) { return (vf)_mm512_unpackhi_ps((__m512)a, (__m512)b); };
    const auto lo64 = [](vf a, vf b) { return (vf)_mm512_unpacklo_pd((__m512d)a, (__m512d)b); };
    const auto hi64 = [](vf a, vf b) { return (vf)_mm512_unpackhi_pd((__m512d)a, (__m512d)b); };
#else
    const auto lo32 = [](vf a, vf b) { return (vf)_mm256_unpacklo_ps((__m256)a, (__m256)b); };
    const auto hi32 = [](vf a, vf b) { return (vf)_mm256_unpackhi_ps((__m256)a, (__m256)b); };
    const auto lo64 = [](vf a, vf b) { return (vf)_mm256_unpacklo_pd((__m256d)a, (__m256d)b); };
    const auto hi64 = [](vf a, vf b) { return (vf)_mm256_unpackhi_pd((__m256d)a, (__m256d)b); };
#endif
    // Within each quarter (128 bits) of four rows: quarter q of other[4i + c] is column 4q + c of rows 4i … 4i + 3.
    UNROLL
    for (int i = 0; i < kWidth; i += 4) {
        const vf a = lo32(row[i], row[i + 1]), b = hi32(row[i], row[i + 1]);
        const vf c = lo32(row[i + 2], row[i + 3]), d = hi32(row[i + 2], row[i + 3]);
        other[i] = lo64(a, c);
        other[i + 1] = hi64(a, c);
        other[i + 2] = lo64(b, d);
        other[i + 3] = hi64(b, d);
    }
    // Then the quarters themselves: row[4q + c] gathers quarter q of other[c], other[4 + c], …
    UNROLL
    for (int c = 0; c < 4; c++) {
#if defined(__AVX512F__)
        const __m512 a = (__m512)other[c], b = (__m512)other[4 + c];
        const __m512 d = (__m512)other[8 + c], e = (__m512)other[12 + c];
        const __m512 ab02 = _mm512_shuffle_f32x4(a, b, 0x88), ab13 = _mm512_shuffle_f32x4(a, b, 0xdd);
        const __m512 de02 = _mm512_shuffle_f32x4(d, e, 0x88), de13 = _mm512_shuffle_f32x4(d, e, 0xdd);
        row[c] = (vf)_mm512_shuffle_f32x4(ab02, de02, 0x88);
        row[8 + c] = (vf)_mm512_shuffle_f32x4(ab02, de02, 0xdd);
        row[4 + c] = (vf)_mm512_shuffle_f32x4(ab13, de13, 0x88);
        row[12 + c] = (vf)_mm512_shuffle_f32x4(ab13, de13, 0xdd);
#else
        row[c] = (vf)_mm256_permute2f128_ps((__m256)other[c], (__m256)other[4 + c], 0x20);
        row[4 + c] = (vf)_mm256_permute2f128_ps((__m256)other[c], (__m256)other[4 + c], 0x31);
#endif
    }
#else
    float square[kWidth][kWidth];
    for (int i = 0; i < kWidth; i++) store_as(square[i], row[i]);
    for (int i = 0; i < kWidth; i++)
        for (int j = 0; j < kWidth; j++) row[i][j] = square[j][i];
#endif
}

// e^x: 2^n · e^r with |r| ≤ ln 2 / 2, and e^r by its Taylor series (the next term is 5e-9). Below −87.3 it is 0,
// above 88.3 infinity; NaN stays NaN.
INLINE vf exp(vf x) {
    const vf lowest = splat(-87.33f), highest = splat(88.3f);
    const vf clamped = x > highest ? highest : (x < lowest ? lowest : x);
    const vf magic = splat(12582912.f);  // 1.5 · 2^23: adding it rounds to an integer
    const vf shifted = clamped * 1.44269504f + magic;
    const vf n = shifted - magic;
    // ln 2 in two parts, the first short enough for n · part to be exact.
    const vf r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), clamped));
    vf p = splat(1.f / 5040);
    p = fma(p, r, splat(1.f / 720));
    p = fma(p, r, splat(1.f / 120));
    p = fma(p, r, splat(1.f / 24));
    p = fma(p, r, splat(1.f / 6));
    p = fma(p, r, splat(.5f));
    p = fma(p, r, splat(1.f));
    p = fma(p, r, splat(1.f));
    const vi exponent = ((vi)shifted - (vi)magic) << 23;
    const vf result = (vf)((vi)p + exponent);
    return x != x ? x : (x < lowest ? vf{} : (x > highest ? splat(__builtin_inff()) : result));
}

INLINE float exp(float x) { return exp(splat(x))[0]; }

// Lane i is the largest of row i. The rows are used up.
INLINE vf max_of_rows(vf (&row)[kWidth]) {
    transpose(row);
    UNROLL
    for (int step = kWidth / 2; step > 0; step /= 2)
        UNROLL
        for (int i = 0; i < step; i++) row[i] = max(row[i], row[i + step]);
    return row[0];
}

// 2^x for x ≤ 127, by a polynomial of ours on [−½, ½] that is within 1e-7 and gives 2^0 = 1. Below −126, −inf
// included, it is 0 (or a subnormal number); NaN stays NaN. For what becomes bfloat16, T, a shorter polynomial, within
// 1e-4, is as good.
template <class T = float>
INLINE vf exp2(vf x) {
    constexpr bool kShort = sizeof(T) == 2;
#if defined(__AVX512F__)
    if constexpr (kShort) {  // on [0, 1): what is above floor(x) is one instruction, and scalef takes floor(x) by itself
        const vf r = (vf)_mm512_reduce_ps((__m512)x, 9);
        vf p = fma(splat(0.07706717405f), r, splat(0.2276448474f));
        p = fma(p, r, splat(0.6951168188f));
        p = fma(p, r, splat(1.f));
        return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);
    }
    const vf n = (vf)_mm512_roundscale_ps((__m512)x, 8);
#else
    const vf clamped = max(splat(-127.f), x);
    const vf magic = splat(12582912.f);  // 1.5 · 2^23: adding it rounds to an integer
    const vf shifted = clamped + magic;
    const vf n = shifted - magic;
    x = clamped;
#endif
    const vf r = x - n;
    vf p;
    if constexpr (kShort) {
        p = fma(splat(0.05500893424f), r, splat(0.2422110011f));
        p = fma(p, r, splat(0.6932829314f));
    } else {
        p = fma(splat(0.001326472731f), r, splat(0.009671512991f));
        p = fma(p, r, splat(0.05550733581f));
        p = fma(p, r, splat(0.2402224243f));
        p = fma(p, r, splat(0.6931470037f));
    }
    p = fma(p, r, splat(1.f));
#if defined(__AVX512F__)
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);  // 0 if n is −inf, even though p is NaN then
#else
    const vf result = (vf)((vi)p + (((vi)shifted - (vi)magic) << 23));
    return x > -126.f ? result : (x != x ? x : vf{});
#endif
}

// e^x in double for x ≤ 0; 0 below −700. The same method; the series' next term is 4e-18.
INLINE vd exp(vd x) {
    const vd lowest = splat(-700.);
    const vd clamped = x < lowest ? lowest : x;
    const vd magic = splat(6755399441055744.);  // 1.5 · 2^52
    const vd shifted = clamped * 1.4426950408889634 + magic;
    const vd n = shifted - magic;
    const vd r = fma(n, splat(-1.9082149292705877e-10), fma(n, splat(-0.693147180369123816490), clamped));
    constexpr double inverse_factorial[] = {1.,         1.,          1. / 2,       1. / 6,        1. / 24,
                                            1. / 120,   1. / 720,    1. / 5040,    1. / 40320,    1. / 362880,
                                            1. / 3628800, 1. / 39916800, 1. / 479001600, 1. / 6227020800.};
    vd p = splat(inverse_factorial[13]);
    for (int i = 12; i >= 0; i--) p = fma(p, r, splat(inverse_factorial[i]));
    const vl exponent = ((vl)shifted - (vl)magic) << 52;
    const vd result = (vd)((vl)p + exponent);
    return x != x ? x : (x < lowest ? vd{} : result);
}
