#include "decoder.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <stdexcept>

namespace minivllm {
namespace {

constexpr int64_t kRowsAtOnce = 1024;      // bounds the memory of a step
constexpr int64_t kLogitBytes = 16 << 20;  // rows of logits that exist at one time
constexpr int64_t kLogitRows = 96;         // the same in rows

}  // namespace

Decoder::Decoder(const ModelConfig& config, const Pool& pool, Number number,
                 const std::unordered_map<std::string, Format>& formats, int num_threads, const std::string& isa)
    : threads_(num_threads),
      kernels_(kernels_for(isa)),
      model_(config, number, formats, kernels_.bf16_tiles),
      pool_(pool),
      attention_(config, pool.block_size, kernels_, threads_),
      hidden_stride_(padded(config.hidden_size)),
      qkv_stride_(padded(config.q_size() + 2 * config.kv_size())),
      attention_stride_(padded(config.q_size())),
      inner_stride_(padded(config.intermediate_size)),
      vocab_stride_(padded(config.vocab_size)) {
    for (int thread = 0; thread < num_threads; thread++) {
        matmul_scratch_.emplace_back(
            matmul_scratch_size(std::max({config.hidden_size, config.q_size(), config.intermediate_size})));
        samplers_.emplace_back(kernels_, config.vocab_size);
    }
}

StepResult Decoder::execute(const Batch& batch, const SamplingBatch& sampling,
                            const std::function<void()>& before_sampling) {
    std::lock_guard<std::mutex> lock(mutex_);
    check_batch(batch, model_.config, pool_);
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

CacheLayer Decoder::cache_layer(int64_t layer) const {
    const ModelConfig& c = model_.config;
    CacheLayer result{pool_.format, pool_.data, c.num_kv_heads, pool_.block_size, c.head_dim};
    result.cells = keys_of(result, layer * pool_.num_blocks, 0);
    return result;
}

void Decoder::copy_blocks(const Batch& batch) {
    const ModelConfig& c = model_.config;
    if (batch.block_copies.size == 0) return;
    // In order within a layer, in case one copy's source is another's destination.
    threads_.run(c.num_layers, [&](int64_t index, int) {
        const CacheLayer layer = cache_layer(index);
        for (int64_t i = 0; i < batch.block_copies.size; i += 3) {
            const int64_t source = batch.block_copies[i], destination = batch.block_copies[i + 1];
            const auto bytes = static_cast<size_t>(batch.block_copies[i + 2] * cell_bytes(layer.format, layer.head_dim));
            for (int64_t head = 0; head < c.num_kv_heads; head++) {
                std::memcpy(keys_of(layer, destination, head), keys_of(layer, source, head), bytes);
                std::memcpy(values_of(layer, destination, head), values_of(layer, source, head), bytes);
            }
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
    attention_.plan(batch, row, row_end);
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
    attention_.attend({cache_layer(index), qkv_.as<float>(), qkv_stride_, c.num_heads, rope.cos_sin,
                       1.f / std::sqrt(static_cast<float>(c.head_dim)), model_.number, attended_.as<char>(),
                       attention_stride_});
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

void Decoder::sample(const SamplingBatch& sampling, StepResult& result) {
    // Rows whose logits are in memory at once: whole register tiles of the matmul (kTileRows).
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
