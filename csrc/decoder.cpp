#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace minivllm {
namespace {

constexpr int64_t kRowsAtOnce = 1024;        // bounds the memory of a step
constexpr int64_t kQueries = 192;            // rows × heads of a group that attend together
constexpr int64_t kPartialBytes = 32 << 20;  // partial sums of attention, at most
constexpr int64_t kLogitBytes = 16 << 20;    // rows of logits that exist at one time
constexpr int64_t kLogitRows = 96;           // the same in rows

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

Decoder::Decoder(const ModelConfig& config, const Pool& pool, Number number,
                 const std::unordered_map<std::string, Format>& formats, int num_threads, const std::string& isa)
    : threads_(num_threads),
      kernels_(kernels_for(isa)),
      model_(config, number, formats, kernels_.bf16_tiles),
      pool_(pool),
      hidden_stride_(padded(config.hidden_size)),
      qkv_stride_(padded(config.q_size() + 2 * config.kv_size())),
      attention_stride_(padded(config.q_size())),
      inner_stride_(padded(config.intermediate_size)),
      vocab_stride_(padded(config.vocab_size)),
      query_rows_(std::max<int64_t>(1, kQueries * config.num_kv_heads / config.num_heads)) {
    const int64_t group = config.num_heads / config.num_kv_heads;
    const int64_t scratch = attention_scratch_size(query_rows_ * group, config.head_dim);
    for (int thread = 0; thread < num_threads; thread++) {
        scratch_.emplace_back(scratch * 4);
        matmul_scratch_.emplace_back(
            matmul_scratch_size(std::max({config.hidden_size, config.q_size(), config.intermediate_size})));
        samplers_.emplace_back(kernels_, config.vocab_size);
    }
}

StepResult Decoder::execute(const Batch& batch, const SamplingBatch& sampling,
                            const std::function<void()>& before_sampling) {
    std::lock_guard<std::mutex> lock(mutex_);
    check(batch);
    check_batch(sampling, batch.logit_rows.size, model_.config.vocab_size);
    StepResult result(sampling);
    copy_blocks(batch);
    yielding_.clear();
    draws_.clear();
    for (int64_t i = 0; i < batch.logit_rows.size; i++) {
        if (i > 0 && batch.logit_rows[i] == batch.logit_rows[i - 1]) continue;
        yielding_.push_back(batch.logit_rows[i]);
        draws_.push_back(i);
    }
    draws_.push_back(batch.logit_rows.size);
    last_hidden_.reserve(static_cast<int64_t>(yielding_.size()) * hidden_stride_ * number_size(model_.number));
    asked_hidden_.reserve(batch.hidden_rows.size * hidden_stride_ * 4);
    const int64_t rows = batch.token_ids.size;
    for (int64_t row = 0; row < rows; row += kRowsAtOnce) run_rows(batch, row, std::min(rows, row + kRowsAtOnce));
    const int64_t hidden_size = model_.config.hidden_size;
    result.hidden.reserve(static_cast<size_t>(batch.hidden_rows.size * hidden_size));
    for (int64_t i = 0; i < batch.hidden_rows.size; i++) {
        const float* row = asked_hidden_.as<float>() + i * hidden_stride_;
        result.hidden.insert(result.hidden.end(), row, row + hidden_size);
    }
    if (before_sampling) before_sampling();
    sample(sampling, result);
    return result;
}

void Decoder::check(const Batch& b) const {
    const auto fail = [](const std::string& what) { throw std::invalid_argument("batch: " + what); };
    const auto number = [](int64_t n) { return std::to_string(n); };
    const int64_t rows = b.token_ids.size, sequences = b.context_lens.size;
    const int64_t num_slots = pool_.num_blocks * pool_.block_size;
    const ModelConfig& c = model_.config;
    if (b.positions.size != rows || b.slot_mapping.size != rows) fail("positions and slots are not for every row");
    if (b.query_start.size != sequences + 1) fail("query_start is not for every sequence");
    if (b.block_tables.size != sequences * b.table_width) fail("block_tables is not for every sequence");
    if (b.query_start[0] != 0 || b.query_start[sequences] != rows) fail("query_start does not span the rows");
    for (int64_t s = 0; s < sequences; s++) {
        const int64_t start = b.query_start[s], end = b.query_start[s + 1], context = b.context_lens[s];
        const std::string name = "sequence " + number(s) + ": ";
        if (start > end) fail(name + "query_start descends");
        if (context < end - start) fail(name + "context_lens is less than its rows");
        const int32_t* table = b.block_tables.data + s * b.table_width;
        const int64_t blocks = ceil_div(context, pool_.block_size);
        if (blocks > b.table_width) fail(name + "its block table is shorter than its context");
        for (int64_t i = 0; i < blocks; i++)
            if (table[i] < 0 || table[i] >= pool_.num_blocks) fail(name + "there is no block " + number(table[i]));
        for (int64_t row = start; row < end; row++) {
            const int64_t position = b.positions[row], slot = b.slot_mapping[row];
            if (position != context - end + row) fail(name + "positions do not lead up to context_lens");
            if (position >= c.max_position && c.rope_inv_freq.empty())
                fail(name + "the model has no position " + number(position));
            if (slot < -1 || slot >= num_slots) fail(name + "there is no slot " + number(slot));
            if (slot >= 0 && slot != table[position / pool_.block_size] * pool_.block_size + position % pool_.block_size)
                fail(name + "slot " + number(slot) + " is not where its block table has position " + number(position));
            if (b.token_ids[row] < 0 || b.token_ids[row] >= c.vocab_size)
                fail(name + "there is no token " + number(b.token_ids[row]));
        }
    }
    for (int64_t i = 0; i < b.logit_rows.size; i++)
        if (b.logit_rows[i] < (i ? b.logit_rows[i - 1] : 0) || b.logit_rows[i] >= rows)
            fail("logit_rows descend, or leave the rows");
    for (int64_t i = 0; i < b.hidden_rows.size; i++)
        if (b.hidden_rows[i] < (i ? b.hidden_rows[i - 1] + 1 : 0) || b.hidden_rows[i] >= rows)
            fail("hidden_rows do not ascend, or leave the rows");
    for (int64_t i = 0; i + 2 < b.block_copies.size; i += 3) {
        const int32_t* copy = b.block_copies.data + i;
        const bool good = copy[0] >= 0 && copy[0] < pool_.num_blocks && copy[1] >= 0 && copy[1] < pool_.num_blocks &&
                          copy[0] != copy[1] && copy[2] >= 0 && copy[2] <= pool_.block_size;
        if (!good)
            fail("no copy of " + number(copy[2]) + " slots from block " + number(copy[0]) + " to " + number(copy[1]));
    }
}

CacheLayer Decoder::cache_layer(int64_t layer) const {
    const ModelConfig& c = model_.config;
    const int64_t half = pool_.num_blocks * c.num_kv_heads * pool_.block_size * cell_bytes(pool_.format, c.head_dim);
    char* keys = static_cast<char*>(pool_.data) + 2 * layer * half;
    return {pool_.format, keys, keys + half, c.num_kv_heads, pool_.block_size, c.head_dim};
}

void Decoder::copy_blocks(const Batch& batch) {
    const ModelConfig& c = model_.config;
    if (batch.block_copies.size == 0) return;
    // In order within a layer's keys or values, in case one copy's source is another's destination.
    threads_.run(2 * c.num_layers, [&](int64_t piece, int) {
        const CacheLayer layer = cache_layer(piece / 2);
        char* data = static_cast<char*>(piece % 2 ? layer.values : layer.keys);
        const int64_t slot_bytes = cell_bytes(pool_.format, c.head_dim), head_bytes = slot_bytes * pool_.block_size;
        for (int64_t i = 0; i < batch.block_copies.size; i += 3) {
            const int64_t source = batch.block_copies[i], destination = batch.block_copies[i + 1];
            for (int64_t head = 0; head < c.num_kv_heads; head++)
                std::memcpy(data + (destination * c.num_kv_heads + head) * head_bytes,
                            data + (source * c.num_kv_heads + head) * head_bytes,
                            static_cast<size_t>(batch.block_copies[i + 2] * slot_bytes));
        }
    });
}

// Runs body(row, row_end) over all rows: here if they are few, else in pieces of `grain`.
template <class Body>
void Decoder::for_rows(int64_t rows, int64_t grain, const Body& body) {
    if (rows <= grain) return body(0, rows);
    threads_.run(ceil_div(rows, grain),
                 [&](int64_t piece, int) { body(piece * grain, std::min(rows, (piece + 1) * grain)); });
}

void Decoder::run_rows(const Batch& batch, int64_t row, int64_t row_end) {
    const ModelConfig& c = model_.config;
    const int64_t rows = row_end - row, item = number_size(model_.number);
    residual_.reserve(rows * hidden_stride_ * 4);
    normed_.reserve(rows * hidden_stride_ * item);
    qkv_.reserve(rows * qkv_stride_ * 4);
    attended_.reserve(rows * attention_stride_ * item);
    inner_.reserve(rows * inner_stride_ * item);
    cos_sin_.reserve(rows * c.head_dim * 4);
    const int64_t half = c.head_dim / 2;
    for_rows(rows, 8, [&](int64_t r, int64_t end) {
        for (; r < end; r++) {
            const int64_t position = batch.positions[row + r];
            float* x = residual_.as<float>() + r * hidden_stride_;
            model_.read_embedding(batch.token_ids[row + r], x);
            std::fill(x + c.hidden_size, x + hidden_stride_, 0.f);
            if (c.rope_inv_freq.empty()) {
                const float* learned = model_.position_embedding.as<float>() + position * c.hidden_size;
                for (int64_t i = 0; i < c.hidden_size; i++) x[i] += learned[i];
            } else {
                float* cos_sin = cos_sin_.as<float>() + r * c.head_dim;
                for (int64_t i = 0; i < half; i++) {
                    const float angle = static_cast<float>(position) * c.rope_inv_freq[static_cast<size_t>(i)];
                    cos_sin[i] = static_cast<float>(std::cos(static_cast<double>(angle)));
                    cos_sin[half + i] = static_cast<float>(std::sin(static_cast<double>(angle)));
                }
            }
        }
    });
    plan_attention(batch, row, row_end);
    for (int64_t layer = 0; layer < c.num_layers; layer++)
        run_layer(layer, batch.slot_mapping.data + row, rows);
    const auto first = yielding_.begin();
    for (auto at = std::lower_bound(first, yielding_.end(), row); at < yielding_.end() && *at < row_end; ++at)
        norm(model_.final_norm, residual_.as<float>() + (*at - row) * hidden_stride_, 1, model_.number, last_hidden_,
             at - first);
    const int32_t *asked = batch.hidden_rows.data, *asked_end = asked + batch.hidden_rows.size;
    for (auto at = std::lower_bound(asked, asked_end, row); at < asked_end && *at < row_end; ++at)
        norm(model_.final_norm, residual_.as<float>() + (*at - row) * hidden_stride_, 1, Number::f32, asked_hidden_,
             at - asked);
}

void Decoder::run_layer(int64_t index, const int32_t* slots, int64_t rows) {
    const ModelConfig& c = model_.config;
    const Layer& layer = model_.layers[static_cast<size_t>(index)];
    norm(layer.attn_norm, residual_.as<float>(), rows, model_.number, normed_, 0);
    matmul(layer.qkv, normed_, 0, hidden_stride_, rows, Epilogue::store, qkv_, qkv_stride_);
    const RopeAndStore rope{cache_layer(index), qkv_.as<float>(), qkv_stride_, c.num_heads,
                            c.rope_inv_freq.empty() ? nullptr : cos_sin_.as<float>(), slots};
    for_rows(rows, 8, [&](int64_t r, int64_t end) { kernels_.rope_and_store(rope, r, end); });
    attend(index);
    matmul(layer.o, attended_, 0, attention_stride_, rows, Epilogue::add, residual_, hidden_stride_);
    norm(layer.mlp_norm, residual_.as<float>(), rows, model_.number, normed_, 0);
    matmul(layer.up, normed_, 0, hidden_stride_, rows, c.gated_mlp ? Epilogue::activate_gated : Epilogue::activate,
           inner_, inner_stride_);
    matmul(layer.down, inner_, 0, inner_stride_, rows, Epilogue::add, residual_, hidden_stride_);
}

void Decoder::norm(const NormWeights& weights, const float* x, int64_t rows, Number number, AlignedBuffer& out,
                   int64_t out_row) {
    const ModelConfig& c = model_.config;
    const NormRows job{c.norm,
                       number,
                       x,
                       hidden_stride_,
                       c.hidden_size,
                       weights.weight.as<float>(),
                       weights.bias.as<float>(),
                       c.norm_eps,
                       out.as<char>() + out_row * hidden_stride_ * number_size(number),
                       hidden_stride_};
    for_rows(rows, 8, [&](int64_t r, int64_t end) { kernels_.norm(job, r, end); });
}

void Decoder::matmul(const PackedMatrix& m, const AlignedBuffer& x, int64_t x_row, int64_t x_stride, int64_t rows,
                     Epilogue epilogue, AlignedBuffer& out, int64_t out_stride) {
    const char* input = x.as<char>() + x_row * x_stride * number_size(model_.number);
    int64_t input_row = x_stride * number_size(model_.number);
    const Input wanted = input_of(m.format);
    if (wanted != (model_.number == Number::f32 ? Input::f32 : Input::bf16)) {
        const int64_t row_bytes = input_bytes(wanted, m.k, kernels_.group_bytes, m.planes);
        prepared_.reserve((rows + 15) * row_bytes);
        const Prepare prepare{model_.number, input, x_stride, m.k, wanted, prepared_.as<char>(), row_bytes, m.planes};
        for_rows(rows, 8, [&](int64_t r, int64_t end) { kernels_.prepare(prepare, r, end); });
        input = prepared_.as<char>();
        input_row = row_bytes;
    }
    const int64_t units = m.num_panels / (epilogue == Epilogue::activate_gated ? 2 : 1);
    const int64_t row_pieces = ceil_div(rows, kernels_.matmul_rows(m.format, m.k)), row_grain = ceil_div(rows, row_pieces);
    // Pieces small enough that the threads end together, large enough that claiming them costs nothing.
    const int64_t unit_grain = std::max<int64_t>(1, units * row_pieces / (16 * threads_.num_threads()));
    const Matmul job{m.format,         input,         input_row, m.panels(), m.k, m.bias.as<float>(), epilogue,
                     model_.config.activation, model_.number, out.as<char>(), out_stride, units,
                     std::max<int64_t>(1, threads_.num_threads() * unit_grain / row_pieces), m.planes};
    threads_.run(row_pieces * ceil_div(units, unit_grain), [&](int64_t piece, int thread) {
        const int64_t row = piece % row_pieces * row_grain, unit = piece / row_pieces * unit_grain;
        kernels_.matmul(job, row, std::min(rows, row + row_grain), unit, std::min(units, unit + unit_grain),
                        matmul_scratch_[static_cast<size_t>(thread)].as<char>());
    });
}

// How many splits of the context are the same blocks for two sequences that compute one row each, which sees them whole.
int64_t Decoder::shared_splits(const Batch& b, int64_t sequence, int64_t other) const {
    const int32_t* table = b.block_tables.data + sequence * b.table_width;
    const int32_t* others = b.block_tables.data + other * b.table_width;
    const int64_t context = std::min(b.context_lens[sequence], b.context_lens[other]) / kContextSplit * kContextSplit;
    const int64_t blocks = ceil_div(context, pool_.block_size);
    const int64_t same = std::mismatch(table, table + blocks, others).first - table;
    return (same == blocks ? context : same * pool_.block_size) / kContextSplit;
}

// Cuts the rows into tiles. Neighbours that share the beginning of their contexts, and compute one row each, come into one
// tile, so that what they share is read and repacked once. All ways to cut give the same numbers.
void Decoder::plan_attention(const Batch& batch, int64_t row, int64_t row_end) {
    const ModelConfig& c = model_.config;
    tiles_.clear();
    int64_t sequence = std::upper_bound(batch.query_start.data, batch.query_start.data + batch.query_start.size,
                                        static_cast<int32_t>(row)) - batch.query_start.data - 1;
    const int64_t row_bytes = c.num_heads * partial_size(c.head_dim) * 4;  // of partial sums, for each split
    int64_t bytes = 0;
    const auto lone_row = [&](int64_t s, int64_t r) {
        return r < row_end && batch.query_start[s] == r && batch.query_start[s + 1] == r + 1;
    };
    for (int64_t r = row; r < row_end;) {
        const int32_t* table = batch.block_tables.data + sequence * batch.table_width;
        const auto splits_of = [&](int64_t at) { return batch.positions[at] / kContextSplit + 1; };
        if (lone_row(sequence, r)) {
            int64_t rows = 1, shared = 0, splits = splits_of(r);
            for (; rows < query_rows_ && lone_row(sequence + rows, r + rows); rows++) {
                const int64_t with_next = shared_splits(batch, sequence, sequence + rows);
                const int64_t all_splits = std::max(splits, splits_of(r + rows));
                if (with_next == 0 || (rows > 1 && with_next < shared)) break;
                if (bytes + all_splits * (rows + 1) * row_bytes > kPartialBytes) break;
                shared = rows > 1 ? shared : with_next;
                splits = all_splits;
            }
            tiles_.push_back({{r - row, rows, batch.positions.data + r, table}, splits, shared});
            bytes += shared ? splits * rows * row_bytes : 0;
            r += rows;
            sequence += rows;
            continue;
        }
        const int64_t end = std::min<int64_t>(row_end, batch.query_start[sequence + 1]);
        for (int64_t rows; r < end; r += rows) {
            rows = std::min(query_rows_, end - r);
            tiles_.push_back({{r - row, rows, batch.positions.data + r, table}, splits_of(r + rows - 1), 0});
        }
        sequence++;
    }
    table_width_ = batch.table_width;
    cut_attention();
}

// Cuts the tiles into pieces for the threads: by splits where rows share them, and everywhere if the tiles alone are too
// few; else all heads of a tile together, so that the next one's keys can be fetched in time.
void Decoder::cut_attention() {
    const ModelConfig& c = model_.config;
    const int64_t threads = threads_.num_threads(), kv_heads = c.num_kv_heads;
    const auto size_of = [&](const Tile& tile) {
        return tile.num_splits * tile.query.rows * c.num_heads * partial_size(c.head_dim);
    };
    int64_t all_partials = 0;
    for (const Tile& tile : tiles_) all_partials += size_of(tile);
    // The longest contexts first, so that the threads end together.
    std::stable_sort(tiles_.begin(), tiles_.end(), [](const Tile& a, const Tile& b) { return a.num_splits > b.num_splits; });
    const auto num_tiles = static_cast<int64_t>(tiles_.size());
    const bool split = threads > 1 && num_tiles * kv_heads < 8 * threads && all_partials * 4 <= kPartialBytes;
    const int64_t heads = num_tiles >= 8 * threads ? kv_heads : 1;
    pieces_left_ = std::vector<std::atomic<int64_t>>(static_cast<size_t>(num_tiles * kv_heads));
    pieces_.clear();
    int64_t partials = 0;
    for (int64_t index = 0; index < num_tiles; index++) {
        Tile& tile = tiles_[static_cast<size_t>(index)];
        const auto add = [&](int64_t at, int64_t row) {
            tile.num_pieces++;
            for (int64_t head = 0; head < kv_heads; head++) pieces_.push_back({index, at, row, head, head + 1});
        };
        if (tile.shared == 0 && (!split || tile.num_splits == 1)) {
            for (int64_t head = 0; head < kv_heads; head += heads) pieces_.push_back({index, -1, -1, head, head + heads});
            continue;
        }
        for (int64_t at = 0; at < (tile.shared ? tile.shared : tile.num_splits); at++) add(at, -1);
        if (tile.shared)
            for (int64_t r = 0; r < tile.query.rows; r++)
                for (int64_t at = tile.shared; at <= tile.query.positions[r] / kContextSplit; at++) add(at, r);
        for (int64_t head = 0; head < kv_heads; head++)
            pieces_left_[static_cast<size_t>(index * kv_heads + head)] = tile.num_pieces;
        tile.partials = partials;
        partials += size_of(tile);
    }
    partials_.reserve(partials * 4);
}

QueryTile Decoder::rows_of(const Piece& piece) const {
    const QueryTile& all = tiles_[static_cast<size_t>(piece.tile)].query;
    if (piece.row < 0) return all;
    return {all.row + piece.row, 1, all.positions + piece.row, all.block_table + piece.row * table_width_};
}

// The keys that the piece begins with.
NextKeys Decoder::first_keys(int64_t index) const {
    if (index >= static_cast<int64_t>(pieces_.size())) return {};
    const Piece& piece = pieces_[static_cast<size_t>(index)];
    const QueryTile rows = rows_of(piece);
    const int64_t start = std::max<int64_t>(0, piece.split) * kContextSplit;
    return {rows.block_table, piece.kv_head, start, rows.positions[rows.rows - 1] + 1};
}

void Decoder::attend(int64_t layer) {
    const ModelConfig& c = model_.config;
    const Attention job{cache_layer(layer),
                        qkv_.as<float>(),
                        qkv_stride_,
                        c.num_heads,
                        c.rope_inv_freq.empty() ? nullptr : cos_sin_.as<float>(),
                        1.f / std::sqrt(static_cast<float>(c.head_dim)),
                        model_.number,
                        attended_.as<char>(),
                        attention_stride_};
    const int64_t row_partials = c.num_heads / c.num_kv_heads * partial_size(c.head_dim);
    threads_.run(static_cast<int64_t>(pieces_.size()), [&](int64_t at, int thread) {
        const Piece& piece = pieces_[static_cast<size_t>(at)];
        const Tile& tile = tiles_[static_cast<size_t>(piece.tile)];
        const QueryTile& query = tile.query;
        float* scratch = scratch_[static_cast<size_t>(thread)].as<float>();
        const NextKeys next = first_keys(at + threads_.num_threads());
        if (piece.split < 0) return kernels_.attend(job, query, piece.kv_head, piece.kv_head_end, next, scratch);
        const auto partials_of = [&](int64_t split) {
            const int64_t before = piece.kv_head * tile.num_splits + split;
            return partials_.as<float>() + tile.partials + before * query.rows * row_partials;
        };
        const QueryTile part = rows_of(piece);
        kernels_.attend_split(job, part, piece.kv_head, piece.split, next, scratch, partials_of(piece.split),
                              std::max<int64_t>(0, piece.row), query.rows);
        // Whoever is through last merges, in the order of the splits; and sets the count for the next layer.
        std::atomic<int64_t>& left = pieces_left_[static_cast<size_t>(piece.tile * c.num_kv_heads + piece.kv_head)];
        if (left.fetch_sub(1) > 1) return;
        left = tile.num_pieces;
        kernels_.merge_splits(job, query, piece.kv_head, partials_of(0));
    });
}

void Decoder::sample(const SamplingBatch& sampling, StepResult& result) {
    const int64_t slice = std::clamp<int64_t>(kLogitBytes / (4 * vocab_stride_), 6, kLogitRows) / 6 * 6;
    std::atomic<int64_t> failed{result.num_rows};  // the lowest such row
    const auto num_yielding = static_cast<int64_t>(yielding_.size());
    for (int64_t first = 0; first < num_yielding; first += slice) {
        const int64_t rows = std::min(slice, num_yielding - first);
        logits_.reserve(rows * vocab_stride_ * 4);
        matmul(model_.head(), last_hidden_, first, hidden_stride_, rows, Epilogue::store, logits_, vocab_stride_);
        const auto start = draws_.begin() + first, end = start + rows;  // of these rows; *end: of what comes then
        threads_.run(*end - *start, [&](int64_t draw, int thread) {
            const int64_t row = *start + draw, r = std::upper_bound(start, end, row) - start - 1;
            Sampler& sampler = samplers_[static_cast<size_t>(thread)];
            if (sampler.sample(logits_.as<float>() + r * vocab_stride_, sampling, row, result)) return;
            int64_t lowest = failed.load();
            while (row < lowest && !failed.compare_exchange_weak(lowest, row)) {}
        });
        if (failed.load() < result.num_rows)
            throw std::runtime_error("logit row " + std::to_string(failed.load()) +
                                     " has no token to choose: a logit is NaN or infinite, or every token is banned");
    }
}

}  // namespace minivllm
