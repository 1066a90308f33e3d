// The whole decoder on a tiny random model, so that the sanitizers see every read and write of a step; and its
// answer bit for bit the same for every ISA whatever the number of threads, the chunk and the block size. (That the answer is the
// right one is shown in tests/test_native_executor.py.)
#include "decoder.h"

#include <random>
#include <stdexcept>

#include "check.h"

using namespace minivllm;

namespace {

ModelConfig llama_like() {
    return {101, 30, 50, 2, 6, 2, 10, 700, Norm::rmsnorm, 1e-5f, false, Activation::silu, true, false, false, false,
            true, {1, .3f, .1f, .03f, .01f}};
}

ModelConfig gpt_like() {
    return {101, 30, 50, 2, 3, 3, 10, 700, Norm::layernorm, 1e-5f, true, Activation::gelu, false, true, true, true,
            false, {}};
}

// The sequence of one batch row, over a pool of exactly the bytes it may touch.
struct Run {
    std::vector<char> memory;
    std::vector<int32_t> table;
    int64_t block_size;
    Decoder decoder;

    Run(const ModelConfig& c, Number number, CacheFormat cache, const std::string& isa, int threads, int64_t block_size_,
        int64_t tokens)
        : memory(static_cast<size_t>(c.num_layers * 2 * blocks(tokens, block_size_) * block_size_ * c.num_kv_heads *
                                     cell_bytes(cache, c.head_dim))),
          block_size(block_size_),
          decoder(c, {memory.data(), cache, blocks(tokens, block_size_), block_size_}, number, {}, threads, isa) {
        for (auto i = static_cast<int32_t>(blocks(tokens, block_size)); i-- > 0;) table.push_back(i);
        std::mt19937 generator(1);
        std::normal_distribution<float> normal(0, .3f);
        const auto load = [&](const std::string& name, int64_t rows, int64_t columns) {
            std::vector<float> values(static_cast<size_t>(rows * columns));
            for (float& value : values) value = normal(generator);
            decoder.load(name, values.data(), minivllm::Stored::f32, rows, columns);
        };
        const auto linear = [&](const std::string& name, int64_t rows, int64_t columns, bool bias) {
            load(name + ".weight", rows, columns);
            if (bias) load(name + ".bias", rows, 1);
        };
        CHECK_THROWS(std::invalid_argument, "the model has no tensor nonsense", load("nonsense", 1, 1));
        CHECK_THROWS(std::invalid_argument, "embed.weight is [1, 30], but must be [101, 30]",
                     load("embed.weight", 1, 30));
        linear("embed", c.vocab_size, c.hidden_size, false);
        if (c.rope_inv_freq.empty()) load("pos_embed.weight", c.max_position, c.hidden_size);
        if (!c.tied_head) linear("head", c.vocab_size, c.hidden_size, false);
        for (int64_t i = 0; i < c.num_layers; i++) {
            const std::string layer = "layers." + std::to_string(i) + ".";
            for (const char* name : {"attn_norm", "mlp_norm"}) linear(layer + name, c.hidden_size, 1, c.norm_bias);
            linear(layer + "q", c.q_size(), c.hidden_size, c.qkv_bias);
            linear(layer + "k", c.kv_size(), c.hidden_size, c.qkv_bias);
            linear(layer + "v", c.kv_size(), c.hidden_size, c.qkv_bias);
            linear(layer + "o", c.hidden_size, c.q_size(), c.out_bias);
            if (c.gated_mlp) linear(layer + "gate", c.intermediate_size, c.hidden_size, c.mlp_bias);
            linear(layer + "up", c.intermediate_size, c.hidden_size, c.mlp_bias);
            linear(layer + "down", c.hidden_size, c.intermediate_size, c.mlp_bias);
        }
        load("final_norm.weight", c.hidden_size, 1);
        if (c.norm_bias) {
            CHECK_THROWS(std::invalid_argument, "tensor final_norm.bias was never loaded",
                         decoder.model().check_complete());
            load("final_norm.bias", c.hidden_size, 1);
        }
        decoder.model().check_complete();
    }

    static int64_t blocks(int64_t tokens, int64_t block_size) { return (tokens + block_size - 1) / block_size; }

    // Computes `tokens` in chunks; the logprobs of the five likeliest that follow the last, and its hidden state.
    std::vector<float> last_row(const std::vector<int32_t>& tokens, size_t chunk) {
        std::vector<float> found;
        for (size_t start = 0; start < tokens.size(); start += chunk) {
            const size_t end = std::min(tokens.size(), start + chunk);
            std::vector<int32_t> ids(tokens.begin() + static_cast<std::ptrdiff_t>(start),
                                     tokens.begin() + static_cast<std::ptrdiff_t>(end));
            std::vector<int32_t> positions, slots;
            for (size_t p = start; p < end; p++) {
                const auto position = static_cast<int64_t>(p);
                const int64_t block = table[static_cast<size_t>(position / block_size)];
                positions.push_back(static_cast<int32_t>(p));
                slots.push_back(static_cast<int32_t>(block * block_size + position % block_size));
            }
            const std::vector<int32_t> query_start = {0, static_cast<int32_t>(ids.size())};
            const std::vector<int32_t> context = {static_cast<int32_t>(end)};
            const std::vector<int32_t> last = {static_cast<int32_t>(ids.size()) - 1}, none, zero = {0}, starts = {0, 0};
            const std::vector<int32_t> five = {5}, minus_one = {-1};
            const std::vector<float> cold = {0}, one = {1}, no_bias;
            const std::vector<uint64_t> seed = {0};
            const auto array = [](const auto& v) {
                return Array<std::decay_t<decltype(v[0])>>{v.data(), static_cast<int64_t>(v.size())};
            };
            const Batch batch{array(ids),   array(positions), array(slots), array(query_start), array(context),
                              array(table), static_cast<int64_t>(table.size()), array(last), array(none), array(last)};
            const SamplingBatch sampling{array(cold), array(zero), array(one),  array(cold),   array(one),    array(cold),
                                         array(cold), array(seed), array(zero), array(zero),   array(five),   array(minus_one),
                                         array(starts), array(none), array(none), array(starts), array(none),
                                         array(no_bias), array(minus_one), {nullptr, 0}, 0};
            const StepResult result = decoder.execute(batch, sampling);
            found = result.top_logprobs;
            found.insert(found.end(), result.hidden.begin(), result.hidden.end());
        }
        return found;
    }
};

void test_model(const ModelConfig& config, const std::string& isa, Number number, CacheFormat cache) {
    std::vector<int32_t> tokens;
    for (int32_t i = 0; i < 530; i++) tokens.push_back(i * 37 % 101);  // into the second split of the context
    const auto length = static_cast<int64_t>(tokens.size());
    const std::vector<float> expected = Run(config, number, cache, isa, 1, length, length).last_row(tokens, 530);
    CHECK(expected.size() == 5 + static_cast<size_t>(config.hidden_size) && expected[0] < 0 && expected[0] >= expected[4]);
    CHECK(Run(config, number, cache, isa, 3, 1, length).last_row(tokens, 101) == expected);
    CHECK(Run(config, number, cache, isa, 2, 16, length).last_row(tokens, 529) == expected);
}

}  // namespace

int main() {
    for (const std::string& isa : supported_isas())
        for (const ModelConfig& config : {llama_like(), gpt_like()}) {
            test_model(config, isa, Number::f32, CacheFormat::f32);
            test_model(config, isa, Number::bf16, CacheFormat::bf16);
            test_model(config, isa, Number::bf16, CacheFormat::int8);
        }
    return check::report();
}
