// The arithmetic of a decoder step, one table of functions for each instruction set (ISA).
//
// kernels.cpp is compiled once for each ISA; dispatch.cpp picks the table. Every function works on a piece of its
// job, so that the caller can spread the pieces over threads. The promise that all of them keep: a row's result
// depends on nothing but that row's own inputs. Not on how many rows there are, nor on how the job is cut up.
// (Tables of different ISAs agree closely, not bit for bit.)
//
// Sizes and strides count elements. "Padded" means rounded up to kPanel; the padding of an activation row is zero
// wherever a kernel reads it. All pointers are to distinct memory unless said otherwise.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace minivllm {

constexpr int64_t kPanel = 32;         // outputs in a panel of a packed matrix
constexpr int64_t kGroup = 32;         // quantised weights (along k) that share a scale
constexpr int64_t kKeyTile = 64;        // keys that attention takes at a time, at multiples of 64
constexpr int64_t kGroupQueries = 16;   // queries that meet such a tile together: a tile register's rows
constexpr int64_t kExpBlock = 64;       // exponentials that are summed up apart
constexpr int64_t kContextSplit = 512;  // keys that are summed up apart and then merged in order

static inline constexpr int64_t padded(int64_t size) { return (size + kPanel - 1) / kPanel * kPanel; }

// An activation row as a matmul reads it: float32 beside float32 weights, bfloat16 beside bfloat16 weights.
enum class Number { f32, bf16 };
enum class Activation { gelu, gelu_tanh, silu };
enum class Norm { layernorm, rmsnorm };

// What becomes of y = W @ x + bias.
enum class Epilogue {
    store,           // out = y
    add,             // out += y, the residual stream
    activate,        // next = act(y), a row for the next matmul
    activate_gated,  // next = act(y of the even panel) * (y of the odd panel)
};

// How a packed matrix keeps its weights, panel after panel of kPanel outputs; k is padded with zeros.
//   f32   [k][kPanel]
//   bf16  [ceil(k / 2)][kPanel][2], or where Kernels::bf16_tiles [ceil(k / 32)][kPanel / 16][16][16][2], the tiles
//         of AMX: both [pair of k][output][2]
//   int8  [ceil(k / 32)] groups: 128 + q as uint8 [8][kPanel][4] (k, output, k), then scales d as float16 [kPanel]
//         w = d q
//   int4  [ceil(k / 32)] groups: nibbles q [4][kPanel][4] (k, output, k), the low halves are k = 0 … 15 of the group
//         and the high ones k = 16 … 31; then d and m as float16 [2][kPanel]:  w = d q + m
enum class Format { f32, bf16, int8, int4 };

// What a matmul kernel reads: float32 or bfloat16 rows, zero from k up to the next multiple of 32; or groups of 32
// elements as 8-bit integers with a scale each, in a layout of the ISA's own (Kernels::group_bytes for each). A row has
// one plane of groups or two, the second holding what the first has left over; memory for 15 more rows must be there.
enum class Input { f32, bf16, groups };

static inline constexpr Input input_of(Format format) {
    return format == Format::f32 ? Input::f32 : format == Format::bf16 ? Input::bf16 : Input::groups;
}

// Rows of float32 or bfloat16 into rows of an Input.
struct Prepare {
    Number number;
    const void* x;  // [rows][x_stride]
    int64_t x_stride;
    int64_t k;
    Input input;
    void* out;  // [rows], out_bytes apart
    int64_t out_bytes;
    int64_t planes = 1;  // for groups
};

// One packed matrix times the rows of x. A unit is a panel of outputs, or a gate panel and its up panel.
struct Matmul {
    Format format;
    const void* x;  // [rows], x_bytes apart, as input_of says
    int64_t x_bytes;
    const void* panels;
    int64_t k;
    const float* bias;  // [panels][kPanel], or null
    Epilogue epilogue;
    Activation activation;  // for the two last epilogues
    Number number;          // of out, likewise; else it is float32
    void* out;              // [rows][out_stride]
    int64_t out_stride;
    // Only for speed: how many units there are, and how far from one call's first unit to that of the next call on the
    // same thread (a guess; 0: none), whose weights are then fetched in time.
    int64_t num_units = 0, next_call = 0;
    int64_t planes = 1;  // of x, for int8 and int4
};

struct NormRows {
    Norm kind;
    Number out_number;
    const float* x;  // [rows][x_stride]
    int64_t x_stride;
    int64_t size;
    const float* weight;  // [size]
    const float* bias;    // [size] or null
    float eps;
    void* out;  // [rows][out_stride], as a matmul reads it
    int64_t out_stride;
};

// How the cache keeps the head_dim numbers of a token and head, its cell: as they are, or as 8-bit integers followed by
// their float32 scale, x = scale · q.
enum class CacheFormat { f32, bf16, int8 };

static inline constexpr int64_t cell_bytes(CacheFormat format, int64_t head_dim) {
    return format == CacheFormat::f32 ? 4 * head_dim : format == CacheFormat::bf16 ? 2 * head_dim : head_dim + 4;
}

// The part of the KV pool that belongs to one layer.
struct CacheLayer {
    CacheFormat format;
    void* cells;  // [blocks][kv_heads][K, V][block_size]: a head's keys and values of a block are one run of memory
    int64_t kv_heads, block_size, head_dim;
};

// The keys of a block and kv head, block_size cells, and the values, which follow them.
static inline char* keys_of(const CacheLayer& c, int64_t block, int64_t kv_head) {
    const int64_t cells = (block * c.kv_heads + kv_head) * 2 * c.block_size;
    return static_cast<char*>(c.cells) + cells * cell_bytes(c.format, c.head_dim);
}
static inline char* values_of(const CacheLayer& c, int64_t block, int64_t kv_head) {
    return keys_of(c, block, kv_head) + c.block_size * cell_bytes(c.format, c.head_dim);
}

// Rotates k (in float32, by halves) and stores k and v in the cache.
struct RopeAndStore {
    CacheLayer cache;
    float* qkv;  // [rows][qkv_stride]: q heads, k heads, v heads; k is rotated in place
    int64_t qkv_stride;
    int64_t heads;
    const float* cos_sin;  // [rows][head_dim]: head_dim / 2 cosines, then as many sines; null: no rotation
    const int32_t* slots;  // [rows]; negative: k and v of the row are in the cache already
};

// Rows of one sequence that attend together; they read the cache only. Or rows of several sequences, over splits that
// are the same blocks for all of them, and that all of them see whole: only for attend_split, and then merge_splits.
struct QueryTile {
    int64_t row, rows;           // row … row + rows − 1 of q and out
    const int32_t* positions;    // [rows], ascending within a sequence; a row sees keys 0 … its position
    const int32_t* block_table;  // physical blocks of the (first) sequence
};

// Keys [position, end) of a kv head, the first of which the thread is likely to read after a call: they are fetched
// meanwhile. None: {}.
struct NextKeys {
    const int32_t* block_table;
    int64_t kv_head, position, end;
};

struct Attention {
    CacheLayer cache;
    const float* q;  // [rows][q_stride], not rotated yet
    int64_t q_stride;
    int64_t heads;
    const float* cos_sin;  // of the rows, as in RopeAndStore
    float scale;
    Number out_number;
    void* out;  // [rows][out_stride], heads side by side, as a matmul reads it
    int64_t out_stride;
};

// One query head over some keys: a maximum, the sum of 2^(score − maximum), and the values weighted by it.
static inline constexpr int64_t padded_head(int64_t head_dim) { return (head_dim + 31) / 32 * 32; }
static inline constexpr int64_t partial_size(int64_t head_dim) { return 2 + padded_head(head_dim); }

// Floats of scratch memory that attention needs for tiles of up to that many (rows × heads of a group). It must be
// zeroed before its first use, and then serve one head_dim and one thread.
int64_t attention_scratch_size(int64_t queries, int64_t head_dim);

// Bytes of a packed panel, of an input row, and of scratch memory for a matmul of up to that many inputs.
int64_t panel_bytes(Format format, int64_t k, bool bf16_tiles);
int64_t input_bytes(Input input, int64_t k, int64_t group_bytes, int64_t planes = 1);
int64_t matmul_scratch_size(int64_t k);

struct Kernels {
    const char* isa;

    bool bf16_tiles;      // the layout of Format::bf16
    int64_t group_bytes;  // of a group of an Input::groups row
    void (*prepare)(const Prepare&, int64_t row, int64_t row_end);
    // rows [row, row_end) and units [unit, unit_end). Scratch: matmul_scratch_size bytes, aligned to 64.
    void (*matmul)(const Matmul&, int64_t row, int64_t row_end, int64_t unit, int64_t unit_end, void* scratch);
    // The most rows that should go past a panel before the next panel's turn.
    int64_t (*matmul_rows)(Format, int64_t k);

    void (*norm)(const NormRows&, int64_t row, int64_t row_end);
    void (*rope_and_store)(const RopeAndStore&, int64_t row, int64_t row_end);

    // The tile's rows over all their keys: the query heads of kv heads [kv_head, kv_head_end).
    void (*attend)(const Attention&, const QueryTile&, int64_t kv_head, int64_t kv_head_end, const NextKeys&, float* scratch);
    // One kv head over split number `split` only, into partials of partial_size floats for `partial_rows` rows × heads of
    // a group, the tile's from row partial_row on. A row that sees no key of the split leaves its partial unwritten.
    void (*attend_split)(const Attention&, const QueryTile&, int64_t kv_head, int64_t split, const NextKeys&, float* scratch,
                         float* partials, int64_t partial_row, int64_t partial_rows);
    // Merges the partials of the splits, which lie one after the other, in order and writes out: bit for bit what
    // attend does. Overwrites the partials of split 0.
    void (*merge_splits)(const Attention&, const QueryTile&, int64_t kv_head, float* partials);

    // Index of the largest of n ≥ 1 logits, the first of equals; −1 if one is NaN or +inf or all are −inf.
    int64_t (*argmax)(const float* x, int64_t n);
    // For the sampler, in double. out[i] = x[i] · factor − shift.
    void (*relative)(const float* x, double factor, double shift, double* out, int64_t n);
    // out[i] = exp(x[i] − shift); x ≤ shift; out may be x.
    void (*exp_double)(const double* x, double shift, double* out, int64_t n);
    // The same summed up over each kExpBlock of them: sums[ceil(n / kExpBlock)].
    void (*exp_sums)(const double* x, double shift, double* sums, int64_t n);
    // The first i ≥ start with x[i] ≥ least, or n.
    int64_t (*find_from)(const double* x, int64_t start, int64_t n, double least);

    // The activation itself, for tests: out[i] = act(x[i]).
    void (*activate)(Activation, const float* x, float* out, int64_t n);
};

// ISAs that this build has and this processor runs, the best first; the last always works.
std::vector<std::string> supported_isas();
// The table of that name, or of the best one if it is empty. Throws std::invalid_argument for any other.
const Kernels& kernels_for(const std::string& isa);

}  // namespace minivllm
