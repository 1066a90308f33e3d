// Packed matmul: every output lane is reduced over k in ascending order, in one accumulator, whatever the number
// of rows; so all tile heights agree bit for bit. Part of kernels.cpp.

constexpr int kTileRows = 6;

// Vectors of outputs that a tile of R rows holds in registers at a time.
template <int R>
constexpr int tile_vectors() {
    if (kWidth == 16) return 4;  // 6 × 4 of 32 registers
    return R == 1 ? 8 : R <= 3 ? 4 : 2;  // at most 12 of 16 registers
}

// acc[r][v] += Σ_k a[r][k] · b[k][v], b's rows being ldb apart.
template <int R, int V>
INLINE void accumulate(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t k, vf (&acc)[R][V]) {
    for (int64_t i = 0; i < k; i++) {
        vf column[V];
        UNROLL
        for (int v = 0; v < V; v++) column[v] = load(b + i * ldb + v * kWidth);
        UNROLL
        for (int r = 0; r < R; r++) {
            const vf x = splat(a[r * lda + i]);
            UNROLL
            for (int v = 0; v < V; v++) acc[r][v] = fma(x, column[v], acc[r][v]);
        }
    }
}

// The same for pairs of bfloat16: a [R][k], b [ceil(k / 2)][outputs][2].
template <int R, int V>
INLINE void accumulate(const uint16_t* a, int64_t lda, const uint16_t* b, int64_t ldb, int64_t k, vf (&acc)[R][V]) {
    for (int64_t i = 0; i < (k + 1) / 2; i++) {
        vu column[V];
        UNROLL
        for (int v = 0; v < V; v++) column[v] = load_as<vu>(b + 2 * (i * ldb + v * kWidth));
        UNROLL
        for (int r = 0; r < R; r++) {
            uint32_t pair;
            __builtin_memcpy(&pair, a + r * lda + 2 * i, 4);
            const vu x = (vu)splat(static_cast<int32_t>(pair));
#if defined(__AVX512BF16__)
            UNROLL
            for (int v = 0; v < V; v++)
                acc[r][v] = (vf)_mm512_dpbf16_ps((__m512)acc[r][v], (__m512bh)x, (__m512bh)column[v]);
#else
            const vf even = (vf)(x << 16), odd = (vf)(x & 0xffff0000u);
            UNROLL
            for (int v = 0; v < V; v++) {
                acc[r][v] = fma(even, (vf)(column[v] << 16), acc[r][v]);
                acc[r][v] = fma(odd, (vf)(column[v] & 0xffff0000u), acc[r][v]);
            }
#endif
        }
    }
}

// tile[R][kPanel] = x (R rows) times one panel.
template <class T, int R>
static void panel_tile(const T* x, int64_t stride, const T* panel, int64_t k, float* tile) {
    constexpr int V = tile_vectors<R>();
    constexpr int64_t scale = sizeof(T) == 2 ? 2 : 1;  // elements of a panel row for each output
    for (int64_t output = 0; output < kPanel; output += V * kWidth) {
        vf acc[R][V] = {};
        accumulate<R, V>(x, stride, panel + output * scale, kPanel, k, acc);
        UNROLL
        for (int r = 0; r < R; r++)
            UNROLL
            for (int v = 0; v < V; v++) store(tile + r * kPanel + output + v * kWidth, acc[r][v]);
    }
}

template <class T>
static void panel_tile(int64_t rows, const T* x, int64_t stride, const T* panel, int64_t k, float* tile) {
    switch (rows) {
        case 1: return panel_tile<T, 1>(x, stride, panel, k, tile);
        case 2: return panel_tile<T, 2>(x, stride, panel, k, tile);
        case 3: return panel_tile<T, 3>(x, stride, panel, k, tile);
        case 4: return panel_tile<T, 4>(x, stride, panel, k, tile);
        case 5: return panel_tile<T, 5>(x, stride, panel, k, tile);
        default: return panel_tile<T, 6>(x, stride, panel, k, tile);
    }
}

INLINE void store_number(float* to, vf v) { store(to, v); }
INLINE void store_number(uint16_t* to, vf v) { store_as(to, narrow(v)); }

// out row r, columns [column, column + kPanel): what the epilogue makes of tile, or of the gate and up tiles.
template <class T>
INLINE void finish_tile(const Matmul& m, int64_t row, int64_t rows, int64_t unit, const float* tile, const float* up) {
    const bool gated = m.epilogue == Epilogue::activate_gated;
    const float* bias = m.bias ? m.bias + unit * kPanel * (gated ? 2 : 1) : nullptr;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = (row + r) * m.out_stride + unit * kPanel;
        for (int64_t i = 0; i < kPanel; i += kWidth) {
            vf y = load(tile + r * kPanel + i);
            if (bias) y += load(bias + i);
            float* out = static_cast<float*>(m.out) + at + i;
            switch (m.epilogue) {
                case Epilogue::store: store(out, y); break;
                case Epilogue::add: store(out, load(out) + y); break;
                case Epilogue::activate:
                    store_number(static_cast<T*>(m.out) + at + i, activate(m.activation, y));
                    break;
                case Epilogue::activate_gated: {
                    vf z = load(up + r * kPanel + i);
                    if (bias) z += load(bias + kPanel + i);
                    store_number(static_cast<T*>(m.out) + at + i, activate(m.activation, y) * z);
                    break;
                }
            }
        }
    }
}

template <class T>
static void matmul(const Matmul& m, int64_t row, int64_t row_end, int64_t unit, int64_t unit_end) {
    const bool gated = m.epilogue == Epilogue::activate_gated;
    const int64_t panel_size = kPanel * (sizeof(T) == 2 ? (m.k + 1) / 2 * 2 : m.k);
    float tile[2][kTileRows * kPanel];
    // A panel stays in the cache while the rows go past it.
    for (; unit < unit_end; unit++) {
        const T* panel = static_cast<const T*>(m.panels) + unit * panel_size * (gated ? 2 : 1);
        for (int64_t r = row; r < row_end;) {
            const int64_t left = row_end - r, tiles = (left + kTileRows - 1) / kTileRows;
            const int64_t rows = (left + tiles - 1) / tiles;  // 7 rows: 4 + 3
            const T* x = static_cast<const T*>(m.x) + r * m.x_stride;
            panel_tile(rows, x, m.x_stride, panel, m.k, tile[0]);
            if (gated) panel_tile(rows, x, m.x_stride, panel + panel_size, m.k, tile[1]);
            finish_tile<T>(m, r, rows, unit, tile[0], tile[1]);
            r += rows;
        }
    }
}
