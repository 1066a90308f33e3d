#include "model.h"

#include <algorithm>
#include <stdexcept>

namespace minivllm {

// Formats are declared the most precise first.
PackedMatrix Model::matrix(std::initializer_list<std::string> names, int64_t panels, int64_t k, bool has_bias) const {
    Format format = Format::int4;
    for (const std::string& name : names) {
        const auto found = formats_.find(name + ".weight");
        const Format plain = number == Number::f32 ? Format::f32 : Format::bf16;
        format = std::min(format, found == formats_.end() ? plain : found->second);
    }
    PackedMatrix matrix(format, bf16_tiles_, panels, k);
    if (has_bias) matrix.bias = AlignedBuffer(panels * kPanel * 4);
    return matrix;
}

// In the order in which a step reads them.
template <class Body>
void Model::for_matrices(const Body& body) {
    body(embedding_);
    for (Layer& layer : layers)
        for (PackedMatrix* m : {&layer.qkv, &layer.o, &layer.up, &layer.down}) body(*m);
    body(head_);
}

Model::Model(const ModelConfig& config_, Number number_, const std::unordered_map<std::string, Format>& formats,
             bool bf16_tiles)
    : config(config_), number(number_), formats_(formats), bf16_tiles_(bf16_tiles) {
    const ModelConfig& c = config;
    const int64_t hidden_panels = padded(c.hidden_size) / kPanel, vocab_panels = padded(c.vocab_size) / kPanel;
    const int64_t inner_panels = padded(c.intermediate_size) / kPanel;
    embedding_ = matrix({"embed"}, vocab_panels, c.hidden_size, false);
    add_matrix("embed", c.vocab_size, embedding_, false);
    if (c.rope_inv_freq.empty()) {
        position_embedding = AlignedBuffer(c.max_position * c.hidden_size * 4);
        add_plain("pos_embed.weight", c.max_position, c.hidden_size, position_embedding);
    }
    if (!c.tied_head) {
        head_ = matrix({"head"}, vocab_panels, c.hidden_size, false);
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
        layer.qkv = matrix({name + "q", name + "k", name + "v"}, qkv_panels, c.hidden_size, c.qkv_bias);
        layer.qkv.planes = 2;  // a few channels of their input are far larger than the rest; most of the loss was here
        add_matrix(name + "q", c.q_size(), layer.qkv, c.qkv_bias);
        add_matrix(name + "k", c.kv_size(), layer.qkv, c.qkv_bias, c.q_size());
        add_matrix(name + "v", c.kv_size(), layer.qkv, c.qkv_bias, c.q_size() + c.kv_size());
        layer.o = matrix({name + "o"}, hidden_panels, c.q_size(), c.out_bias);
        add_matrix(name + "o", c.hidden_size, layer.o, c.out_bias);
        const int64_t gated = c.gated_mlp ? 1 : 0;
        layer.up = matrix({name + (gated ? "gate" : "up"), name + "up"}, inner_panels * (1 + gated), c.hidden_size,
                          c.mlp_bias);
        if (gated) add_matrix(name + "gate", c.intermediate_size, layer.up, c.mlp_bias, 0, 2, 0);
        add_matrix(name + "up", c.intermediate_size, layer.up, c.mlp_bias, 0, 1 + gated, gated);
        layer.down = matrix({name + "down"}, hidden_panels, c.intermediate_size, c.mlp_bias);
        add_matrix(name + "down", c.hidden_size, layer.down, c.mlp_bias);
    }
    int64_t bytes = 0;
    for_matrices([&](PackedMatrix& m) { bytes += m.num_bytes(); });
    panels_ = AlignedBuffer(bytes);
    char* at = panels_.as<char>();
    for_matrices([&](PackedMatrix& m) {
        m.place(at);
        at += m.num_bytes();
    });
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

void Model::load(const std::string& name, const void* data, Stored stored, int64_t rows, int64_t columns,
                 ThreadPool& pool) {
    const auto found = targets_.find(name);
    if (found == targets_.end()) throw std::invalid_argument("the model has no tensor " + name);
    Target& t = found->second;
    if (rows != t.rows || columns != t.columns)
        throw std::invalid_argument(name + " is [" + std::to_string(rows) + ", " + std::to_string(columns) +
                                    "], but must be [" + std::to_string(t.rows) + ", " + std::to_string(t.columns) +
                                    "]");
    const char* source = static_cast<const char*>(data);
    const int64_t row_bytes = stored_bytes(stored, columns);
    // Output o of the matrix is lane o % kPanel of this panel.
    const auto panel_of = [&t](int64_t output) { return output / kPanel * t.step + t.phase; };
    if (t.plain) {
        for (int64_t row = 0; row < rows; row++) {
            const int64_t output = t.offset + row;
            float* to = t.plain->as<float>() + (panel_of(output) * kPanel + output % kPanel) * columns;
            for (int64_t i = 0; i < columns; i += kBlock)
                read_stored(stored, source + row * row_bytes, i, std::min(kBlock, columns - i), to + i);
        }
    } else {
        const int64_t first = t.offset / kPanel, last = (t.offset + rows - 1) / kPanel;
        pool.run(last - first + 1, [&](int64_t piece, int) {
            const int64_t start = std::max(t.offset, (first + piece) * kPanel);
            const int64_t end = std::min(t.offset + rows, (first + piece + 1) * kPanel);
            t.matrix->pack(stored, source + (start - t.offset) * row_bytes, panel_of(start), start % kPanel, end - start);
        });
    }
    t.loaded = true;
}

void Model::check_complete() const {
    for (const auto& [name, target] : targets_)
        if (!target.loaded) throw std::invalid_argument("tensor " + name + " was never loaded");
}

int64_t Model::num_bytes() const {
    const auto norm = [](const NormWeights& n) { return n.weight.num_bytes() + n.bias.num_bytes(); };
    int64_t sum = panels_.num_bytes() + position_embedding.num_bytes() + norm(final_norm);
    for (const Layer& l : layers)
        sum += norm(l.attn_norm) + norm(l.mlp_norm) + l.qkv.bias.num_bytes() + l.o.bias.num_bytes() +
               l.up.bias.num_bytes() + l.down.bias.num_bytes();
    return sum;
}

void Model::read_embedding(int64_t token, float* to) const { embedding_.read_row(token, to); }

}  // namespace minivllm
