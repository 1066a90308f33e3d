"""GGUF: values against the ``gguf`` package's own quantisation, and files that lie or are damaged."""

import struct
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from helpers_models import (
    CONTEXT,
    HEAD_DIM,
    HIDDEN,
    VOCAB,
    assert_prefixes_refused,
    assert_refused,
    assert_same,
    gguf_pairs,
    llama_tensors,
    load_or_refuse,
    loaded,
    our_llama_name,
    wide_llama,
    write_gguf,
)
from helpers_quants import HALVES, random_blocks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minivllm.models.gguf_reader import read_gguf
from minivllm.models.quants import BLOCKS, BlockType, bfloat16_to_float32, dequantize
from minivllm.models.registry import load_checkpoint

QUANTIZATIONS = [Q.F32, Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0]


@pytest.mark.parametrize("name", BLOCKS)
def test_dequantize_agrees_with_the_gguf_package(name: BlockType) -> None:
    kind = Q[name.upper()]
    weights, size = BLOCKS[name]
    assert (weights, size) == gguf.GGML_QUANT_SIZES[kind]
    data = random_blocks(np.random.default_rng(1), kind, (7, 3 * weights))
    actual = dequantize(data, name)
    assert actual.shape == (7, 3 * weights) and actual.dtype == np.float32
    np.testing.assert_array_equal(actual, gguf.quants.dequantize(data, kind))


@pytest.mark.parametrize("name", BLOCKS)
def test_damaged_scales_make_weights_that_are_no_numbers(name: BlockType) -> None:
    block = np.full((1, BLOCKS[name][1]), 0xFF, np.uint8)  # float16 NaN
    block[0, [1, -1]] = 0x7C  # with the byte before it: infinity, or NaN
    assert not np.isfinite(dequantize(block, name)).all()


def test_bfloat16_is_the_upper_half_of_float32() -> None:
    bits = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    expected = bits.view(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(bfloat16_to_float32(bits), expected)


def expected_values(tensors: dict[str, Any], quantization: Q) -> dict[str, Any]:
    """What the tensors are once quantised and back; permuting rows does not change a row."""
    result = {}
    for name, value in tensors.items():
        if value.ndim == 2 and quantization != Q.F32:
            value = gguf.quants.dequantize(gguf.quants.quantize(value, quantization), quantization)
        result[our_llama_name(name)] = value
    return result


@pytest.mark.parametrize("quantization", QUANTIZATIONS, ids=lambda q: q.name)
def test_every_type_gives_the_exact_values_in_our_order(tmp_path: Path, quantization: Q) -> None:
    tensors = llama_tensors(tied=False)
    path = write_gguf(tmp_path / "m.gguf", tensors, quantization=quantization)
    assert_same(loaded(path), expected_values(tensors, quantization))
    checkpoint = load_checkpoint(path)
    assert checkpoint.dtype == ("float32" if quantization == Q.F32 else "bfloat16")
    assert not checkpoint.config.tied_head
    assert checkpoint.eos_token_ids == (2,)
    stored = {tensor.name: tensor.dtype for tensor in checkpoint.tensors()}
    names = {Q.F32: "float32", Q.F16: "float16", Q.BF16: "bfloat16"}
    assert stored["layers.0.q.weight"] == names.get(quantization, quantization.name.lower())
    assert stored["final_norm.weight"] == "float32"


def test_config_and_tokenizer(tmp_path: Path) -> None:
    metadata = {"tokenizer.chat_template": "{{ x }}", "general.name": "m"}
    checkpoint = load_checkpoint(write_gguf(tmp_path / "m.gguf", llama_tensors(), metadata=metadata))
    config = checkpoint.config
    assert (config.kind, config.vocab_size, config.max_position) == ("llama", VOCAB, CONTEXT)
    assert (
        config.tied_head and config.gated_mlp and not (config.qkv_bias or config.out_bias or config.mlp_bias)
    )
    assert config.norm_eps == pytest.approx(1e-5, rel=1e-6)
    assert checkpoint.tokenizer is not None and checkpoint.tokenizer.kind == "gguf"
    assert checkpoint.tokenizer.data is not None
    assert checkpoint.tokenizer.data["tokenizer.ggml.tokens"] == [f"t{i}" for i in range(VOCAB)]
    assert checkpoint.tokenizer.data["tokenizer.chat_template"] == "{{ x }}"
    assert "general.name" not in checkpoint.tokenizer.data


def test_qwen2_keeps_its_rows_and_has_biases(tmp_path: Path) -> None:
    tensors = llama_tensors(qkv_bias=True)
    path = write_gguf(tmp_path / "m.gguf", tensors, kind="qwen2")
    assert_same(loaded(path), {our_llama_name(name): value for name, value in tensors.items()})
    config = load_checkpoint(path).config
    assert config.kind == "qwen2" and config.qkv_bias and not config.out_bias


def test_llama_biases_are_permuted_too(tmp_path: Path) -> None:
    tensors = llama_tensors(all_bias=True)
    path = write_gguf(tmp_path / "m.gguf", tensors)
    assert_same(loaded(path), {our_llama_name(name): value for name, value in tensors.items()})


def test_pairs_rotated_together_end_up_half_a_head_apart() -> None:
    rows = np.arange(2 * HEAD_DIM)[:, None]
    pairs = gguf_pairs(rows, 2)
    assert pairs[0, 0] == 0 and pairs[1, 0] == HEAD_DIM // 2 and pairs[HEAD_DIM, 0] == HEAD_DIM


def test_rows_beyond_the_tokens_are_cut(tmp_path: Path) -> None:
    tensors = llama_tensors(tied=False)
    metadata = {"tokenizer.ggml.tokens": [f"t{i}" for i in range(33)], "tokenizer.ggml.token_type": [1] * 33}
    path = write_gguf(tmp_path / "m.gguf", tensors, metadata=metadata, quantization=Q.Q8_0)
    expected = expected_values(tensors, Q.Q8_0)
    for name in ("embed.weight", "head.weight"):
        expected[name] = expected[name][:33]
    assert_same(loaded(path), expected)
    too_many = {"tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCAB + 1)]}
    assert_refused(
        write_gguf(tmp_path / "n.gguf", tensors, metadata=too_many), "embed.weight", str(VOCAB + 1)
    )


def test_end_of_turn_tokens_are_end_tokens(tmp_path: Path) -> None:
    tokens, types = [f"t{i}" for i in range(VOCAB)], [1] * VOCAB
    tokens[7], types[7] = "<|im_end|>", 3
    tokens[8], types[8] = "<|eot_id|>", 1  # ordinary text that looks like one
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.eot_token_id": 9,
    }
    checkpoint = load_checkpoint(write_gguf(tmp_path / "m.gguf", llama_tensors(), metadata=metadata))
    assert checkpoint.eos_token_ids == (2, 7, 9)
    metadata["tokenizer.ggml.eot_token_id"] = VOCAB
    assert_refused(write_gguf(tmp_path / "n.gguf", llama_tensors(), metadata=metadata), str(VOCAB))


def test_rope_scaling(tmp_path: Path) -> None:
    plain = load_checkpoint(write_gguf(tmp_path / "a.gguf", llama_tensors())).config.rope_inv_freq
    exponents = np.arange(0, HEAD_DIM, 2) / HEAD_DIM
    np.testing.assert_allclose(plain, 10000.0**-exponents, rtol=2e-7)

    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    scaled = load_checkpoint(write_gguf(tmp_path / "b.gguf", llama_tensors(), metadata=linear))
    assert plain is not None
    assert scaled.config.rope_inv_freq == tuple(value / 4 for value in plain)

    factors = np.linspace(1, 8, HEAD_DIM // 2).astype(np.float32)
    path = write_gguf(tmp_path / "c.gguf", llama_tensors(), more={"rope_freqs.weight": factors})
    expected = np.array(plain, np.float32) / factors
    np.testing.assert_array_equal(load_checkpoint(path).config.rope_inv_freq, expected)
    factors[3] = 0
    assert_refused(
        write_gguf(tmp_path / "d.gguf", llama_tensors(), more={"rope_freqs.weight": factors}), "rope_freqs"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.expert_count", 8),
        ("llama.rope.scaling.type", "yarn"),
        ("llama.attention.sliding_window", 4096),
        ("llama.attention.causal", False),
        ("llama.rope.dimension_count", HEAD_DIM // 2),
        ("llama.attention.value_length", HEAD_DIM * 2),
        ("llama.logit_scale", 0.5),
        ("llama.some.new.field", 1),
        ("general.architecture", "mamba"),
        ("llama.attention.head_count", "four"),
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count_kv", 3),
        ("llama.block_count", 0),
        ("llama.block_count", 3),
        ("llama.block_count", 2**31),
        ("llama.block_count", None),
        ("llama.context_length", None),
        ("llama.embedding_length", 32),
        ("llama.attention.key_length", 2**30),
        ("llama.attention.layer_norm_rms_epsilon", float("nan")),
        ("llama.rope.freq_base", -1.0),
        ("split.count", 2),
    ],
)
def test_what_is_not_implemented_or_contradicts_the_tensors_is_refused(
    tmp_path: Path, key: str, value: Any
) -> None:
    if key == "general.architecture":
        path = write_gguf(tmp_path / "m.gguf", llama_tensors(), kind=value)
    else:
        path = write_gguf(tmp_path / "m.gguf", llama_tensors(), metadata={key: value})
    assert_refused(path)


def test_refusals_name_the_field_and_its_value(tmp_path: Path) -> None:
    for key, value in (("llama.expert_count", 8), ("llama.rope.scaling.type", "yarn")):
        assert_refused(
            write_gguf(tmp_path / "m.gguf", llama_tensors(), metadata={key: value}), key, str(value)
        )


def test_missing_extra_and_misshapen_tensors(tmp_path: Path) -> None:
    tensors = llama_tensors()
    missing = {name: value for name, value in tensors.items() if "layers.1.mlp.up_proj" not in name}
    assert_refused(write_gguf(tmp_path / "m.gguf", missing), "layers.1.up.weight", "missing")
    extra = {"blk.0.attn_q_norm.weight": np.ones(HEAD_DIM, np.float32)}
    assert_refused(write_gguf(tmp_path / "m.gguf", tensors, more=extra), "attn_q_norm")
    tensors["model.layers.0.self_attn.q_proj.weight"] = np.ones((HIDDEN // 2, HIDDEN), np.float32)
    assert_refused(
        write_gguf(tmp_path / "m.gguf", tensors), "layers.0.q.weight", f"[{HIDDEN // 2}, {HIDDEN}]"
    )


def write_one(path: Path, data: np.ndarray[Any, Any], kind: Q) -> Path:
    """A GGUF with one tensor "t", of these bytes."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_other_tensor_types_are_refused_by_name(tmp_path: Path) -> None:
    assert_refused(write_one(tmp_path / "m.gguf", np.zeros((5, 292), np.uint8), Q.Q8_K), "Q8_K", "Q4_1")


@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_blocks_are_kept_as_they_are(kind: Q, tmp_path: Path) -> None:
    data = random_blocks(np.random.default_rng(0), kind, (5, 512))
    file = read_gguf(write_one(tmp_path / "m.gguf", data, kind))
    tensor = file.tensors["t"]
    assert (tensor.shape, tensor.dtype, file.all_float32) == ((5, 512), kind.name.lower(), False)
    np.testing.assert_array_equal(tensor.read(), data)


@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_rows_that_are_not_whole_blocks_are_refused(kind: Q, tmp_path: Path) -> None:
    path = write_one(tmp_path / "m.gguf", random_blocks(np.random.default_rng(0), kind, (5, 512)), kind)
    whole, odd = struct.pack("<IQQ", 2, 512, 5), struct.pack("<IQQ", 2, 500, 5)
    assert path.read_bytes().count(whole) == 1
    path.write_bytes(path.read_bytes().replace(whole, odd))
    assert_refused(path, "[5, 500]", kind.name, f"blocks of {gguf.GGML_QUANT_SIZES[kind][0]}")


@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_a_llama_of_any_blocks(kind: Q, tmp_path: Path) -> None:
    """Its values are those that the package reads from the file; q's and k's rows are in our order."""
    tensors, metadata = wide_llama(8)
    path = write_gguf(tmp_path / "m.gguf", tensors, quantization=kind, metadata=metadata)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    actual = loaded(path)
    for name, theirs_name in (("embed", "token_embd"), ("layers.1.down", "blk.1.ffn_down")):
        expected = theirs[f"{theirs_name}.weight"]
        values = gguf.quants.dequantize(expected.data, expected.tensor_type)
        np.testing.assert_array_equal(actual[f"{name}.weight"], values)
    q = gguf.quants.dequantize(theirs["blk.0.attn_q.weight"].data, kind)
    np.testing.assert_array_equal(gguf_pairs(actual["layers.0.q.weight"], 4), q)


@pytest.fixture
def small_gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "m.gguf", llama_tensors(), quantization=Q.Q4_1)


def header_size(path: Path) -> int:
    return min(tensor.data_offset for tensor in gguf.GGUFReader(path).tensors)


def test_truncated_anywhere(small_gguf: Path) -> None:
    assert_prefixes_refused(small_gguf, header_size(small_gguf), lambda: load_checkpoint(small_gguf))


@pytest.mark.parametrize(
    ("offset", "value", "words"),
    [
        (0, b"GGML", ["GGUF"]),
        (4, struct.pack("<I", 1), ["version 1"]),
        (4, struct.pack(">I", 3), ["big-endian"]),
        (8, struct.pack("<Q", 2**63), ["tensors", str(2**63)]),
        (8, struct.pack("<Q", 1000), ["damaged"]),
        (16, struct.pack("<Q", 2**63), ["metadata", str(2**63)]),
        (16, struct.pack("<Q", 2**14), ["damaged"]),
        (24, struct.pack("<Q", 2**64 - 1), ["string", "damaged"]),
    ],
)
def test_lying_headers(small_gguf: Path, offset: int, value: bytes, words: list[str]) -> None:
    data = bytearray(small_gguf.read_bytes())
    data[offset : offset + len(value)] = value
    small_gguf.write_bytes(data)
    assert_refused(small_gguf, *words)


def test_more_tensors_claimed_than_there_are(small_gguf: Path) -> None:
    data = bytearray(small_gguf.read_bytes())
    count = struct.unpack_from("<Q", data, 8)[0]
    struct.pack_into("<Q", data, 8, count + 1)
    small_gguf.write_bytes(data)
    assert_refused(small_gguf)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, int]:
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", llama_tensors(), quantization=Q.Q4_0)
    return path, path.read_bytes(), header_size(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bits_give_a_model_or_a_model_error(
    damaged: tuple[Path, bytes, int], data: st.DataObject
) -> None:
    path, whole, header = damaged
    broken = bytearray(whole)
    for bit in data.draw(st.lists(st.integers(0, header * 8 - 1), min_size=1, max_size=4)):
        broken[bit // 8] ^= 1 << bit % 8
    path.write_bytes(broken)
    load_or_refuse(lambda: loaded(path))


@settings(max_examples=100, deadline=None)
@given(header=st.binary(max_size=200), count=st.integers(0, 3))
def test_arbitrary_headers(header: bytes, count: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "arbitrary.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, count, count) + header)
    load_or_refuse(lambda: read_gguf(path))


@pytest.mark.real_model
def test_the_real_model_agrees_with_the_gguf_package() -> None:
    from conftest import find_real_model

    path = find_real_model()
    assert path is not None
    checkpoint = load_checkpoint(path)
    assert (checkpoint.config.vocab_size, checkpoint.config.num_layers) == (49152, 30)
    assert checkpoint.dtype == "bfloat16" and checkpoint.eos_token_ids == (2,)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    names = {
        "embed.weight": "token_embd.weight",
        "layers.7.down.weight": "blk.7.ffn_down.weight",
        "final_norm.weight": "output_norm.weight",
    }
    compared = 0
    for tensor in checkpoint.tensors():
        if tensor.name in names:
            expected = theirs[names[tensor.name]]
            values = gguf.quants.dequantize(expected.data, expected.tensor_type)
            np.testing.assert_array_equal(tensor.to_float32(), values)
            compared += 1
    assert compared == 3
