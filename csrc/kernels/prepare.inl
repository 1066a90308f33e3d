// The rows that a matmul reads: converted, or quantised in groups. Part of kernels.cpp.

// 8-bit integers of a group are stored for an instruction that sums up four products (int8 [32]), or for one that
// sums up two of 16 bits (int16: 0, 2, 1, 3 of every four).
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define MINIVLLM_DOT4
typedef int8_t Quant;
#else
typedef int16_t Quant;
#endif

// A plane of a row of groups: Quant [groups][kGroup], then for each group these; x ≈ scale · q.
struct GroupScale {
    float scale, sum;  // sum: scale · Σ q, for weights that have a minimum
    int32_t offset;    // −128 Σ q, for weights that are stored 128 larger
};

constexpr int64_t kQuantBytes = sizeof(Quant), kScaleBytes = sizeof(GroupScale);

INLINE const Quant* row_quants(const char* row, int64_t groups, int64_t plane) {
    return reinterpret_cast<const Quant*>(row + plane * groups * (kGroup * kQuantBytes + kScaleBytes));
}
INLINE const GroupScale* row_scales(const char* row, int64_t groups, int64_t plane) {
    return reinterpret_cast<const GroupScale*>(row_quants(row, groups, plane) + groups * kGroup);
}

INLINE void store_quants(Quant* to, const vi (&q)[kGroup / kWidth]) {
#if defined(__AVX512VNNI__)
    for (int i = 0; i < kGroup / kWidth; i++) store_as(to + i * kWidth, _mm512_cvtepi32_epi8((__m512i)q[i]));
#else
    int32_t lane[kGroup];
    for (int i = 0; i < kGroup / kWidth; i++) store_as(lane + i * kWidth, q[i]);
#if defined(MINIVLLM_DOT4)
    for (int i = 0; i < kGroup; i++) to[i] = static_cast<Quant>(lane[i]);
#else
    constexpr int order[4] = {0, 2, 1, 3};
    for (int i = 0; i < kGroup; i++) to[i] = static_cast<Quant>(lane[i / 4 * 4 + order[i % 4]]);
#endif
#endif
}

INLINE int32_t sum_of_lanes(vi v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t sum = 0;
    for (int i = 0; i < kWidth; i++) sum += v[i];
    return sum;
#endif
}

// scale = max |x| / 127, q = x / scale rounded to nearest even; x becomes what is left, x − scale · q. Anything not finite
// makes the scale NaN.
INLINE void quantize(float* x, Quant* to, GroupScale* to_scale) {
    constexpr int kVectors = kGroup / kWidth;
    vf largest = {}, check = {};
    for (int i = 0; i < kVectors; i++) {
        const vf v = load(x + i * kWidth);
        largest = max(magnitude(v), largest);
        check += v * 0.f;  // NaN unless v is finite
    }
    const float most = max_lanes(largest), inverse = most > 1e-30f ? 127.f / most : 0.f;
    const vi finite = check == 0.f;
    vi q[kVectors], sum = {};
    for (int i = 0; i < kVectors; i++) {
        q[i] = nearest_integers(load(x + i * kWidth) * inverse) & finite;
        sum += q[i];
    }
    store_quants(to, q);
    const float scale = sum_of_lanes(finite) == -kWidth ? most / 127.f : __builtin_nanf("");
    const int32_t total = sum_of_lanes(sum);
    for (int i = 0; i < kVectors; i++)
        store(x + i * kWidth, fma(__builtin_convertvector(q[i], vf), splat(-scale), load(x + i * kWidth)));
    *to_scale = {scale, scale * static_cast<float>(total), -128 * total};
}

template <class T>
INLINE void prepare_row(const Prepare& p, const T* x, char* out) {
    for (int64_t at = 0; at < p.k; at += kGroup) {
        float group[kGroup] = {};
        const int64_t count = p.k - at < kGroup ? p.k - at : kGroup;
        if (count == kGroup)
            for (int i = 0; i < kGroup; i += kWidth) store(group + i, load_wide(x + at + i));
        else
            for (int64_t i = 0; i < count; i++) group[i] = wide(x[at + i]);
        switch (p.input) {
            case Input::f32: __builtin_memcpy(out + at * 4, group, sizeof group); break;
            case Input::bf16:
                for (int i = 0; i < kGroup; i += kWidth)
                    store_as(reinterpret_cast<uint16_t*>(out) + at + i, narrow(load(group + i)));
                break;
            case Input::groups: {
                const int64_t groups = (p.k + kGroup - 1) / kGroup;
                for (int64_t plane = 0; plane < p.planes; plane++)
                    quantize(group, const_cast<Quant*>(row_quants(out, groups, plane)) + at,
                             const_cast<GroupScale*>(row_scales(out, groups, plane)) + at / kGroup);
                break;
            }
        }
    }
}

static void prepare(const Prepare& p, int64_t row, int64_t row_end) {
    for (; row < row_end; row++) {
        char* out = static_cast<char*>(p.out) + row * p.out_bytes;
        if (p.number == Number::f32)
            prepare_row(p, static_cast<const float*>(p.x) + row * p.x_stride, out);
        else
            prepare_row(p, static_cast<const uint16_t*>(p.x) + row * p.x_stride, out);
    }
}
