// minivllm._core.Decoder: conversion only.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unordered_map.h>
#include <nanobind/stl/vector.h>

#include <exception>
#include <system_error>

#include "decoder.h"

namespace nb = nanobind;
using namespace minivllm;

namespace {

template <class T, size_t Dimensions>
using ArrayArgument = nb::ndarray<const T, nb::ndim<Dimensions>, nb::c_contig, nb::device::cpu>;

[[noreturn]] void wrong_array(const char* name) {
    throw nb::type_error((std::string(name) + " is not a C-contiguous array of the dtype and rank that minivllm.batch "
                                              "gives for it").c_str());
}

// The array in a field of a Batch or SamplingBatch, without copying: the object keeps it alive during the call.
template <class T, size_t Dimensions = 1>
Array<T> field(nb::handle object, const char* name, int64_t* columns = nullptr) {
    ArrayArgument<T, Dimensions> array;
    if (!nb::try_cast(object.attr(name), array, false)) wrong_array(name);
    if (columns) *columns = static_cast<int64_t>(array.shape(1));
    return {array.data(), static_cast<int64_t>(array.size())};
}

Number number_named(const std::string& name) {
    if (name == "float32") return Number::f32;
    if (name == "bfloat16") return Number::bf16;
    throw nb::value_error(("dtype must be 'float32' or 'bfloat16', not '" + name + "'").c_str());
}

template <class Value>
Value one_of(const std::string& name, std::initializer_list<std::pair<const char*, Value>> choices) {
    for (const auto& [choice, value] : choices)
        if (name == choice) return value;
    throw nb::value_error(("the native decoder has no '" + name + "'").c_str());
}

Format format_named(const std::string& name) {
    return one_of<Format>(name, {{"float32", Format::f32}, {"bfloat16", Format::bf16}, {"int8", Format::int8}, {"int4", Format::int4}});
}

Stored stored_named(const std::string& name) {
    return one_of<Stored>(name, {{"float32", Stored::f32}, {"float16", Stored::f16}, {"bfloat16", Stored::bf16},
                                 {"q4_0", Stored::q4_0}, {"q4_1", Stored::q4_1}, {"q5_0", Stored::q5_0},
                                 {"q5_1", Stored::q5_1}, {"q8_0", Stored::q8_0}, {"q2_k", Stored::q2_k},
                                 {"q3_k", Stored::q3_k}, {"q4_k", Stored::q4_k}, {"q5_k", Stored::q5_k},
                                 {"q6_k", Stored::q6_k}, {"iq4_nl", Stored::iq4_nl}, {"iq4_xs", Stored::iq4_xs}});
}

ModelConfig model_config(nb::handle config) {
    const auto size = [&](const char* name) { return nb::cast<int64_t>(config.attr(name)); };
    const auto flag = [&](const char* name) { return nb::cast<bool>(config.attr(name)); };
    const auto name = [&](const char* field) { return nb::cast<std::string>(config.attr(field)); };
    ModelConfig c;
    c.vocab_size = size("vocab_size");
    c.hidden_size = size("hidden_size");
    c.intermediate_size = size("intermediate_size");
    c.num_layers = size("num_layers");
    c.num_heads = size("num_heads");
    c.num_kv_heads = size("num_kv_heads");
    c.head_dim = size("head_dim");
    c.max_position = size("max_position");
    c.norm = one_of<Norm>(name("norm"), {{"layernorm", Norm::layernorm}, {"rmsnorm", Norm::rmsnorm}});
    c.norm_eps = nb::cast<float>(config.attr("norm_eps"));
    c.norm_bias = flag("norm_bias");
    c.activation = one_of<Activation>(
        name("activation"),
        {{"gelu", Activation::gelu}, {"gelu_tanh", Activation::gelu_tanh}, {"silu", Activation::silu}});
    c.gated_mlp = flag("gated_mlp");
    c.qkv_bias = flag("qkv_bias");
    c.out_bias = flag("out_bias");
    c.mlp_bias = flag("mlp_bias");
    c.tied_head = flag("tied_head");
    if (nb::object frequencies = config.attr("rope_inv_freq"); !frequencies.is_none())
        c.rope_inv_freq = nb::cast<std::vector<float>>(frequencies);
    return c;
}

// A KVPool: its memory, held against the model and its own geometry.
Pool pool_of(nb::handle pool, const ModelConfig& config) {
    const nb::object geometry = pool.attr("geometry");
    Pool result;
    result.format = one_of<CacheFormat>(
        nb::cast<std::string>(geometry.attr("dtype")),
        {{"float32", CacheFormat::f32}, {"bfloat16", CacheFormat::bf16}, {"int8", CacheFormat::int8}});
    const bool quantized = result.format == CacheFormat::int8;
    result.num_blocks = nb::cast<int64_t>(geometry.attr("num_blocks"));
    result.block_size = nb::cast<int64_t>(geometry.attr("block_size"));
    const int64_t shape[6] = {config.num_layers, result.num_blocks, config.num_kv_heads, 2, result.block_size,
                              quantized ? cell_bytes(result.format, config.head_dim) : config.head_dim};
    const auto memory = [&](auto array) {
        if (!nb::try_cast(pool.attr("data"), array, false)) wrong_array("the KV pool's data");
        for (size_t i = 0; i < 6; i++)
            if (static_cast<int64_t>(array.shape(i)) != shape[i])
                throw nb::value_error("the KV pool's shape does not fit the model and its geometry");
        result.data = array.data();
    };
    if (result.format == CacheFormat::f32)
        memory(nb::ndarray<float, nb::ndim<6>, nb::c_contig, nb::device::cpu>());
    else if (quantized)
        memory(nb::ndarray<int8_t, nb::ndim<6>, nb::c_contig, nb::device::cpu>());
    else
        memory(nb::ndarray<uint16_t, nb::ndim<6>, nb::c_contig, nb::device::cpu>());
    return result;
}

Batch batch_of(nb::handle batch) {
    Batch b;
    b.token_ids = field<int32_t>(batch, "token_ids");
    b.positions = field<int32_t>(batch, "positions");
    b.slot_mapping = field<int32_t>(batch, "slot_mapping");
    b.query_start = field<int32_t>(batch, "query_start");
    b.context_lens = field<int32_t>(batch, "context_lens");
    b.block_tables = field<int32_t, 2>(batch, "block_tables", &b.table_width);
    b.logit_rows = field<int32_t>(batch, "logit_rows");
    int64_t columns;
    b.block_copies = field<int32_t, 2>(batch, "block_copies", &columns);
    if (columns != 3) wrong_array("block_copies");
    b.hidden_rows = field<int32_t>(batch, "hidden_rows");
    return b;
}

SamplingBatch sampling_of(nb::handle sampling) {
    SamplingBatch s;
    s.temperature = field<float>(sampling, "temperature");
    s.top_k = field<int32_t>(sampling, "top_k");
    s.top_p = field<float>(sampling, "top_p");
    s.min_p = field<float>(sampling, "min_p");
    s.repetition_penalty = field<float>(sampling, "repetition_penalty");
    s.presence_penalty = field<float>(sampling, "presence_penalty");
    s.frequency_penalty = field<float>(sampling, "frequency_penalty");
    s.seed = field<uint64_t>(sampling, "seed");
    s.choice = field<int32_t>(sampling, "choice");
    s.position = field<int32_t>(sampling, "position");
    s.num_logprobs = field<int32_t>(sampling, "num_logprobs");
    s.given_token_ids = field<int32_t>(sampling, "given_token_ids");
    s.penalty_start = field<int32_t>(sampling, "penalty_start");
    s.penalty_token_ids = field<int32_t>(sampling, "penalty_token_ids");
    s.penalty_counts = field<int32_t>(sampling, "penalty_counts");
    s.bias_start = field<int32_t>(sampling, "bias_start");
    s.bias_token_ids = field<int32_t>(sampling, "bias_token_ids");
    s.bias_values = field<float>(sampling, "bias_values");
    s.mask_row = field<int32_t>(sampling, "mask_row");
    s.masks = field<uint32_t, 2>(sampling, "masks", &s.mask_words);
    return s;
}

// A numpy array that takes over the vector.
template <class T>
nb::object numpy_array(std::vector<T>&& vector, std::initializer_list<size_t> shape) {
    auto* owned = new std::vector<T>(std::move(vector));
    nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return nb::cast(nb::ndarray<nb::numpy, T>(owned->data(), shape, owner));
}

nb::tuple execute(Decoder& decoder, nb::handle batch, nb::handle sampling, nb::handle before_sampling) {
    const Batch b = batch_of(batch);
    const SamplingBatch s = sampling_of(sampling);
    std::function<void()> before;
    if (!before_sampling.is_none())
        before = [&] {
            nb::gil_scoped_acquire acquire;
            before_sampling();
        };
    StepResult result = [&] {
        nb::gil_scoped_release release;
        return decoder.execute(b, s, before);
    }();
    const auto rows = static_cast<size_t>(result.num_rows), top = static_cast<size_t>(result.num_top);
    return nb::make_tuple(
        numpy_array(std::move(result.token_ids), {rows}), numpy_array(std::move(result.logprobs), {rows}),
        numpy_array(std::move(result.ranks), {rows}), numpy_array(std::move(result.top_token_ids), {rows, top}),
        numpy_array(std::move(result.top_logprobs), {rows, top}),
        numpy_array(std::move(result.hidden), {static_cast<size_t>(b.hidden_rows.size),
                                               static_cast<size_t>(decoder.model().config.hidden_size)}));
}

void load(Decoder& decoder, const std::string& name, nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu> data,
          const std::string& dtype) {
    const Stored stored = stored_named(dtype);
    if (data.ndim() < 1 || data.ndim() > 2) wrong_array(name.c_str());
    const auto rows = static_cast<int64_t>(data.shape(0));
    int64_t columns = data.ndim() == 2 ? static_cast<int64_t>(data.shape(1)) : 1;
    if (is_quantized(stored)) {
        const auto [weights, bytes] = block_size(stored);
        if (data.dtype() != nb::dtype<uint8_t>() || data.ndim() != 2 || columns % bytes != 0) wrong_array(name.c_str());
        columns = columns / bytes * weights;
    } else if (static_cast<int64_t>(data.itemsize()) != stored_bytes(stored, 1)) {
        wrong_array(name.c_str());
    }
    nb::gil_scoped_release release;
    decoder.load(name, data.data(), stored, rows, columns);
}

void translate(const std::exception_ptr& exception, void*) {
    try {
        std::rethrow_exception(exception);
    } catch (const std::system_error& error) {  // of the thread pool: the system gives no more threads
        PyErr_SetString(PyExc_OSError, error.what());
    }
}

}  // namespace

void bind_decoder(nb::module_& module) {
    nb::register_exception_translator(translate);
    module.def("supported_isas", &supported_isas,
               "Instruction sets that this build has kernels for and this processor runs, best first.");
    nb::class_<Decoder>(module, "Decoder", "One step of a decoder over a paged KV pool (csrc/decoder.h).")
        .def(
            "__init__",
            [](Decoder* self, nb::handle config, nb::handle pool, const std::string& dtype,
               const std::unordered_map<std::string, std::string>& formats, int num_threads, const std::string& isa) {
                const ModelConfig c = model_config(config);
                std::unordered_map<std::string, Format> packed;
                for (const auto& [name, format] : formats) packed[name] = format_named(format);
                new (self) Decoder(c, pool_of(pool, c), number_named(dtype), packed, num_threads, isa);
            },
            nb::arg("config"), nb::arg("pool"), nb::arg("dtype"), nb::arg("formats"), nb::arg("num_threads"),
            nb::arg("isa"), nb::keep_alive<1, 3>(),
            "ModelConfig, KVPool (written to by every step), dtype of the weights and activations, formats ('float32', "
            "'bfloat16', 'int8', 'int4') of those matrices that have another, threads, instruction set or ''.")
        .def("load", &load, nb::arg("name"), nb::arg("data"), nb::arg("dtype"),
             "Takes a copy of one tensor under its canonical name; data and dtype as in minivllm.models.weights.")
        .def("check_complete", [](const Decoder& self) { self.model().check_complete(); },
             "Raises ValueError if a tensor was never loaded.")
        .def("execute", &execute, nb::arg("batch"), nb::arg("sampling"), nb::arg("before_sampling") = nb::none(),
             "One step: (token_ids, logprobs, ranks, top_token_ids, top_logprobs, hidden). Without the GIL, but for the call of "
             "before_sampling, after which the masks are read.")
        .def_prop_ro("isa", &Decoder::isa)
        .def_prop_ro("num_threads", &Decoder::num_threads)
        .def_prop_ro("model_bytes", [](const Decoder& self) { return self.model().num_bytes(); });
}
