"""Quantised weights in the native executor: what files have is kept, the rest is near, and invariance holds.

Dequantisation is held to the ``gguf`` package, the decoder to the plain numpy one of ``oracle_decoder``.
(Packed matrices and the matmul kernels themselves: csrc/tests/test_matmul.cpp.)
"""

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from helpers_quants import HALVES, quantized
from helpers_shapes import LLAMA
from helpers_step import Stepper, make_checkpoint, merged, one_sequence_batch, random_tensors
from minivllm._core import supported_isas
from oracle_decoder import forward

from minivllm.batch import StepResult
from minivllm.executors.native import NativeExecutor, matrix_formats, packed_bytes
from minivllm.kv_cache.kv_pool import KVGeometry, KVPool
from minivllm.models.config import ModelConfig, tensor_shapes
from minivllm.models.weights import Checkpoint, StoredTensor
from minivllm.sampler import sampling_batch
from minivllm.sampling_params import SamplingParams
from minivllm.sequence import Sequence

Tensors = dict[str, np.ndarray[Any, Any]]
TOKENS = np.random.default_rng(3).integers(0, 300, 90).tolist()
Q = gguf.GGMLQuantizationType

CONFIG = dataclasses.replace(
    LLAMA,
    vocab_size=300,
    hidden_size=256,
    intermediate_size=512,
    num_heads=8,
    head_dim=32,
    max_position=256,
    rope_inv_freq=tuple(float(x) for x in np.float32(500.0) ** (-np.arange(16, dtype=np.float32) / 16)),
)
#: Sizes that no block or panel divides
ODD = dataclasses.replace(
    LLAMA, vocab_size=131, max_position=256, rope_inv_freq=CONFIG.rope_inv_freq[:10], tied_head=False
)


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and not name.startswith("pos_embed")


def stored_as(kind: Any, tensors: Tensors) -> tuple[dict[str, StoredTensor], Tensors]:
    """Every matrix in ggml's blocks, and the values that the ``gguf`` package takes them for."""
    stored, values = {}, {}
    for name, x in tensors.items():
        if not is_matrix(name, x.shape):
            stored[name], values[name] = StoredTensor(x.shape, "float32", lambda x=x: x), x
            continue
        data = quantized(x, kind)
        stored[name] = StoredTensor(x.shape, kind.name.lower(), lambda data=data: data)
        values[name] = gguf.quants.dequantize(data, kind)
    return stored, values


def make(
    checkpoint: Checkpoint, quantization: Any, dtype: str = "float32", threads: int = 2
) -> NativeExecutor:
    config = checkpoint.config
    geometry = KVGeometry(config.num_layers, 16, config.num_kv_heads, 16, config.head_dim, dtype)  # type: ignore[arg-type]
    return NativeExecutor(checkpoint, KVPool.reserve(geometry), dtype, threads, quantization)  # type: ignore[arg-type]


def run(executor: NativeExecutor, tokens: list[int]) -> StepResult:
    """Every row's likeliest tokens."""
    batch = one_sequence_batch(tokens, 0, list(range(16)), 16, draws=True)
    batch = dataclasses.replace(batch, logit_rows=np.arange(len(tokens), dtype=np.int32))
    params = SamplingParams(temperature=0, logprobs=20)
    rows = [
        Sequence(0, "r", tokens[: i + 1], i + 1, params, seed=0, max_num_tokens=10_000)
        for i in range(len(tokens))
    ]
    return executor.execute(batch, sampling_batch(rows))


def errors(
    result: StepResult, config: ModelConfig, values: Tensors, tokens: list[int]
) -> np.ndarray[Any, Any]:
    logits = forward(config, values, tokens)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.abs(result.top_logprobs - np.take_along_axis(logprobs, result.top_token_ids, axis=1))


#: Types that are rounded to int8, not taken over as int8 or int4
ROUNDED = (Q.Q5_1, Q.Q2_K, Q.Q3_K, Q.Q5_K, Q.Q6_K)


@pytest.mark.parametrize(
    ("isa", "kind"),
    [
        (isa, kind)
        for isa in supported_isas()
        for kind in HALVES
        # One for int4, two for int8, of which one has scales below zero, on every instruction set.
        if isa == supported_isas()[0] or kind in (Q.Q4_0, Q.Q8_0, Q.IQ4_XS)
    ],
)
def test_a_files_own_types(isa: str, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIVLLM_ISA", isa)
    stored, values = stored_as(kind, random_tensors(CONFIG))
    checkpoint = Checkpoint(CONFIG, "bfloat16", Path("memory"), (), None, stored)
    # In float32, nothing is lost but the order of sums.
    plain = errors(run(make(checkpoint, None), TOKENS), CONFIG, values, TOKENS)
    assert plain.max() < 3e-4
    # As they are, what is lost is the rounding of activations to 8 bits (and that of weights to int8).
    executor = make(checkpoint, "auto")
    lost = errors(run(executor, TOKENS), CONFIG, values, TOKENS)
    assert 0 < lost.mean() < (0.15 if kind in ROUNDED else 0.05)
    assert executor.model_bytes < make(checkpoint, None).model_bytes / 3


@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_blocks_are_expanded_to_the_packages_values_bit_for_bit(kind: Any) -> None:
    stored, values = stored_as(kind, random_tensors(CONFIG))
    ours = Checkpoint(CONFIG, "bfloat16", Path("memory"), (), None, stored)
    theirs = make_checkpoint(CONFIG, values)
    a, b = (run(make(checkpoint, None), TOKENS) for checkpoint in (ours, theirs))
    assert a.top_logprobs.tobytes() == b.top_logprobs.tobytes()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("config", [CONFIG, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("isa", supported_isas())
def test_float_weights_are_quantised(
    isa: str, config: ModelConfig, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIVLLM_ISA", isa)
    tensors, tokens = random_tensors(config), [token % config.vocab_size for token in TOKENS]
    executor = make(make_checkpoint(config, tensors), quantization, "bfloat16")
    lost = errors(run(executor, tokens), config, tensors, tokens)
    assert 0 < lost.mean() < (0.1 if quantization == "int8" else 1)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("isa", supported_isas())
def test_company_chunks_and_threads_do_not_matter(
    isa: str, dtype: str, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIVLLM_ISA", isa)
    checkpoint = make_checkpoint(ODD, random_tensors(ODD))
    tokens = [token % ODD.vocab_size for token in TOKENS]
    whole = Stepper(make(checkpoint, quantization, dtype), 16, list(range(16)), 1000).step(tokens)
    for threads, chunk in [(1, 1000), (3, 37), (2, 1)]:
        again = Stepper(make(checkpoint, quantization, dtype, threads), 16, list(range(16)), chunk).step(
            tokens
        )
        for field in dataclasses.fields(StepResult):
            ours, expected = getattr(again, field.name), getattr(whole, field.name)
            assert ours.tobytes() == expected.tobytes(), (threads, chunk, field.name)
    together = make(checkpoint, quantization, dtype)
    batches = [one_sequence_batch(tokens, 0, list(range(6)), 16, True),
               one_sequence_batch(tokens[3:50], 0, list(range(6, 9)), 16, False)]  # fmt: skip
    params = SamplingParams(temperature=0, logprobs=20)
    row = Sequence(0, "r", tokens, len(tokens), params, seed=0, max_num_tokens=10_000)
    result = together.execute(merged(batches), sampling_batch([row]))
    assert result.top_logprobs.tobytes() == whole.top_logprobs.tobytes()


def test_which_format_a_matrix_gets() -> None:
    names = {name: shape for name, shape in tensor_shapes(CONFIG).items() if is_matrix(name, shape)}
    kinds = dict.fromkeys(names, "q4_1") | {"embed.weight": "q6_k", "layers.0.q.weight": "q4_k"}
    kinds |= {"layers.1.q.weight": "iq4_xs", "layers.1.up.weight": "float16"}
    tensors = random_tensors(CONFIG)
    stored: dict[str, StoredTensor] = {}
    for name, x in tensors.items():
        if name not in names or kinds[name] == "float16":
            half = np.float16 if name in names else np.float32
            stored[name] = StoredTensor(x.shape, np.dtype(half).name, lambda x=x, half=half: x.astype(half))  # type: ignore[arg-type]
        else:
            stored[name] = stored_as(Q[kinds[name].upper()], {name: x})[0][name]
    checkpoint = Checkpoint(CONFIG, "bfloat16", Path("memory"), (), None, stored)
    formats = matrix_formats(checkpoint, "bfloat16", "auto")
    assert set(formats) == set(names)
    assert formats["embed.weight"] == formats["layers.1.q.weight"] == "int8"
    assert formats["layers.0.q.weight"] == formats["layers.1.k.weight"] == "int4"
    assert formats["layers.1.up.weight"] == "bfloat16"
    # q, k and v are packed together, in the most precise of their formats; likewise gate and up.
    sizes = {name: np.prod(shape) for name, shape in names.items()}
    bits = {name: {"int8": 8.5, "int4": 5, "bfloat16": 16}[formats[name]] for name in names}
    bits |= {"layers.1.k.weight": 8.5, "layers.1.v.weight": 8.5, "layers.1.gate.weight": 16}
    expected = sum(sizes[name] * bits[name] / 8 for name in names)
    model_bytes = make(checkpoint, "auto", "bfloat16").model_bytes
    assert expected <= model_bytes < 1.05 * expected  # a part of a panel, and the norms
    assert 0.8 * model_bytes < packed_bytes(checkpoint, "bfloat16", "auto") <= model_bytes

    assert set(matrix_formats(checkpoint, "float32", None).values()) == {"float32"}
    int4 = matrix_formats(checkpoint, "float32", "int4")
    assert int4.pop("embed.weight") == "int8" and set(int4.values()) == {"int4"}
    assert set(matrix_formats(checkpoint, "float32", "int8").values()) == {"int8"}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_a_block_that_is_not_a_number_is_an_error_not_a_token(kind: Any, bad: float) -> None:
    stored, _ = stored_as(kind, random_tensors(CONFIG))
    data = stored["layers.1.down.weight"].read().copy()
    start = min(HALVES[kind])
    data[7, start : start + 2] = np.array([bad], "<f2").view(np.uint8)
    stored["layers.1.down.weight"] = dataclasses.replace(stored["layers.1.down.weight"], read=lambda: data)
    checkpoint = Checkpoint(CONFIG, "bfloat16", Path("memory"), (), None, stored)
    with pytest.raises(RuntimeError, match="has no token to choose"):
        run(make(checkpoint, "auto"), TOKENS[:5])
