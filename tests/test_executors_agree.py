"""The native executor against the torch one: every pair of dtypes, and every way to choose a token.

Both are held to other people's models in ``test_against_transformers.py``, in float32; here the rest.
"""

import importlib.util
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from helpers_models import wide_llama, write_gguf
from helpers_quants import HALVES
from helpers_shapes import EVERY_SMALL_CONFIG, SMALL_LLAMA, SMALL_PROMPT, geometry
from helpers_step import Stepper, make_checkpoint, one_sequence_batch, random_tensors

from minivllm.batch import Batch
from minivllm.executors.base import Executor
from minivllm.executors.native import NativeExecutor
from minivllm.kv_cache.kv_pool import KVPool
from minivllm.models.config import ModelConfig
from minivllm.models.registry import load_checkpoint
from minivllm.sampler import sampling_batch
from minivllm.sampling_params import SamplingParams
from minivllm.sequence import Sequence

pytestmark = pytest.mark.torch
if importlib.util.find_spec("torch") is not None:  # otherwise every test here skips and says so
    from minivllm.executors.torch_ import TorchExecutor


def both(config: ModelConfig, dtype: str, kv_dtype: str) -> list[Executor]:
    checkpoint, shape = make_checkpoint(config, random_tensors(config)), geometry(config, dtype=kv_dtype)
    return [
        TorchExecutor(checkpoint, KVPool.reserve(shape), dtype),  # type: ignore[arg-type]
        NativeExecutor(checkpoint, KVPool.reserve(shape), dtype, threads=2),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_logprobs_of_a_file_of_blocks_agree(kind: Q, tmp_path: Path) -> None:
    """But for the order of sums where both have its weights in float32, and nearly in 8 or 4 bits."""
    tensors, metadata = wide_llama(8)
    path = write_gguf(tmp_path / "m.gguf", tensors, quantization=kind, metadata=metadata)
    checkpoint = load_checkpoint(path)
    shape = geometry(checkpoint.config, dtype="float32")
    prompt = [token % checkpoint.config.vocab_size for token in SMALL_PROMPT]
    executors = [TorchExecutor(checkpoint, KVPool.reserve(shape), "float32")]
    for quantization in (None, "auto"):
        executors.append(NativeExecutor(checkpoint, KVPool.reserve(shape), "float32", 2, quantization))
    expected, exact, near = (
        np.sort(Stepper(executor, 16, [3, 1, 2], 16).step(prompt).top_logprobs[0]) for executor in executors
    )
    np.testing.assert_allclose(exact, expected, rtol=0, atol=1e-4)
    assert 0 < np.abs(near - expected).mean() < 0.15


@EVERY_SMALL_CONFIG
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_logprobs_agree(config: ModelConfig, dtype: str, kv_dtype: str) -> None:
    """Equal but for the order of float32 sums, and the rare bfloat16 that it rounds the other way.

    With a bfloat16 cache the native executor also rounds queries and attention weights to bfloat16.
    """
    torch_, native = (Stepper(executor, 16, [3, 1, 2], 16) for executor in both(config, dtype, kv_dtype))
    differences = []
    for length in range(5, len(SMALL_PROMPT)):
        a, b = torch_.step(SMALL_PROMPT[:length]), native.step(SMALL_PROMPT[:length])
        logprobs = dict(zip(b.top_token_ids[0].tolist(), b.top_logprobs[0].tolist(), strict=True))
        for token_id, logprob in zip(a.top_token_ids[0].tolist(), a.top_logprobs[0].tolist(), strict=True):
            if token_id in logprobs:  # the 20th and the 21st may be as good as equal
                differences.append(abs(logprob - logprobs[token_id]))
    assert len(differences) > 19 * (len(SMALL_PROMPT) - 5)
    assert np.median(differences) < (1e-5 if kv_dtype == "float32" else 0.02)
    assert max(differences) < (1e-4 if (dtype, kv_dtype) == ("float32", "float32") else 0.15)


def test_tokens_agree_whatever_the_sampling() -> None:
    """Every position of a prompt yields a token, each with settings of its own, six times over."""
    rng = np.random.default_rng(5)
    torch_, native = both(SMALL_LLAMA, "float32", "float32")
    prompt = one_sequence_batch(SMALL_PROMPT, 0, [2, 0, 1], 16, True)
    batch = Batch(**{**vars(prompt), "logit_rows": np.arange(len(SMALL_PROMPT), dtype=np.int32)})
    for _ in range(6):
        sequences = [random_sequence(rng) for _ in SMALL_PROMPT]
        a, b = (executor.execute(batch, sampling_batch(sequences)) for executor in (torch_, native))
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_array_equal(a.ranks, b.ranks)
        np.testing.assert_array_equal(a.top_token_ids, b.top_token_ids)
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-4)  # NaN where the other has NaN
        np.testing.assert_allclose(a.top_logprobs, b.top_logprobs, rtol=0, atol=1e-4)


def test_masks_may_be_written_while_the_model_runs() -> None:
    """They are read after ``before_sampling``, and no token that they exclude is drawn."""
    rng = np.random.default_rng(7)
    vocab_size = SMALL_LLAMA.vocab_size
    prompt = one_sequence_batch(SMALL_PROMPT, 0, [2, 0, 1], 16, True)
    rows = len(SMALL_PROMPT)
    batch = Batch(**{**vars(prompt), "logit_rows": np.arange(rows, dtype=np.int32)})
    sequences = [random_sequence(rng) for _ in range(rows)]
    mask_row = np.where(np.arange(rows) % 3 == 0, -1, np.arange(rows) % 2).astype(np.int32)
    written = rng.integers(0, 2**32, (2, -(-vocab_size // 32)), np.uint32)
    results = []
    for executor in both(SMALL_LLAMA, "float32", "float32"):
        masks = np.zeros_like(written)
        sampling = sampling_batch(sequences, masks=(mask_row, masks))

        def write(masks: np.ndarray = masks) -> None:
            masks[:] = written

        results.append(executor.execute(batch, sampling, write))
        with pytest.raises(ZeroDivisionError):
            executor.execute(batch, sampling, lambda: 1 / 0)
    np.testing.assert_array_equal(results[0].token_ids, results[1].token_ids)
    free = both(SMALL_LLAMA, "float32", "float32")[1].execute(batch, sampling_batch(sequences))
    np.testing.assert_array_equal(results[1].top_token_ids, free.top_token_ids)  # of the raw logits
    for row, token_id in enumerate(results[1].token_ids.tolist()):
        if mask_row[row] < 0:
            assert token_id == free.token_ids[row]
        else:
            assert int(written[mask_row[row]][token_id // 32]) >> token_id % 32 & 1


def random_sequence(rng: np.random.Generator) -> Sequence:
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.5, 1.0, 2.0]),
        top_k=rng.choice([0, 1, 5, 40, 1000]),
        top_p=rng.choice([0.1, 0.7, 0.95, 1.0]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.3]),
        min_tokens=rng.choice([0, 9]),
        repetition_penalty=rng.choice([1.0, 1.0, 0.8, 1.5]),
        presence_penalty=rng.choice([0.0, 0.0, -1.0, 1.0]),
        frequency_penalty=rng.choice([0.0, 0.0, -0.5, 0.5]),
        logit_bias={
            int(token_id): rng.uniform(-5, 5) for token_id in rng.integers(0, 97, rng.integers(0, 4))
        },
        logprobs=rng.choice(np.array([None, 0, 1, 8])),
    )
    prompt, output = (rng.integers(0, 97, rng.integers(1, 8)).tolist() for _ in range(2))
    return Sequence(
        seq_id=0,
        request_id="r",
        token_ids=prompt + output,
        num_prompt_tokens=len(prompt),
        params=params,
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        max_num_tokens=1000,
        choice=int(rng.integers(0, 4)),
        end_token_ids=frozenset(rng.integers(0, 97, 3).tolist()),
        output_counts=dict(Counter(output)),
    )
