// Packed matmul on AMX tiles: TDPBF16PS for every number of rows, 32 of k at a time in ascending order, so that all
// tile heights agree bit for bit. 8- and 4-bit weights become bfloat16 (each rounded once) in scratch memory that
// stays in the cache. Part of kernels.cpp.
//
// What the instruction does (Intel SDM): for each output, the even and the odd k of the 32 are summed up apart, from
// zero; then both sums are added to the output. Subnormal numbers count as zero.

// A tile holds 16 rows of 64 bytes: float32 sums [16 rows][16 outputs], activations [16 rows][32 k], weights [16 pairs
// of k][16 outputs][2].
constexpr int64_t kTile = 1024, kPanelStep = 2 * kTile;  // bytes; of a panel for 32 of k
constexpr int64_t kSlabRows = 512;                       // rows whose gate outputs wait for the up panel
constexpr int64_t kChunk = 4;                            // steps that are expanded at a time for few rows

// The compiler does not know that tile instructions read memory.
INLINE void memory_is_read() { asm volatile("" ::: "memory"); }

// Tiles 0 … 3 for sums, 4 and 5 for activations, 6 and 7 for weights; of the activations' rows, up to 16 in tiles 0, 1
// and 4, the rest in 2, 3 and 5. With `wide`, tiles 2 and 3 are for the same rows as 0 and 1.
static void configure_tiles(int64_t rows, bool wide) {
    struct alignas(64) {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {};
    config.palette = 1;
    const uint8_t first = static_cast<uint8_t>(rows < 16 ? rows : 16);
    const uint8_t second = static_cast<uint8_t>(rows > 16 ? rows - 16 : wide ? first : 1);
    const uint8_t of_tile[8] = {first, first, second, second, first, second, 16, 16};
    for (int tile = 0; tile < 8; tile++) {
        config.row_bytes[tile] = 64;
        config.rows[tile] = of_tile[tile];
    }
    memory_is_read();
    _tile_loadconfig(&config);
}

// Sums of up to 16 rows and one or two panels, over steps of 32 of k.
template <int P>
INLINE void add_wide(const char* x, int64_t x_bytes, const char* b, const char* b2, int64_t steps, int64_t ahead) {
    for (int64_t i = 0; i < steps; i++, x += 64, b += kPanelStep, b2 += kPanelStep) {
        if (ahead > 0)
            for (int64_t line = 0; line < kPanelStep; line += 64) {
                __builtin_prefetch(b + ahead + line);
                if (P == 2) __builtin_prefetch(b2 + ahead + line);
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

// Memory that is about to be needed, fetched a bit in each step of a loop.
struct Fetch {
    const char *next, *end;
    int64_t lines;  // in each step
    INLINE void some(Fetch& f) {
        for (int64_t i = 0; i < f.lines && f.next < f.end; i++, f.next += 64) __builtin_prefetch(f.next, 0, 2);
    }
};

// Sums of up to 32 rows (more than 16 if `two`) and one panel.
INLINE void add_block(const char* x, int64_t x_bytes, bool two, const char* b, int64_t steps, Fetch& fetch) {
    const char* x2 = x + 16 * x_bytes;
    for (int64_t i = 0; i < steps; i++, x += 64, x2 += 64, b += kPanelStep) {
        _tile_loadd(6, b, 64);
        _tile_loadd(4, x, x_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + kTile, 64);
        _tile_dpbf16ps(1, 4, 7);
        Fetch::some(fetch);
        if (!two) continue;
        _tile_loadd(5, x2, x_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

// Two vectors of weights, k even and k odd, as a row of a tile; rounded to nearest, halves upwards.
INLINE void store_pairs(uint16_t* to, vf even, vf odd) {
    const vu a = ((vu)even + 0x8000u) >> 16, b = ((vu)odd + 0x8000u) & 0xffff0000u;
    store_as(to, a | b);
}

// bits | exponent as a float: an integer at bit `at` of the mantissa, plus a power of two.
template <int at>
INLINE vf number_at(vu bits, uint32_t mask) {
    constexpr uint32_t exponent = static_cast<uint32_t>(127 + 23 - at) << 23;
    return (vf)((bits & mask) | exponent);
}

// 32 of k of one packed panel as two tiles. A number at bit 8 of a float's mantissa is 2^15 too large, and so on, which
// the fma takes off again: exactly, as scales have 11 bits.
INLINE void expand8(const char* group, uint16_t* to) {
    const auto* scales = reinterpret_cast<const uint16_t*>(group + kPanel * kGroup);
    for (int tile = 0; tile < 2; tile++, to += kTile / 2) {
        const vf d = widen_half(scales + 16 * tile), c = d * -(32768.f + 128.f);
        UNROLL
        for (int i = 0; i < 8; i++) {
            const vu v = load_as<vu>(group + (i * kPanel + 16 * tile) * 4);
            store_pairs(to + 64 * i, fma(number_at<8>(v << 8, 0xff00), d, c), fma(number_at<8>(v, 0xff00), d, c));
            store_pairs(to + 64 * i + 32, fma(number_at<8>(v >> 8, 0xff00), d, c),
                        fma(number_at<8>(v >> 16, 0xff00), d, c));
        }
    }
}

INLINE void expand4(const char* group, uint16_t* to) {
    const auto* scales = reinterpret_cast<const uint16_t*>(group + kPanel * kGroup / 2);
    for (int tile = 0; tile < 2; tile++, to += kTile / 2) {
        const vf d = widen_half(scales + 16 * tile), m = widen_half(scales + kPanel + 16 * tile);
        const vf low = fma(d, splat(-2048.f), m), high = fma(d, splat(-128.f), m);
        UNROLL
        for (int i = 0; i < 4; i++) {
            const vu v = load_as<vu>(group + (i * kPanel + 16 * tile) * 4);
            const vu k0 = v << 12, k1 = v << 4, k2 = v >> 4, k3 = v >> 12;
            const auto low_number = [&](vu x) { return fma(number_at<12>(x, 0xf000), d, low); };
            const auto high_number = [&](vu x) { return fma(number_at<16>(x, 0xf0000), d, high); };
            store_pairs(to + 64 * i, low_number(k0), low_number(k1));
            store_pairs(to + 64 * i + 32, low_number(k2), low_number(k3));
            store_pairs(to + 256 + 64 * i, high_number(k0), high_number(k1));
            store_pairs(to + 256 + 64 * i + 32, high_number(k2), high_number(k3));
        }
    }
}

template <Format F>
constexpr int64_t step_bytes() {
    return F == Format::bf16 ? kPanelStep : F == Format::int8 ? kGroupBytes8 : kGroupBytes4;
}

// `steps` of a packed panel as tiles. `ahead`: bytes to prefetch at.
template <Format F>
INLINE void expand(const char* from, int64_t steps, int64_t ahead, char* to) {
    for (int64_t i = 0; i < steps; i++, from += step_bytes<F>(), to += kPanelStep) {
        if (ahead > 0)
            for (int64_t line = 0; line < step_bytes<F>(); line += 64) __builtin_prefetch(from + ahead + line);
        if (F == Format::int8)
            expand8(from, reinterpret_cast<uint16_t*>(to));
        else
            expand4(from, reinterpret_cast<uint16_t*>(to));
    }
}

// tile [P][rows][kPanel] for up to 16 rows.
template <Format F, int P>
static void wide_tile(const char* x, int64_t x_bytes, const char* panel, int64_t steps, int64_t rows, char* scratch,
                      float* tile) {
    const char* panel2 = panel + steps * step_bytes<F>();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (F == Format::bf16) {
        add_wide<P>(x, x_bytes, panel, panel2, steps, 4096);
    } else {
        // Two halves of scratch in turn, so that writing one overlaps with reading the other.
        for (int64_t i = 0; i < steps; i += kChunk) {
            const int64_t count = steps - i < kChunk ? steps - i : kChunk;
            char* b = scratch + i / kChunk % 2 * (2 * kChunk * kPanelStep);
            char* b2 = b + kChunk * kPanelStep;
            expand<F>(panel + i * step_bytes<F>(), count, 4096, b);
            if (P == 2) expand<F>(panel2 + i * step_bytes<F>(), count, 4096, b2);
            memory_is_read();
            add_wide<P>(x + 64 * i, x_bytes, b, b2, count, 0);
        }
    }
    _tile_stored(0, tile, kPanel * 4);
    _tile_stored(1, tile + 16, kPanel * 4);
    if (P == 1) return;
    _tile_stored(2, tile + rows * kPanel, kPanel * 4);
    _tile_stored(3, tile + rows * kPanel + 16, kPanel * 4);
}

template <Format F>
static void matmul_few(const Matmul& m, int64_t row, int64_t rows, int64_t unit, int64_t unit_end, char* scratch) {
    const int64_t steps = (m.k + 31) / 32;
    const char* x = static_cast<const char*>(m.x) + row * m.x_bytes;
    alignas(64) float tile[2 * 16 * kPanel];
    configure_tiles(rows, true);
    for_panels(m, unit, unit_end, [&](int64_t at, int64_t first, int panels) {
        const char* panel = static_cast<const char*>(m.panels) + first * steps * step_bytes<F>();
        if (panels == 2)
            wide_tile<F, 2>(x, m.x_bytes, panel, steps, rows, scratch, tile);
        else
            wide_tile<F, 1>(x, m.x_bytes, panel, steps, rows, scratch, tile);
        memory_is_read();
        finish_panels(m, row, rows, at, panels, tile);
    });
}

template <Format F>
static void matmul_many(const Matmul& m, int64_t row, int64_t row_end, int64_t unit, int64_t unit_end, char* scratch) {
    const int64_t steps = (m.k + 31) / 32, panel_size = steps * step_bytes<F>();
    const bool gated = m.epilogue == Epilogue::activate_gated;
    const int64_t panels = gated ? 2 : 1, blocks = (row_end - row + 31) / 32;
    float* gates = reinterpret_cast<float*>(scratch);  // [rows][kPanel]
    char* expanded = scratch + kSlabRows * kPanel * 4;
    alignas(64) float tile[32 * kPanel];
    int64_t configured = 0;
    for (int64_t p = unit * panels; p < unit_end * panels; p++) {
        const char* panel = static_cast<const char*>(m.panels) + p * panel_size;
        Fetch fetch{panel + panel_size, panel + (p + 1 < unit_end * panels ? 2 : 1) * panel_size, 0};
        fetch.lines = (panel_size / 64 + blocks * steps - 1) / (blocks * steps);
        if (F != Format::bf16) {
            expand<F>(panel, steps, 0, expanded);
            memory_is_read();
            panel = expanded;
        }
        for (int64_t r = row; r < row_end; r += 32) {
            const int64_t rows = row_end - r < 32 ? row_end - r : 32;
            if (rows != configured) configure_tiles(configured = rows, false);
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            add_block(static_cast<const char*>(m.x) + r * m.x_bytes, m.x_bytes, rows > 16, panel, steps, fetch);
            const bool gate = gated && p % 2 == 0;
            float* to = gate ? gates + (r - row) * kPanel : tile;
            _tile_stored(0, to, kPanel * 4);
            _tile_stored(1, to + 16, kPanel * 4);
            if (rows > 16) {
                _tile_stored(2, to + 16 * kPanel, kPanel * 4);
                _tile_stored(3, to + 16 * kPanel + 16, kPanel * 4);
            }
            memory_is_read();
            if (gated && !gate)
                finish(m, r, rows, p / 2, gates + (r - row) * kPanel, tile);
            else if (!gated)
                finish(m, r, rows, p, tile, nullptr);
        }
    }
}

template <Format F>
static void matmul_tiles(const Matmul& m, int64_t row, int64_t row_end, int64_t unit, int64_t unit_end, void* scratch) {
    for (int64_t end; row < row_end; row = end) {
        end = row_end - row < kSlabRows ? row_end : row + kSlabRows;
        if (end - row <= 16)
            matmul_few<F>(m, row, end - row, unit, unit_end, static_cast<char*>(scratch));
        else
            matmul_many<F>(m, row, end, unit, unit_end, static_cast<char*>(scratch));
    }
    _tile_release();
}
