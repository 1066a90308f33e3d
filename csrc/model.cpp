#include "model.h"

#include <algorithm>
#include <stdexcept>

namespace minivllm {
namespace {

float widen(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

uint16_t narrow(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return static_cast<uint16_t>(x == x ? rounded : (bits >> 16) | 0x40);
}

float convert(float x, float) { return x; }
float convert(uint16_t x, float) { return widen(x); }
uint16_t convert(float x, uint16_t) { return narrow(x); }
uint16_t convert(uint16_t x, uint16_t) { return x; }

// Rows [0, count) of `from` into lanes [lane, lane + count) of a panel.
template <class From, class To>
void pack_panel(const From* from, int64_t count, int64_t k, To* panel, int64_t lane) {
    constexpr int64_t kPair = sizeof(To) == 2 ? 2 : 1;
    constexpr int64_t kRun = 16;  // columns at a time: a cache line of each row, and a panel part that stays near
    for (int64_t start = 0; start < k; start += kRun) {
        const int64_t end = std::min(k, start + kRun);
        for (int64_t row = 0; row < count; row++)
            for (int64_t i = start; i < end; i++)
                panel[(i / kPair * kPanel + lane + row) * kPair + i % kPair] = convert(from[row * k + i], To{});
    }
}

}  // namespace

PackedMatrix::PackedMatrix(Number number_, int64_t num_panels_, int64_t k_, bool has_bias)
    : number(number_),
      k(k_),
      num_panels(num_panels_),
      panels(num_panels_ * panel_size() * number_size(number_)),
      bias(has_bias ? num_panels_ * kPanel * 4 : 0) {}

void PackedMatrix::read_row(int64_t output, float* to) const {
    const int64_t at = output / kPanel * panel_size(), lane = output % kPanel;
    if (number == Number::f32) {
        const float* panel = panels.as<float>() + at;
        for (int64_t i = 0; i < k; i++) to[i] = panel[i * kPanel + lane];
    } else {
        const uint16_t* panel = panels.as<uint16_t>() + at;
        for (int64_t i = 0; i < k; i++) to[i] = widen(panel[(i / 2 * kPanel + lane) * 2 + i % 2]);
    }
}

Model::Model(const ModelConfig& config_, Number number_) : config(config_), number(number_) {
    const ModelConfig& c = config;
    const int64_t hidden_panels = padded(c.hidden_size) / kPanel, vocab_panels = padded(c.vocab_size) / kPanel;
    const int64_t inner_panels = padded(c.intermediate_size) / kPanel;
    embedding_ = PackedMatrix(number, vocab_panels, c.hidden_size, false);
    add_matrix("embed", c.vocab_size, embedding_, false);
    if (c.rope_inv_freq.empty()) {
        position_embedding = AlignedBuffer(c.max_position * c.hidden_size * 4);
        add_plain("pos_embed.weight", c.max_position, c.hidden_size, position_embedding);
    }
    if (!c.tied_head) {
        head_ = PackedMatrix(number, vocab_panels, c.hidden_size, false);
        add_matrix("head", c.vocab_size, head_, false);
    }
    add_norm("final_norm", final_norm);
    layers.resize(static_cast<size_t>(c.num_layers));
    for (int64_t i = 0; i < c.num_layers; i++) {
        const std::string name = "layers." + std::to_string(i) + ".";
        Layer& layer = layers[static_cast<size_t>(i)];
        add_norm(name + "attn_norm", layer.attn_norm);
        add_norm(name + "mlp_norm", layer.mlp_norm);
        const int64_t qkv_panels = padded(c.q_size() + 2 * c.kv_size()) / kPanel;
        layer.qkv = PackedMatrix(number, qkv_panels, c.hidden_size, c.qkv_bias);
        add_matrix(name + "q", c.q_size(), layer.qkv, c.qkv_bias);
        add_matrix(name + "k", c.kv_size(), layer.qkv, c.qkv_bias, c.q_size());
        add_matrix(name + "v", c.kv_size(), layer.qkv, c.qkv_bias, c.q_size() + c.kv_size());
        layer.o = PackedMatrix(number, hidden_panels, c.q_size(), c.out_bias);
        add_matrix(name + "o", c.hidden_size, layer.o, c.out_bias);
        const int64_t gated = c.gated_mlp ? 1 : 0;
        layer.up = PackedMatrix(number, inner_panels * (1 + gated), c.hidden_size, c.mlp_bias);
        if (gated) add_matrix(name + "gate", c.intermediate_size, layer.up, c.mlp_bias, 0, 2, 0);
        add_matrix(name + "up", c.intermediate_size, layer.up, c.mlp_bias, 0, 1 + gated, gated);
        layer.down = PackedMatrix(number, hidden_panels, c.intermediate_size, c.mlp_bias);
        add_matrix(name + "down", c.hidden_size, layer.down, c.mlp_bias);
    }
}

void Model::add_matrix(const std::string& name, int64_t rows, PackedMatrix& matrix, bool bias, int64_t offset,
                       int64_t step, int64_t phase) {
    targets_[name + ".weight"] = {rows, matrix.k, &matrix, offset, step, phase, nullptr, false};
    if (bias) targets_[name + ".bias"] = {rows, 1, nullptr, offset, step, phase, &matrix.bias, false};
}

void Model::add_plain(const std::string& name, int64_t rows, int64_t columns, AlignedBuffer& buffer) {
    targets_[name] = {rows, columns, nullptr, 0, 1, 0, &buffer, false};
}

void Model::add_norm(const std::string& name, NormWeights& norm) {
    norm.weight = AlignedBuffer(config.hidden_size * 4);
    add_plain(name + ".weight", config.hidden_size, 1, norm.weight);
    if (!config.norm_bias) return;
    norm.bias = AlignedBuffer(config.hidden_size * 4);
    add_plain(name + ".bias", config.hidden_size, 1, norm.bias);
}

void Model::load(const std::string& name, const void* data, Number from, int64_t rows, int64_t columns,
                 ThreadPool& pool) {
    const auto found = targets_.find(name);
    if (found == targets_.end()) throw std::invalid_argument("the model has no tensor " + name);
    Target& t = found->second;
    if (rows != t.rows || columns != t.columns)
        throw std::invalid_argument(name + " is [" + std::to_string(rows) + ", " + std::to_string(columns) +
                                    "], but must be [" + std::to_string(t.rows) + ", " + std::to_string(t.columns) +
                                    "]");
    // Output o of the matrix is lane o % kPanel of this panel.
    const auto panel_of = [&t](int64_t output) { return output / kPanel * t.step + t.phase; };
    if (t.plain) {
        for (int64_t row = 0; row < rows; row++) {
            const int64_t output = t.offset + row;
            float* to = t.plain->as<float>() + (panel_of(output) * kPanel + output % kPanel) * columns;
            for (int64_t i = 0; i < columns; i++)
                to[i] = from == Number::f32 ? static_cast<const float*>(data)[row * columns + i]
                                            : widen(static_cast<const uint16_t*>(data)[row * columns + i]);
        }
    } else {
        PackedMatrix& m = *t.matrix;
        const int64_t first = t.offset / kPanel, last = (t.offset + rows - 1) / kPanel;
        pool.run(last - first + 1, [&](int64_t piece, int) {
            const int64_t start = std::max(t.offset, (first + piece) * kPanel);
            const int64_t end = std::min(t.offset + rows, (first + piece + 1) * kPanel);
            const int64_t at = panel_of(start) * m.panel_size(), source = (start - t.offset) * columns;
            const auto pack = [&](auto* from_rows, auto* panels) {
                pack_panel(from_rows + source, end - start, columns, panels + at, start % kPanel);
            };
            const auto pack_from = [&](auto* from_rows) {
                if (m.number == Number::f32)
                    pack(from_rows, m.panels.as<float>());
                else
                    pack(from_rows, m.panels.as<uint16_t>());
            };
            if (from == Number::f32)
                pack_from(static_cast<const float*>(data));
            else
                pack_from(static_cast<const uint16_t*>(data));
        });
    }
    t.loaded = true;
}

void Model::check_complete() const {
    for (const auto& [name, target] : targets_)
        if (!target.loaded) throw std::invalid_argument("tensor " + name + " was never loaded");
}

int64_t Model::num_bytes() const {
    const auto matrix = [](const PackedMatrix& m) { return m.panels.num_bytes() + m.bias.num_bytes(); };
    const auto norm = [](const NormWeights& n) { return n.weight.num_bytes() + n.bias.num_bytes(); };
    int64_t sum = matrix(embedding_) + matrix(head_) + position_embedding.num_bytes() + norm(final_norm);
    for (const Layer& l : layers)
        sum += norm(l.attn_norm) + norm(l.mlp_norm) + matrix(l.qkv) + matrix(l.o) + matrix(l.up) + matrix(l.down);
    return sum;
}

void Model::read_embedding(int64_t token, float* to) const { embedding_.read_row(token, to); }

}  // namespace minivllm
