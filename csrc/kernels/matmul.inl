// Packed matmul with float32 fma: float32 weights, and bfloat16 ones where there are no tiles. Every output lane is
// reduced over k in ascending order, in one accumulator, whatever the number of rows; so all tile heights agree bit
// for bit. Part of kernels.cpp.

constexpr int kTileRows = 6;
constexpr int kPanelVectors = kPanel / kWidth;

// Panels side by side, and vectors of outputs, that a tile of R rows holds in registers at a time.
template <int R>
constexpr int tile_panels() {
    return kWidth == 16 ? 2 : 1;
}
template <int R>
constexpr int tile_vectors() {
    if (kWidth == 16) return 4;  // 6 × 4 of 32 registers
    return R <= 3 ? 4 : 2;       // at most 12 of 16 registers
}

// Calls body with a constant `count` in 1 … kTileRows.
template <int N>
struct Rows {
    static constexpr int count = N;
};
template <class Body>
INLINE void with_rows(int64_t rows, const Body& body) {
    switch (rows) {
        case 1: return body(Rows<1>());
        case 2: return body(Rows<2>());
        case 3: return body(Rows<3>());
        case 4: return body(Rows<4>());
        case 5: return body(Rows<5>());
        default: return body(Rows<6>());
    }
}

// acc[r][v] += Σ_k a[r][k] · b[v][k]. Vector v of outputs is in panel v / vectors of a panel, panel_size elements
// apart; a panel is [k / kPair, rounded up][kPanel][kPair].
template <int R, int V, class T>
INLINE void add_panels(const T* a, int64_t lda, const T* b, int64_t panel_size, int64_t k, vf (&acc)[R][V]) {
    for (int64_t i = 0; i < k; i += kPair<T>) {
        vf column[V];
        UNROLL
        for (int v = 0; v < V; v++)
            column[v] = load_as<vf>(b + i * kPanel + v / kPanelVectors * panel_size + v % kPanelVectors * kWidth * kPair<T>);
        UNROLL
        for (int r = 0; r < R; r++)
            UNROLL
            for (int v = 0; v < V; v++) acc[r][v] = add_product(acc[r][v], a + r * lda + i, column[v]);
    }
}

// Memory that is about to be needed, fetched a bit in each step of a loop.
struct Fetch {
    const char *next, *end;
    int64_t lines;  // in each step
};

INLINE void fetch_some(Fetch& f) {
    for (int64_t i = 0; i < f.lines && f.next < f.end; i++, f.next += 64) __builtin_prefetch(f.next, 0, 2);
}

// The panels that come after panels [first, first + count) of a call for units [unit, unit_end), fetched while the rows
// go past those: in `steps` steps for each of the row tiles. (One row of 4-bit weights reads memory at 110 % of a plain
// loop's speed with this, at 78 % without.)
INLINE Fetch fetch_next(const Matmul& m, int64_t panel_bytes, int64_t unit, int64_t unit_end, int64_t first, int64_t count,
                        int64_t row_tiles, int64_t steps) {
    const int64_t per_unit = m.epilogue == Epilogue::activate_gated ? 2 : 1;
    int64_t next = first + count;
    if (next >= unit_end * per_unit) next = m.next_call > 0 ? (unit + m.next_call) * per_unit : m.num_units * per_unit;
    if (next >= m.num_units * per_unit) return {nullptr, nullptr, 0};
    const char* from = static_cast<const char*>(m.panels) + next * panel_bytes;
    const int64_t left = m.num_units * per_unit - next, bytes = (count < left ? count : left) * panel_bytes;
    return {from, from + bytes, (bytes / 64 - 1) / (row_tiles * steps) + 1};
}

constexpr int64_t kFetchStep = 64;  // of k

// tile [panels][R][kPanel] = x (R rows) times one or two panels.
template <class T, int R, int P>
static void panel_tile(const T* x, int64_t stride, const T* panels, int64_t k, float* tile, Fetch& fetch) {
    constexpr int V = tile_vectors<R>() * P / tile_panels<R>();
    const int64_t panel_size = kPanel * rounded_up(k, kPair<T>);
    for (int64_t output = 0; output < P * kPanel; output += V * kWidth) {
        vf acc[R][V] = {};
        for (int64_t i = 0; i < k; i += kFetchStep) {
            const int64_t size = k - i < kFetchStep ? k - i : kFetchStep;
            add_panels<R, V>(x + i, stride, panels + output * kPair<T> + i * kPanel, panel_size, size, acc);
            fetch_some(fetch);
        }
        UNROLL
        for (int r = 0; r < R; r++)
            UNROLL
            for (int v = 0; v < V; v++)
                store(tile + (v / kPanelVectors * R + r) * kPanel + output + v % kPanelVectors * kWidth, acc[r][v]);
    }
}

template <class T, int P>
static void panel_tile(int64_t rows, const T* x, int64_t stride, const T* panels, int64_t k, float* tile, Fetch& fetch) {
    with_rows(rows, [&](auto height) { panel_tile<T, height.count, P>(x, stride, panels, k, tile, fetch); });
}

INLINE void store_number(float* to, vf v) { store(to, v); }
INLINE void store_number(uint16_t* to, vf v) { store_as(to, narrow(v)); }

// Rows row … of out, columns of the unit: what the epilogue makes of tile [rows][kPanel], or of the gate and up tiles.
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

static void finish(const Matmul& m, int64_t row, int64_t rows, int64_t unit, const float* tile, const float* up) {
    if (m.number == Number::f32)
        finish_tile<float>(m, row, rows, unit, tile, up);
    else
        finish_tile<uint16_t>(m, row, rows, unit, tile, up);
}

// How many rows of the `left` ones the next tile takes, of at most `most`: 7 rows are 4 + 3.
INLINE int64_t next_rows(int64_t left, int64_t most) {
    const int64_t tiles = (left + most - 1) / most;
    return (left + tiles - 1) / tiles;
}

// Runs body(first unit, P): one or two panels at a time, as a gate and its up panel or as neighbours.
template <class Body>
INLINE void for_panels(const Matmul& m, int64_t unit, int64_t unit_end, const Body& body) {
    if (m.epilogue == Epilogue::activate_gated) {
        for (; unit < unit_end; unit++) body(unit, 2 * unit, 2);
        return;
    }
    for (; unit < unit_end; unit += 2) body(unit, unit, unit + 1 < unit_end ? 2 : 1);
}

// What becomes of tiles [panels][rows][kPanel] of one or two panels.
INLINE void finish_panels(const Matmul& m, int64_t row, int64_t rows, int64_t unit, int64_t panels, const float* tile) {
    if (m.epilogue == Epilogue::activate_gated) return finish(m, row, rows, unit, tile, tile + rows * kPanel);
    for (int64_t p = 0; p < panels; p++) finish(m, row, rows, unit + p, tile + p * rows * kPanel, nullptr);
}

template <class T>
static void matmul_fma(const Matmul& m, int64_t row, int64_t row_end, int64_t unit, int64_t unit_end) {
    const int64_t panel_size = kPanel * rounded_up(m.k, kPair<T>);
    const int64_t stride = m.x_bytes / static_cast<int64_t>(sizeof(T));
    float tile[2 * kTileRows * kPanel];
    // Panels stay in the cache while the rows go past them.
    for_panels(m, unit, unit_end, [&](int64_t at, int64_t first, int panels) {
        const T* panel = static_cast<const T*>(m.panels) + first * panel_size;
        // A few rows go past once, as fast as the panels come. That is faster without further panels coming between.
        Fetch fetch{};
        if (row_end - row > kTileRows)
            fetch = fetch_next(m, panel_size * static_cast<int64_t>(sizeof(T)), unit, unit_end, first, panels,
                               (row_end - row + kTileRows - 1) / kTileRows, (m.k + kFetchStep - 1) / kFetchStep);
        for (int64_t r = row; r < row_end;) {
            const int64_t rows = next_rows(row_end - r, kTileRows);
            const T* x = static_cast<const T*>(m.x) + r * stride;
            if (panels == tile_panels<1>()) {
                panel_tile<T, tile_panels<1>()>(rows, x, stride, panel, m.k, tile, fetch);
            } else {
                panel_tile<T, 1>(rows, x, stride, panel, m.k, tile, fetch);
                if (panels == 2) panel_tile<T, 1>(rows, x, stride, panel + panel_size, m.k, tile + rows * kPanel, fetch);
            }
            finish_panels(m, r, rows, at, panels, tile);
            r += rows;
        }
    });
}
