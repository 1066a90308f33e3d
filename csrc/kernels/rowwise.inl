// What works on one row at a time: norm, activation, rotary and cache write, argmax. Part of kernels.cpp.

// Gauss' error function complement, for x ≥ 0, as e^(−x²) · P(1 / (1 + 0.45 x)): P fitted by us to within 1e-9 of
// erfc, in the form of Abramowitz and Stegun 7.1.26. `power` is e^(−x²).
INLINE vf erfc(vf x, vf power) {
    const vf t = 1.f / (1.f + 0.45f * x);
    vf p = splat(0.0925691677f);
    p = fma(p, t, splat(-0.4941020672f));
    p = fma(p, t, splat(0.8571633135f));
    p = fma(p, t, splat(-0.375798108f));
    p = fma(p, t, splat(0.4601678766f));
    p = fma(p, t, splat(0.2010102405f));
    p = fma(p, t, splat(0.2589895779f));
    return p * t * power;
}

INLINE vf activate(Activation kind, vf x) {
    switch (kind) {
        case Activation::silu: {
            const vf y = max(splat(-87.f), x);  // silu is nearly 0 there
            return y * reciprocal(1.f + exp2(max(splat(-126.f), y * -1.44269504f)));
        }
        case Activation::gelu: {  // x · Φ(x), Φ(x) = erfc(−x / √2) / 2
            const vf magnitude = x < 0 ? -x : x;
            const vf tail = .5f * erfc(magnitude * 0.70710678f, exp(x * x * -.5f));
            return x * (x < 0 ? tail : 1.f - tail);
        }
        default: {  // x · (1 + tanh u) / 2 = x / (1 + e^(−2u)),  u = √(2/π) (x + 0.044715 x³)
            const vf y = max(splat(-10.f), x), z = min(splat(10.f), y);  // beyond, it is 0 or x
            const vf u = 0.79788456f * (z + 0.044715f * (z * z * z));
            return y * reciprocal(1.f + exp2(u * -2.88539008f));
        }
    }
}

static void activate_all(Activation kind, const float* x, float* out, int64_t n) {
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) store(out + i, activate(kind, load(x + i)));
    if (i < n) {
        float lane[kWidth];
        store_as(lane, activate(kind, load_part(x + i, n - i)));
        __builtin_memcpy(out + i, lane, static_cast<size_t>(n - i) * 4);
    }
}

// Σ f(x[i]), lane l taking the elements l, l + kWidth, …; f(0) must be 0.
template <class F>
INLINE float sum_over(const float* x, int64_t n, F f) {
    vf sum = {};
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) sum += f(load(x + i));
    if (i < n) sum += f(load_part(x + i, n - i));
    return sum_lanes(sum);
}

INLINE void put(float* to, float x) { *to = x; }
INLINE void put(uint16_t* to, float x) { *to = narrow(x); }
INLINE void put(float* to, vf x) { store(to, x); }
INLINE void put(uint16_t* to, vf x) { store_as(to, narrow(x)); }
INLINE void put(float* to, vf x, vf next) {
    store(to, x);
    store(to + kWidth, next);
}
INLINE void put(uint16_t* to, vf x, vf next) {
#if defined(__AVX512BF16__)
    store_as(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)next, (__m512)x));
#else
    put(to, x);
    put(to + kWidth, next);
#endif
}

template <class T>
INLINE void put_all(T* to, const float* from, int64_t n) {
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) put(to + i, load(from + i));
    for (; i < n; i++) put(to + i, from[i]);
}

template <class T>
INLINE void norm_row(const NormRows& m, const float* x, T* out) {
    const float size = static_cast<float>(m.size);
    float mean = 0, squares;
    if (m.kind == Norm::layernorm) {
        mean = sum_over(x, m.size, [](vf v) { return v; }) / size;
        // Padding lanes of the last vector would be (0 − mean)², so that vector is done by hand.
        const int64_t whole = m.size / kWidth * kWidth;
        squares = sum_over(x, whole, [mean](vf v) { return (v - mean) * (v - mean); });
        for (int64_t i = whole; i < m.size; i++) squares += (x[i] - mean) * (x[i] - mean);
    } else {
        squares = sum_over(x, m.size, [](vf v) { return v * v; });
    }
    const float scale = 1.f / __builtin_sqrtf(squares / size + m.eps);
    int64_t i = 0;
    for (; i + kWidth <= m.size; i += kWidth) {
        const vf y = (load(x + i) - mean) * scale * load(m.weight + i);
        put(out + i, m.bias ? y + load(m.bias + i) : y);
    }
    for (; i < m.size; i++) {
        const float y = (x[i] - mean) * scale * m.weight[i];
        put(out + i, m.bias ? y + m.bias[i] : y);
    }
    for (; i < m.out_stride; i++) put(out + i, 0.f);
}

static void norm(const NormRows& m, int64_t row, int64_t row_end) {
    for (; row < row_end; row++) {
        const float* x = m.x + row * m.x_stride;
        if (m.out_number == Number::f32)
            norm_row(m, x, static_cast<float*>(m.out) + row * m.out_stride);
        else
            norm_row(m, x, static_cast<uint16_t*>(m.out) + row * m.out_stride);
    }
}

// out may be x.
INLINE void rotate(const float* x, const float* cos_sin, int64_t half, float* out) {
    const float *cos = cos_sin, *sin = cos_sin + half;
    int64_t i = 0;
    for (; i + kWidth <= half; i += kWidth) {
        const vf a = load(x + i), b = load(x + i + half);
        store(out + i, a * load(cos + i) - b * load(sin + i));
        store(out + i + half, b * load(cos + i) + a * load(sin + i));
    }
    for (; i < half; i++) {
        const float a = x[i], b = x[i + half];
        out[i] = a * cos[i] - b * sin[i];
        out[i + half] = b * cos[i] + a * sin[i];
    }
}

// scale = max |x| / 127, q = x / scale rounded to nearest even. What is not finite makes the scale so, too.
INLINE void quantize_cell(const float* x, int64_t size, char* cell) {
    vf largest = {}, check = {};
    int64_t i = 0;
    for (; i < size; i += kWidth) {
        const vf v = size - i < kWidth ? load_part(x + i, size - i) : load(x + i);
        largest = max(magnitude(v), largest);
        check += v * 0.f;  // NaN unless v is finite
    }
    const float most = max_lanes(largest), inverse = most > 1e-30f ? 127.f / most : 0.f;
    for (i = 0; i < size; i += kWidth) {
        const vf v = size - i < kWidth ? load_part(x + i, size - i) : load(x + i);
        const vq q = __builtin_convertvector(nearest_integers(v * inverse), vq);
        __builtin_memcpy(cell + i, &q, static_cast<size_t>(size - i < kWidth ? size - i : kWidth));
    }
    const float scale = most / 127.f + sum_lanes(check);
    __builtin_memcpy(cell + size, &scale, 4);
}

// x of `count` cells that lie one after the other, as rows of `size` bfloat16 numbers.
INLINE void dequantize_cells(const char* cell, int64_t count, int64_t size, uint16_t* to) {
    for (int64_t j = 0; j < count; j++, cell += size + 4, to += size) {
        float scale;
        __builtin_memcpy(&scale, cell + size, 4);
        int64_t i = 0;
        for (; i + kWidth <= size; i += kWidth)
            put(to + i, __builtin_convertvector(__builtin_convertvector(load_as<vq>(cell + i), vi), vf) * scale);
        for (; i < size; i++) put(to + i, static_cast<float>(static_cast<int8_t>(cell[i])) * scale);
    }
}

INLINE void store_cell(const CacheLayer& c, const float* from, char* cell) {
    switch (c.format) {
        case CacheFormat::f32: put_all(reinterpret_cast<float*>(cell), from, c.head_dim); break;
        case CacheFormat::bf16: put_all(reinterpret_cast<uint16_t*>(cell), from, c.head_dim); break;
        case CacheFormat::int8: quantize_cell(from, c.head_dim, cell); break;
    }
}

static void rope_and_store(const RopeAndStore& m, int64_t row, int64_t row_end) {
    const CacheLayer& c = m.cache;
    const int64_t bytes = cell_bytes(c.format, c.head_dim);
    for (; row < row_end; row++) {
        if (m.slots[row] < 0) continue;  // stored already
        float* k = m.qkv + row * m.qkv_stride + m.heads * c.head_dim;
        const float* v = k + c.kv_heads * c.head_dim;
        if (m.cos_sin)
            for (float* head = k; head < v; head += c.head_dim)
                rotate(head, m.cos_sin + row * c.head_dim, c.head_dim / 2, head);
        const int64_t block = m.slots[row] / c.block_size, in_block = m.slots[row] % c.block_size * bytes;
        for (int64_t head = 0; head < c.kv_heads; head++) {
            store_cell(c, k + head * c.head_dim, keys_of(c, block, head) + in_block);
            store_cell(c, v + head * c.head_dim, values_of(c, block, head) + in_block);
        }
    }
}

static int64_t argmax(const float* x, int64_t n) {
    const float infinity = __builtin_inff();
    float largest = -infinity;
    bool nan = false;
    int64_t i = 0;
    if (n >= kWidth) {
        vf best = splat(-infinity);
        vi bad = {};
        for (; i + kWidth <= n; i += kWidth) {
            const vf v = load(x + i);
            best = max(v, best);
            bad |= v != v;
        }
        largest = max_lanes(best);
        for (int lane = 0; lane < kWidth; lane++) nan |= bad[lane] != 0;
    }
    for (; i < n; i++) {
        nan |= x[i] != x[i];
        largest = x[i] > largest ? x[i] : largest;
    }
    if (nan || largest == infinity || largest == -infinity) return -1;
    for (i = 0; x[i] != largest; i++) {}
    return i;
}

static void relative(const float* x, double factor, double shift, double* out, int64_t n) {
    int64_t i = 0;
    for (; i + kWidthDouble <= n; i += kWidthDouble)
        store_as(out + i, __builtin_convertvector(load_as<vf_half>(x + i), vd) * factor - shift);
    for (; i < n; i++) out[i] = static_cast<double>(x[i]) * factor - shift;
}

INLINE vd load_part(const double* from, int64_t n, double fill) {
    double lane[kWidthDouble];
    for (int64_t i = 0; i < kWidthDouble; i++) lane[i] = i < n ? from[i] : fill;
    return load_as<vd>(lane);
}

static void exp_double(const double* x, double shift, double* out, int64_t n) {
    int64_t i = 0;
    for (; i + kWidthDouble <= n; i += kWidthDouble) store_as(out + i, exp(load_as<vd>(x + i) - shift));
    if (i < n) {
        double lane[kWidthDouble];
        store_as(lane, exp(load_part(x + i, n - i, shift) - shift));
        __builtin_memcpy(out + i, lane, static_cast<size_t>(n - i) * 8);
    }
}

static void exp_sums(const double* x, double shift, double* sums, int64_t n) {
    for (int64_t start = 0; start < n; start += kExpBlock) {
        vd sum = {};
        int64_t i = start;
        const int64_t end = start + kExpBlock < n ? start + kExpBlock : n;
        for (; i + kWidthDouble <= end; i += kWidthDouble) sum += exp(load_as<vd>(x + i) - shift);
        if (i < end) sum += exp(load_part(x + i, end - i, -__builtin_inf()) - shift);
        double total = 0;
        UNROLL
        for (int lane = 0; lane < kWidthDouble; lane++) total += sum[lane];
        sums[start / kExpBlock] = total;
    }
}

static int64_t find_from(const double* x, int64_t start, int64_t n, double least) {
    constexpr int kVectors = 4;
    for (; start + kVectors * kWidthDouble <= n; start += kVectors * kWidthDouble) {
        vl found = {};
        UNROLL
        for (int v = 0; v < kVectors; v++) found |= load_as<vd>(x + start + v * kWidthDouble) >= least;
        int64_t any = 0;
        UNROLL
        for (int lane = 0; lane < kWidthDouble; lane++) any |= found[lane];
        if (any) break;
    }
    while (start < n && !(x[start] >= least)) start++;
    return start;
}
