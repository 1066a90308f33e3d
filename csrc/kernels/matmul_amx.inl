// Packed matmul on AMX tiles. Part of kernels.cpp.
//
// bfloat16: TDPBF16PS for every number of rows, 32 of k at a time in ascending order, so that all tile heights agree bit
// for bit. (Intel SDM: for each output, the even and the odd k of the 32 are summed up apart, from zero; then both sums
// are added to the output. Subnormal numbers count as zero.)
// 8 and 4 bits: TDPBSSD sums up the products of a group, which is exact, and what follows is done as matmul_int.inl does
// it; so the two agree bit for bit, and few rows are left to that one.

// A tile holds 16 rows of 64 bytes: float32 sums [16 rows][16 outputs], activations [16 rows][32 k], weights [16 pairs
// of k][16 outputs][2].
constexpr int64_t kTile = 1024, kPanelStep = 2 * kTile;  // bytes; of a panel for 32 of k
constexpr int64_t kSlabRows = 512;                       // rows whose gate outputs wait for the up panel
constexpr int64_t kFewRows = 16;                         // quantised: not worth tiles

// The compiler does not know that tile instructions read and write memory.
INLINE void compiler_barrier() { asm volatile("" ::: "memory"); }

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

INLINE void configure(const TileConfig& config) {
    compiler_barrier();
    _tile_loadconfig(&config);
}

// Tiles 0 … 3 for sums, 4 and 5 for activations, 6 and 7 for weights; of the activations' rows, up to 16 in tiles 0, 1
// and 4, the rest in 2, 3 and 5. With `wide`, tiles 2 and 3 are for the same rows as 0 and 1.
static void configure_tiles(int64_t rows, bool wide) {
    const uint8_t first = static_cast<uint8_t>(rows < 16 ? rows : 16);
    const uint8_t second = static_cast<uint8_t>(rows > 16 ? rows - 16 : wide ? first : 1);
    const uint8_t of_tile[8] = {first, first, second, second, first, second, 16, 16};
    TileConfig config;
    for (int tile = 0; tile < 8; tile++) {
        config.row_bytes[tile] = 64;
        config.rows[tile] = of_tile[tile];
    }
    configure(config);
}

// Tiles 0 and 1 for integer sums, 4 and 5 for 32 bytes of 16 rows, 6 and 7 for [8][16 outputs][4].
static void configure_group_tiles() {
    TileConfig config;
    for (int tile : {0, 1, 4, 5, 6, 7}) {
        config.row_bytes[tile] = tile / 2 == 2 ? kGroup : 64;
        config.rows[tile] = tile / 2 == 3 ? kGroup / 4 : 16;
    }
    configure(config);
}

// Sums of up to 16 rows and one or two panels, over steps of 32 of k. `after`: panels that the same thread takes next.
template <int P>
INLINE void add_wide(const char* x, int64_t x_bytes, const char* b, const char* b2, int64_t steps, const char* after) {
    constexpr int64_t kAhead = 1;  // steps to prefetch at
    const int64_t panel_size = steps * kPanelStep;
    for (int64_t i = 0; i < steps; i++, x += 64, b += kPanelStep, b2 += kPanelStep) {
        const char* ahead = i + kAhead < steps ? b + kAhead * kPanelStep : after + (i + kAhead - steps) * kPanelStep;
        for (int64_t line = 0; line < kPanelStep; line += 64) {
            __builtin_prefetch(ahead + line);
            if (P == 2) __builtin_prefetch(ahead + panel_size + line);
        }
        _tile_loadd(4, x, x_bytes);
        _tile_loadd(6, b, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + kTile, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (P == 1) continue;
        _tile_loadd(6, b2, 64);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, b2 + kTile, 64);
        _tile_dpbf16ps(3, 4, 7);
    }
}

// A block of sums whose epilogue is still to be done: a few rows in each step of the next block, while the tiles work.
struct Pending {
    int64_t row = 0, rows = 0, unit = 0;
    const float *tile = nullptr, *up = nullptr;
};

INLINE void finish_some(const Matmul& m, Pending& p, int64_t count) {
    if (p.rows < count) count = p.rows;
    if (count == 0) return;
    finish(m, p.row, count, p.unit, p.tile, p.up);
    p.row += count;
    p.rows -= count;
    p.tile += count * kPanel;
    p.up += count * kPanel;
}

// Sums of up to 32 rows (more than 16 if `two`) and one panel. In each step, also does some of `work`.
// Rows pass by the first cache, so that the panel stays there.
template <class Work>
INLINE void add_block(const char* x, int64_t x_bytes, bool two, const char* b, int64_t steps, const Work& work) {
    const char* x2 = x + 16 * x_bytes;
    for (int64_t i = 0; i < steps; i++, x += 64, x2 += 64, b += kPanelStep) {
        _tile_loadd(6, b, 64);
        _tile_stream_loadd(4, x, x_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + kTile, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_stream_loadd(5, x2, x_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        work();
    }
}

// tile [P][rows][kPanel] for up to 16 rows.
template <int P>
static void wide_tile(const char* x, int64_t x_bytes, const char* panel, int64_t steps, int64_t rows, float* tile,
                      const char* after) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    add_wide<P>(x, x_bytes, panel, panel + steps * kPanelStep, steps, after);
    _tile_stored(0, tile, kPanel * 4);
    _tile_stored(1, tile + 16, kPanel * 4);
    if (P == 1) return;
    _tile_stored(2, tile + rows * kPanel, kPanel * 4);
    _tile_stored(3, tile + rows * kPanel + 16, kPanel * 4);
}

static void few_rows(const Matmul& m, int64_t row, int64_t rows, int64_t unit, int64_t unit_end) {
    const int64_t steps = (m.k + 31) / 32;
    const char* x = static_cast<const char*>(m.x) + row * m.x_bytes;
    alignas(64) float tile[2 * 16 * kPanel];
    configure_tiles(rows, true);
    for_panels(m, unit, unit_end, [&](int64_t at, int64_t first, int panels) {
        const char* panel = static_cast<const char*>(m.panels) + first * steps * kPanelStep;
        const Fetch fetch = fetch_next(m, steps * kPanelStep, unit, unit_end, first, panels, 1, steps);
        const char* after = fetch.next ? fetch.next : panel;  // nothing: what is there already
        if (panels == 2)
            wide_tile<2>(x, m.x_bytes, panel, steps, rows, tile, after);
        else
            wide_tile<1>(x, m.x_bytes, panel, steps, rows, tile, after);
        compiler_barrier();
        finish_panels(m, row, rows, at, panels, tile);
    });
}

// Panel after panel, and for each of them body(row, rows, to, pending): sums of those rows into to [rows][kPanel]; it
// must have done what is pending before it writes. With a gate, the sums of gate panels wait in `gates`
// [kSlabRows][kPanel] for those of the up panels.
template <class Panel, class Body>
INLINE void for_blocks(const Matmul& m, int64_t row, int64_t row_end, int64_t unit, int64_t unit_end, int64_t block_rows,
                       float* gates, const Panel& next_panel, const Body& body) {
    const bool gated = m.epilogue == Epilogue::activate_gated;
    const int64_t panels = gated ? 2 : 1;
    alignas(64) float tiles[2][32 * kPanel];
    int turn = 0;
    Pending pending;
    for (int64_t p = unit * panels; p < unit_end * panels; p++) {
        next_panel(p);
        for (int64_t r = row; r < row_end; r += block_rows) {
            const int64_t rows = row_end - r < block_rows ? row_end - r : block_rows;
            float* gate = gates + (r - row) * kPanel;
            if (gated && p % 2 == 0) {
                body(r, rows, gate, pending);
                continue;
            }
            float* tile = tiles[turn];
            turn = 1 - turn;
            body(r, rows, tile, pending);
            pending = {r, rows, p / panels, gated ? gate : tile, tile};
        }
    }
    finish_some(m, pending, pending.rows);
}

static void many_rows(const Matmul& m, int64_t row, int64_t row_end, int64_t unit, int64_t unit_end, char* scratch) {
    const int64_t steps = (m.k + 31) / 32, panel_size = steps * kPanelStep, blocks = (row_end - row + 31) / 32;
    const int64_t pending_rows = 31 / steps + 1;
    const char* panel = nullptr;
    Fetch fetch;
    int64_t configured = 0;
    for_blocks(
        m, row, row_end, unit, unit_end, 32, reinterpret_cast<float*>(scratch),
        [&](int64_t p) {
            panel = static_cast<const char*>(m.panels) + p * panel_size;
            fetch = fetch_next(m, panel_size, unit, unit_end, p, 1, 2 * blocks, (steps + 1) / 2);
        },
        [&](int64_t r, int64_t rows, float* to, Pending& pending) {
            if (rows != configured) configure_tiles(configured = rows, false);
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            add_block(static_cast<const char*>(m.x) + r * m.x_bytes, m.x_bytes, rows > 16, panel, steps, [&] {
                fetch_some(fetch);
                finish_some(m, pending, pending_rows);
            });
            _tile_stored(0, to, kPanel * 4);
            _tile_stored(1, to + 16, kPanel * 4);
            if (rows > 16) {
                _tile_stored(2, to + 16 * kPanel, kPanel * 4);
                _tile_stored(3, to + 16 * kPanel + 16, kPanel * 4);
            }
            compiler_barrier();
        });
}

static void matmul_bf16_tiles(const Matmul& m, int64_t row, int64_t row_end, int64_t unit, int64_t unit_end, void* scratch) {
    for (int64_t end; row < row_end; row = end) {
        end = row_end - row < kSlabRows ? row_end : row + kSlabRows;
        if (end - row <= 16)
            few_rows(m, row, end - row, unit, unit_end);
        else
            many_rows(m, row, end, unit, unit_end, static_cast<char*>(scratch));
    }
    _tile_release();
}

// Signed bytes of a packed panel, [groups][8][kPanel][4].
template <bool Four_bits>
static void unpack_panel(const char* from, int64_t groups, char* to) {
    for (int64_t g = 0; g < groups; g++, to += kGroup * kPanel) {
        const char* group = from + g * (Four_bits ? kGroupBytes4 : kGroupBytes8);
        UNROLL
        for (int64_t i = 0; i < kGroup * kPanel / (Four_bits ? 2 : 1); i += 64) {
            const vu v = load_as<vu>(group + i);
            if (Four_bits) {
                store_as(to + i, v & 0x0f0f0f0fu);
                store_as(to + kGroup / 2 * kPanel + i, (v >> 4) & 0x0f0f0f0fu);
            } else {
                store_as(to + i, v ^ 0x80808080u);
            }
        }
    }
}

// acc += what a group of the packed matrix and of 16 rows adds; sums [16][16] of the products.
template <bool Four_bits>
INLINE void scale_group(const int32_t* sums, const char* x_scales, int64_t x_bytes, const uint16_t* scales, vf (&acc)[16]) {
    const vf scale = widen_half(scales), minimum = Four_bits ? widen_half(scales + kPanel) : vf{};
    UNROLL
    for (int r = 0; r < 16; r++) {
        const auto* x = reinterpret_cast<const GroupScale*>(x_scales + r / 4 * (4 * x_bytes) + r % 4 * x_bytes);
        acc[r] = fma(__builtin_convertvector(load_as<vi>(sums + 16 * r), vf), scale * x->scale, acc[r]);
        if (Four_bits) acc[r] = fma(minimum, splat(x->sum), acc[r]);
    }
}

// tile [16][kPanel] of 16 rows and an unpacked panel.
template <bool Four_bits>
static void int_block(const Matmul& m, const char* x, const char* panel, const char* unpacked, float* tile, Fetch& fetch) {
    constexpr int64_t group_bytes = Four_bits ? kGroupBytes4 : kGroupBytes8;
    const int64_t groups = (m.k + kGroup - 1) / kGroup, planes = m.planes;
    alignas(64) int32_t sums[2][16 * 16];
    for (int64_t half = 0; half < 2; half++) {
        vf acc[16] = {};
        const char* scales = panel + kPanel * (Four_bits ? kGroup / 2 : kGroup) + 32 * half;
        // A group's products, their way to memory and what the vectors make of them, each a turn after the other, so
        // that none waits: even turns on tiles 0, 4 and 6, odd ones on 1, 5 and 7.
        const int64_t turns = groups * planes;
        for (int64_t turn = 0; turn < turns + 2; turn++) {
            const int64_t g = planes == 1 ? turn : turn / 2, plane = planes == 1 ? 0 : turn % 2;
            const Quant* rows = row_quants(x, groups, plane) + g * kGroup;
            const char* weights = unpacked + 64 * half + g * kGroup * kPanel;
            if (turn % 2 == 0) {
                if (turn < turns) {
                    _tile_zero(0);
                    _tile_loadd(4, rows, m.x_bytes);
                    _tile_loadd(6, weights, kPanel * 4);
                    _tile_dpbssd(0, 4, 6);
                }
                if (turn > 0) _tile_stored(1, sums[1], 64);
            } else {
                if (turn < turns) {
                    _tile_zero(1);
                    _tile_loadd(5, rows, m.x_bytes);
                    _tile_loadd(7, weights, kPanel * 4);
                    _tile_dpbssd(1, 5, 7);
                }
                _tile_stored(0, sums[0], 64);
            }
            fetch_some(fetch);
            if (turn < 2) continue;
            const int64_t done = planes == 1 ? turn - 2 : turn / 2 - 1;  // the same plane's group before
            scale_group<Four_bits>(sums[turn % 2], reinterpret_cast<const char*>(row_scales(x, groups, plane) + done), m.x_bytes,
                                   reinterpret_cast<const uint16_t*>(scales + done * group_bytes), acc);
        }
        UNROLL
        for (int r = 0; r < 16; r++) store(tile + r * kPanel + 16 * half, acc[r]);
    }
}

template <bool Four_bits>
static void matmul_int_tiles(const Matmul& m, int64_t row, int64_t row_end, int64_t unit, int64_t unit_end, void* scratch) {
    if (row_end - row <= kFewRows) return matmul_int<Four_bits>(m, row, row_end, unit, unit_end);
    const int64_t groups = (m.k + kGroup - 1) / kGroup, panel_size = groups * (Four_bits ? kGroupBytes4 : kGroupBytes8);
    float* gates = static_cast<float*>(scratch);
    char* unpacked = static_cast<char*>(scratch) + kSlabRows * kPanel * 4;
    configure_group_tiles();
    for (int64_t end; row < row_end; row = end) {
        end = row_end - row < kSlabRows ? row_end : row + kSlabRows;
        const int64_t blocks = (end - row + 15) / 16;
        const char* panel = nullptr;
        Fetch fetch;
        for_blocks(
            m, row, end, unit, unit_end, 16, gates,
            [&](int64_t p) {
                panel = static_cast<const char*>(m.panels) + p * panel_size;
                fetch = fetch_next(m, panel_size, unit, unit_end, p, 1, 2 * blocks, groups);
                unpack_panel<Four_bits>(panel, groups, unpacked);
                compiler_barrier();
            },
            [&](int64_t r, int64_t, float* to, Pending& pending) {
                finish_some(m, pending, pending.rows);
                int_block<Four_bits>(m, static_cast<const char*>(m.x) + r * m.x_bytes, panel, unpacked, to, fetch);
            });
    }
    _tile_release();
}
