// Model: the shape of a decoder and its packed weights. Knows nothing of steps, batches or caches.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "packed_matrix.h"
#include "thread_pool.h"

namespace minivllm {

// The fields of minivllm.models.config.ModelConfig, which says what they mean and has checked them.
struct ModelConfig {
    int64_t vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim, max_position;
    Norm norm;
    float norm_eps;
    bool norm_bias;
    Activation activation;
    bool gated_mlp, qkv_bias, out_bias, mlp_bias, tied_head;
    std::vector<float> rope_inv_freq;  // empty: learned positions

    int64_t q_size() const { return num_heads * head_dim; }
    int64_t kv_size() const { return num_kv_heads * head_dim; }
};

inline int64_t number_size(Number number) { return number == Number::f32 ? 4 : 2; }

struct NormWeights {
    AlignedBuffer weight, bias;  // float32
};

struct Layer {
    NormWeights attn_norm, mlp_norm;
    PackedMatrix qkv;   // outputs of q, k and v one after the other
    PackedMatrix o;
    PackedMatrix up;    // gated: a panel of gate, then the panel of up beside it, and so on
    PackedMatrix down;
};

class Model {
public:
    // Matrices ("….weight") have the format that `formats` has for them, else the one of `number`; those that are packed
    // together (q, k and v; gate and up) the most precise of theirs.
    Model(const ModelConfig& config, Number number, const std::unordered_map<std::string, Format>& formats,
          bool bf16_tiles);

    // One tensor under its canonical name, row-major [rows, columns]; a vector has one column. Matrices are packed
    // (packed_matrix.h), norms, biases and learned positions kept in float32. Throws std::invalid_argument for an
    // unknown name or another shape.
    void load(const std::string& name, const void* data, Stored stored, int64_t rows, int64_t columns,
              ThreadPool& pool);
    // Throws std::invalid_argument if a tensor was never loaded.
    void check_complete() const;

    int64_t num_bytes() const;

    // The embedding of a token, [hidden].
    void read_embedding(int64_t token, float* to) const;
    const PackedMatrix& head() const { return config.tied_head ? embedding_ : head_; }

    const ModelConfig config;
    const Number number;
    std::vector<Layer> layers;
    NormWeights final_norm;
    AlignedBuffer position_embedding;  // float32 [max_position, hidden]; empty with rotary positions

private:
    // Where a tensor goes: output r of it is output (offset + r) of the matrix, whose panel p is at step · p + phase;
    // or, without a matrix, plain float32.
    struct Target {
        int64_t rows, columns;
        PackedMatrix* matrix;
        int64_t offset, step, phase;
        AlignedBuffer* plain;
        bool loaded;
    };

    PackedMatrix matrix(std::initializer_list<std::string> names, int64_t panels, int64_t k, bool has_bias) const;
    template <class Body>
    void for_matrices(const Body& body);
    void add_matrix(const std::string& name, int64_t rows, PackedMatrix& matrix, bool bias, int64_t offset = 0,
                    int64_t step = 1, int64_t phase = 0);
    void add_plain(const std::string& name, int64_t rows, int64_t columns, AlignedBuffer& buffer);
    void add_norm(const std::string& name, NormWeights& norm);

    PackedMatrix embedding_;            // packed also when it is not the head: rows are few, and the code is one
    PackedMatrix head_;
    std::unordered_map<std::string, Target> targets_;
    const std::unordered_map<std::string, Format> formats_;
    const bool bf16_tiles_;
    AlignedBuffer panels_;  // of all matrices
};

}  // namespace minivllm
