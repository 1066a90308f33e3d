"""Hugging Face directories: values as saved, settings as transformers understands them, and damaged files."""

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers_models import (
    CONTEXT,
    GPT2_CONFIG,
    HEAD_DIM,
    HIDDEN,
    LAYERS,
    LLAMA_CONFIG,
    VOCAB,
    Tensors,
    assert_prefixes_refused,
    assert_refused,
    assert_same,
    gpt2_tensors,
    llama_tensors,
    load_or_refuse,
    loaded,
    our_llama_name,
    write_hf,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from minivllm.models.registry import load_checkpoint

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def llama(directory: Path, tensors: Tensors | None = None, dtype: str = "float32", **config: Any) -> Path:
    return write_hf(directory, {**LLAMA_CONFIG, **config}, tensors or llama_tensors(), dtype)


def gpt2(directory: Path, tensors: Tensors | None = None, **config: Any) -> Path:
    return write_hf(directory, {**GPT2_CONFIG, **config}, tensors or gpt2_tensors())


def expected_gpt2(tensors: Tensors) -> Tensors:
    """Canonical names and orientation, written out by hand."""
    result = {"embed.weight": tensors["wte.weight"], "pos_embed.weight": tensors["wpe.weight"]}
    for part in ("weight", "bias"):
        result[f"final_norm.{part}"] = tensors[f"ln_f.{part}"]
        for i in range(LAYERS):
            fused = tensors[f"h.{i}.attn.c_attn.{part}"].T
            for j, name in enumerate("qkv"):
                result[f"layers.{i}.{name}.{part}"] = fused[j * HIDDEN : (j + 1) * HIDDEN]
            for theirs, ours in (("attn.c_proj", "o"), ("mlp.c_fc", "up"), ("mlp.c_proj", "down")):
                result[f"layers.{i}.{ours}.{part}"] = tensors[f"h.{i}.{theirs}.{part}"].T
            for theirs, ours in (("ln_1", "attn_norm"), ("ln_2", "mlp_norm")):
                result[f"layers.{i}.{ours}.{part}"] = tensors[f"h.{i}.{theirs}.{part}"]
    return result


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_gpt2(tmp_path: Path, prefix: str) -> None:
    tensors = gpt2_tensors()
    expected = expected_gpt2(tensors)
    mask = np.tril(np.ones((CONTEXT, CONTEXT), bool))[None, None]
    saved = {f"{prefix}{name}": value for name, value in tensors.items()}
    saved |= {f"{prefix}h.0.attn.bias": mask, f"{prefix}h.0.attn.masked_bias": np.float32([-1e4])}
    path = gpt2(tmp_path, saved)
    assert_same(loaded(path), expected)
    config = load_checkpoint(path).config
    assert (config.kind, config.activation, config.norm, config.norm_eps) == (
        "gpt2",
        "gelu_tanh",
        "layernorm",
        1e-5,
    )
    assert (config.intermediate_size, config.head_dim, config.max_position) == (4 * HIDDEN, HEAD_DIM, CONTEXT)
    assert config.tied_head and config.rope_inv_freq is None and config.qkv_bias and config.mlp_bias


def test_gpt2_with_its_own_head(tmp_path: Path) -> None:
    tensors = gpt2_tensors()
    expected = expected_gpt2(tensors)
    expected["head.weight"] = tensors["lm_head.weight"] = tensors["wte.weight"] + 1
    assert_same(loaded(gpt2(tmp_path, tensors, tie_word_embeddings=False)), expected)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_llama(tmp_path: Path, dtype: str) -> None:
    tensors = llama_tensors(tied=False)
    path = llama(tmp_path, tensors, dtype, tie_word_embeddings=False)
    target = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    expected = {
        our_llama_name(name): value.astype(target).astype(np.float32) for name, value in tensors.items()
    }
    assert_same(loaded(path), expected)
    checkpoint = load_checkpoint(path)
    assert checkpoint.dtype == ("float32" if dtype == "float32" else "bfloat16")
    assert {tensor.dtype for tensor in checkpoint.tensors()} == {dtype}
    assert checkpoint.tokenizer is None
    config = checkpoint.config
    assert (config.activation, config.norm, config.norm_eps) == ("silu", "rmsnorm", 1e-5)
    assert (config.num_kv_heads, config.head_dim, config.vocab_size) == (2, HEAD_DIM, VOCAB)
    assert not config.tied_head and config.gated_mlp and not config.qkv_bias


def test_biases(tmp_path: Path) -> None:
    tensors = llama_tensors(all_bias=True)
    path = llama(tmp_path / "llama", tensors, attention_bias=True, mlp_bias=True)
    assert_same(loaded(path), {our_llama_name(name): value for name, value in tensors.items()})
    # Weights that the configuration does not speak of are not passed over.
    assert_refused(llama(tmp_path / "silent", tensors), "bias")
    tensors = llama_tensors(qkv_bias=True)
    path = llama(tmp_path / "qwen2", tensors, model_type="qwen2", sliding_window=16)  # switched off
    assert_same(loaded(path), {our_llama_name(name): value for name, value in tensors.items()})
    config = load_checkpoint(path).config
    assert config.qkv_bias and not config.out_bias and not config.mlp_bias


def test_shards(tmp_path: Path) -> None:
    tensors = llama_tensors()
    llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    names = list(tensors)
    halves = {"model-1.safetensors": names[:7], "model-2.safetensors": names[7:]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    weight_map = {name: file for file, part in halves.items() for name in part}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert_same(loaded(tmp_path), {our_llama_name(name): value for name, value in tensors.items()})

    for bad in ("../model-1.safetensors", "/etc/passwd", "a\0.safetensors", "model-1.bin", 3):
        index.write_text(json.dumps({"weight_map": {**weight_map, names[0]: bad}}))
        assert_refused(tmp_path, "index.json")
    index.write_text(json.dumps({"weight_map": {**weight_map, names[0]: "model-2.safetensors"}}))
    assert_refused(tmp_path, our_llama_name(names[0]), "missing")
    index.write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "model-2.safetensors").unlink()
    assert_refused(tmp_path, "model-2.safetensors")
    index.write_text("{}")
    assert_refused(tmp_path, "weight_map")


def test_pickled_weights_are_refused_with_advice(tmp_path: Path) -> None:
    llama(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert_refused(tmp_path, "pickles", "safetensors")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (2,)),
        ({"eos_token_id": [3, 2]}, (2, 3)),
        ({"eos_token_id": None}, ()),
        ({"eos_token_id": 50256}, ()),  # left over from a larger vocabulary
    ],
)
def test_end_tokens_of_config(tmp_path: Path, config: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert load_checkpoint(llama(tmp_path, **config)).eos_token_ids == expected


def test_end_tokens_of_other_files(tmp_path: Path) -> None:
    llama(tmp_path)
    generation = tmp_path / "generation_config.json"
    generation.write_text('{"eos_token_id": [7, 5]}')
    assert load_checkpoint(tmp_path).eos_token_ids == (5, 7)
    generation.write_text('{"eos_token_id": "two"}')
    assert_refused(tmp_path, "eos_token_id", "two")
    generation.unlink()

    llama(tmp_path, eos_token_id=None)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    (tmp_path / "tokenizer.json").write_text(
        '{"added_tokens": [{"id": 1, "content": "<s>"}, {"id": 9, "content": "</s>"}]}'
    )
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.eos_token_ids == (9,)
    assert checkpoint.tokenizer is not None
    assert (checkpoint.tokenizer.kind, checkpoint.tokenizer.path) == ("hf", tmp_path)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("llama", "model_type", "mamba"),
        ("llama", "hidden_act", "relu"),
        ("llama", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("llama", "rope_scaling", {"type": "dynamic", "factor": 4.0}),
        ("llama", "rope_parameters", {"rope_type": "longrope"}),
        ("llama", "rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        ("llama", "rope_scaling", {**LLAMA3, "high_freq_factor": 1.0}),
        ("llama", "rope_scaling", {"type": "linear", "factor": 0}),
        ("llama", "rope_scaling", {"type": "linear"}),
        ("llama", "rope_scaling", [1]),
        ("llama", "rope_theta", -1),
        ("llama", "rope_theta", 10**400),
        ("llama", "rope_theta", 1e-300),
        ("llama", "rope_scaling", {"type": "linear", "factor": 1e-300}),
        ("llama", "rope_scaling", {**LLAMA3, "factor": 1e-300}),
        ("llama", "partial_rotary_factor", 0.5),
        ("llama", "sliding_window", 64),
        ("mistral", "sliding_window", 64),
        ("llama", "layer_types", ["sliding_attention"] * LAYERS),
        ("llama", "quantization_config", {"quant_method": "gptq"}),
        ("llama", "logits_scaling", 8.0),
        ("llama", "num_local_experts", 8),
        ("llama", "head_dim", 15),
        ("llama", "head_dim", 2**40),
        ("llama", "head_dim", 32),
        ("llama", "num_attention_heads", 0),
        ("llama", "num_attention_heads", 3),
        ("llama", "num_key_value_heads", 3),
        ("llama", "num_hidden_layers", 10**9),
        ("llama", "num_hidden_layers", LAYERS + 1),
        ("llama", "num_hidden_layers", LAYERS - 1),
        ("llama", "vocab_size", VOCAB - 1),
        ("llama", "vocab_size", -1),
        ("llama", "hidden_size", "64"),
        ("llama", "hidden_size", True),
        ("llama", "hidden_size", None),
        ("llama", "rms_norm_eps", "tiny"),
        ("llama", "attention_bias", True),
        ("llama", "mlp_bias", True),
        ("llama", "tie_word_embeddings", False),
        ("gpt2", "activation_function", "relu"),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("gpt2", "scale_attn_weights", False),
        ("gpt2", "add_cross_attention", True),
        ("gpt2", "n_head", 7),
        ("gpt2", "n_head", 0),
        ("gpt2", "n_inner", 128),
        ("gpt2", "n_positions", CONTEXT * 2),
        ("gpt2", "tie_word_embeddings", False),
    ],
)
def test_what_changes_the_arithmetic_or_contradicts_the_tensors_is_refused(
    tmp_path: Path, kind: str, field: str, value: Any
) -> None:
    if kind == "gpt2":
        path = gpt2(tmp_path, **{field: value})
    else:
        tensors = llama_tensors(qkv_bias=kind == "qwen2")
        path = llama(tmp_path, tensors, **{"model_type": kind, field: value})
    assert_refused(path)


def test_rotary_base_out_of_all_proportion_means_slow_rotation(tmp_path: Path) -> None:
    frequencies = load_checkpoint(llama(tmp_path, rope_theta=1e300)).config.rope_inv_freq
    assert frequencies is not None and frequencies[0] == 1.0 and set(frequencies[2:]) == {0.0}


def test_qwen2_windows_count_where_they_are_switched_on(tmp_path: Path) -> None:
    tensors = llama_tensors(qkv_bias=True)
    settings = {"model_type": "qwen2", "sliding_window": CONTEXT // 2}
    assert_refused(llama(tmp_path, tensors, **settings, use_sliding_window=True), "sliding_window")
    assert load_checkpoint(llama(tmp_path, tensors, **settings, use_sliding_window=False))
    assert load_checkpoint(llama(tmp_path, tensors, **settings))


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("quantization_config", {"quant_method": "gptq"}, "gptq"),
        ("hidden_act", "relu", "relu"),
        ("sliding_window", 64, "64"),
        ("model_type", "mamba", "llama"),
    ],
)
def test_refusals_name_the_field_and_its_value(tmp_path: Path, field: str, value: Any, word: str) -> None:
    assert_refused(llama(tmp_path, **{field: value}), field, word)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "mistral"},  # the default, 4096, is longer than the context
        {"sliding_window": CONTEXT},
        {"layer_types": ["full_attention"] * LAYERS},
        {"rope_interleaved": False, "is_llama_config": True, "pretraining_tp": 1},
        {"partial_rotary_factor": 1.0, "quantization_config": None},
        {"hidden_act": "gelu_pytorch_tanh"},
        {"num_key_value_heads": 2, "head_dim": HEAD_DIM},
    ],
)
def test_harmless_settings_are_accepted(tmp_path: Path, config: dict[str, Any]) -> None:
    assert len(loaded(llama(tmp_path, **config))) == 2 + 9 * LAYERS


@pytest.mark.transformers
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 10000.0},
        {"rope_theta": 500000},
        {"rope_theta": 100000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
        {
            "rope_theta": 500000.0,
            "rope_scaling": {**LLAMA3, "factor": 32, "original_max_position_embeddings": 8192},
        },
        {"rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
    ],
)
def test_frequencies_are_those_of_transformers(tmp_path: Path, rope: dict[str, Any], head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    tensors = llama_tensors()
    for name, value in tensors.items():
        if any(projection in name for projection in ("q_proj", "k_proj", "v_proj")):
            tensors[name] = np.resize(value, (value.shape[0] // HEAD_DIM * head_dim, HIDDEN))
        if "o_proj" in name:
            tensors[name] = np.resize(value, (HIDDEN, 4 * head_dim))
    config = {**LLAMA_CONFIG, "head_dim": head_dim, **rope}
    if "rope_parameters" in rope:
        del config["rope_theta"]
    path = write_hf(tmp_path, config, tensors)
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(path)).inv_freq.numpy()
    ours = np.array(load_checkpoint(path).config.rope_inv_freq, np.float32)
    # torch's power is within one unit in the last place of the true one, to which ours is rounded.
    np.testing.assert_allclose(ours, theirs, rtol=3e-7, atol=0)


def test_missing_extra_and_misshapen_tensors(tmp_path: Path) -> None:
    tensors = llama_tensors()
    without = {name: value for name, value in tensors.items() if name != "model.norm.weight"}
    assert_refused(llama(tmp_path, without), "final_norm.weight", "missing")
    extra = {**tensors, "model.layers.0.self_attn.q_norm.weight": np.ones(HEAD_DIM, np.float32)}
    assert_refused(llama(tmp_path, extra), "q_norm")
    wrong = {**tensors, "model.norm.weight": np.ones(HIDDEN + 1, np.float32)}
    assert_refused(llama(tmp_path, wrong), "final_norm.weight", str(HIDDEN + 1))
    integers = {**tensors, "model.norm.weight": np.ones(HIDDEN, np.int64)}
    assert_refused(llama(tmp_path, integers), "I64")
    fused = {**gpt2_tensors(), "h.1.attn.c_attn.weight": np.ones((HIDDEN, 2 * HIDDEN), np.float32)}
    assert_refused(gpt2(tmp_path / "gpt2", fused), "c_attn", str(3 * HIDDEN))


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{", "{}", '{"model_type": 3}', "[" * 100_000, "\xff", '{"a": 1, "a": 2}']
)
def test_config_that_is_no_config(tmp_path: Path, text: str) -> None:
    llama(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    assert_refused(tmp_path, "config.json")


def raw_safetensors(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        raw_safetensors(b"{}", length=2**63),
        raw_safetensors(b"{}", length=3),
        raw_safetensors(b"not json"),
        raw_safetensors(b"[1]"),
        raw_safetensors(b"{}", b"left over"),
        *(
            raw_safetensors(json.dumps({"t": bad}).encode(), bytes(8))
            for bad in (
                3,
                {},
                entry(dtype="F8_E5M2"),
                entry(dtype=["F32"]),
                entry(shape=[3]),
                entry(shape=[-2]),
                entry(shape=[2.0]),
                entry(shape=[2**40, 2**40]),
                entry(shape="2"),
                entry(shape=[1] * 100),
                entry(offsets=[0, 2**60]),
                entry(offsets=[8, 0]),
                entry(offsets=[-8, 0]),
                entry(offsets=[4, 12]),
                entry(offsets=[0]),
                entry(offsets=None),
            )
        ),
        raw_safetensors(json.dumps({"a": entry(), "b": entry()}).encode(), bytes(8)),  # overlap
        raw_safetensors(json.dumps({"a": entry(), "b": entry(offsets=[9, 17])}).encode(), bytes(17)),  # hole
    ],
)
def test_lying_safetensors_headers(tmp_path: Path, content: bytes) -> None:
    llama(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    assert_refused(tmp_path, "model.safetensors")


def test_tensors_at_odd_addresses_come_aligned(tmp_path: Path) -> None:
    llama(tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    length = struct.unpack_from("<Q", content)[0]
    shifted = content[8 : 8 + length] + b" " * 3
    expected = loaded(tmp_path)
    file.write_bytes(raw_safetensors(shifted, content[8 + length :]))
    assert_same(loaded(tmp_path), expected)  # which asserts the alignment of each


def test_truncated_anywhere(tmp_path: Path) -> None:
    path = gpt2(tmp_path)
    file = path / "model.safetensors"
    header = 8 + struct.unpack_from("<Q", file.read_bytes())[0]
    assert_prefixes_refused(file, header, lambda: load_checkpoint(path))
    config = path / "config.json"
    assert_prefixes_refused(config, config.stat().st_size, lambda: load_checkpoint(path))


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, int]:
    path = llama(tmp_path_factory.mktemp("hf"))
    content = (path / "model.safetensors").read_bytes()
    return path, content, 8 + struct.unpack_from("<Q", content)[0]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_flipped_bits_give_a_model_or_a_model_error(
    damaged: tuple[Path, bytes, int], data: st.DataObject
) -> None:
    path, whole, header = damaged
    broken = bytearray(whole)
    for bit in data.draw(st.lists(st.integers(0, header * 8 - 1), min_size=1, max_size=4)):
        broken[bit // 8] ^= 1 << bit % 8
    (path / "model.safetensors").write_bytes(broken)
    load_or_refuse(lambda: loaded(path))
