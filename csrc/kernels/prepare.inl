// The rows that a matmul reads: converted, or quantised in groups. Part of kernels.cpp.

// 8-bit integers of a group are stored for an instruction that sums up four products (int8 [32]), or for one that
// sums up two of 16 bits (int16: 0, 2, 1, 3 of every four).
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define MINIVLLM_DOT4
typedef int8_t Quant;
#else
typedef int16_t Quant;
#endif

// y ≈ scale · q. The two sums are for weights that are not symmetrical about 0 (matmul_int.inl).
struct Group {
    Quant q[kGroup];
    float scale;
    int32_t sum;  // Σ q
};

INLINE vf magnitude(vf v) { return (vf)((vu)v & 0x7fffffffu); }

// scale = max |x| / 127, q = x / scale rounded to nearest even. Anything not finite makes the scale NaN.
INLINE void quantize(const float* x, Group* to) {
    vf largest = {};
    vi bad = {};
    for (int i = 0; i < kGroup; i += kWidth) {
        const vf v = magnitude(load(x + i));
        largest = max(v, largest);
        bad |= ~(v < __builtin_inff());
    }
    const float most = max_lanes(largest);
    bool finite = true;
    for (int i = 0; i < kWidth; i++) finite &= bad[i] == 0;
    const float inverse = most > 1e-30f ? 127.f / most : 0.f;
    const vf magic = splat(12582912.f);  // 1.5 · 2^23: adding it rounds to an integer
    int32_t q[kGroup];
    vi sum = {};
    for (int i = 0; i < kGroup; i += kWidth) {
        const vi rounded = (vi)(load(x + i) * inverse + magic) - (vi)magic;
        sum += rounded;
        store_as(q + i, rounded);
    }
    for (int i = 0; i < kGroup; i++) {
#if defined(MINIVLLM_DOT4)
        to->q[i] = static_cast<Quant>(finite ? q[i] : 0);
#else
        constexpr int order[4] = {0, 2, 1, 3};
        to->q[i] = static_cast<Quant>(finite ? q[i / 4 * 4 + order[i % 4]] : 0);
#endif
    }
    int32_t total = 0;
    for (int i = 0; i < kWidth; i++) total += sum[i];
    to->scale = finite ? most / 127.f : __builtin_nanf("");
    to->sum = finite ? total : 0;
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
            case Input::groups: quantize(group, reinterpret_cast<Group*>(out) + at / kGroup); break;
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
