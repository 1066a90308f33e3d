"""The torch executor's handling of the pool: blocks, chunks, copies, dtypes, slices of rows, devices.

That its arithmetic is the models' own is shown in ``test_against_transformers.py``.
"""

import importlib.util
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from helpers_shapes import EVERY_SMALL_CONFIG, SMALL_GPT, SMALL_LLAMA, SMALL_PROMPT, geometry
from helpers_step import GREEDY, Stepper, make_checkpoint, merged, one_sequence_batch, random_tensors

from minivllm.batch import Batch, StepResult
from minivllm.errors import ConfigError
from minivllm.kv_cache.kv_pool import KVGeometry, KVPool
from minivllm.models.config import ModelConfig
from minivllm.models.weights import StoredTensor
from minivllm.sampler import sample_rows, sampling_batch
from minivllm.sequence import Sequence

pytestmark = pytest.mark.torch
if importlib.util.find_spec("torch") is not None:  # otherwise every test here skips and says so
    import torch

    from minivllm.executors import torch_
    from minivllm.executors.torch_ import TorchExecutor


def make_executor(config: ModelConfig, shape: KVGeometry, dtype: str = "float32") -> "TorchExecutor":
    return TorchExecutor(make_checkpoint(config, random_tensors(config)), KVPool.reserve(shape), dtype)  # type: ignore[arg-type]


def execute(executor: "TorchExecutor", batch: Batch) -> StepResult:
    sequence = Sequence(0, "r", [0], 1, GREEDY, seed=0, max_num_tokens=99)
    return executor.execute(batch, sampling_batch([sequence] * len(batch.logit_rows)))


def assert_same(a: StepResult, b: StepResult, tolerance: float = 2e-5) -> None:
    np.testing.assert_array_equal(a.token_ids, b.token_ids)
    np.testing.assert_allclose(a.top_logprobs, b.top_logprobs, rtol=0, atol=tolerance)


@EVERY_SMALL_CONFIG
@pytest.mark.parametrize(("block_size", "chunk"), [(1, 40), (1, 7), (5, 1), (16, 16), (16, 23), (64, 40)])
def test_blocks_and_chunks_do_not_matter(config: ModelConfig, block_size: int, chunk: int) -> None:
    whole = Stepper(make_executor(config, geometry(config, 64, 1)), 64, [0], chunk=64).step(SMALL_PROMPT)
    blocks = -(-64 // block_size)
    table = np.random.default_rng(2).permutation(blocks).tolist()  # in any order in the pool
    executor = make_executor(config, geometry(config, block_size, blocks))
    executor.pool.fill_(torch.nan)  # what was not written must not be read
    assert_same(Stepper(executor, block_size, table, chunk).step(SMALL_PROMPT), whole)


@EVERY_SMALL_CONFIG
def test_sequences_of_one_batch_do_not_touch_each_other(config: ModelConfig) -> None:
    """A prompt, a chunk that yields nothing, the last chunk of a prompt, and a decode, in one step."""
    parts = [
        (SMALL_PROMPT[:9], 0, [3], True),
        (SMALL_PROMPT[9:19], 0, [0], False),
        (SMALL_PROMPT[20:30], 5, [7], True),
    ]
    parts.append((SMALL_PROMPT[30:36], 5, [1], True))

    def batches(executor: "TorchExecutor") -> list[Batch]:
        result = []
        for tokens, start, table, draws in parts:
            if start:
                execute(executor, one_sequence_batch(tokens[:start], 0, table, 16, False))
            result.append(one_sequence_batch(tokens[start:], start, table, 16, draws))
        return result

    together = make_executor(config, geometry(config))
    result = execute(together, merged(batches(together)))
    assert len(result.token_ids) == 3
    apart = make_executor(config, geometry(config))
    alone = [execute(apart, batch) for batch, part in zip(batches(apart), parts, strict=True) if part[3]]
    for row, expected in enumerate(alone):
        assert result.token_ids[row] == expected.token_ids[0]
        np.testing.assert_allclose(result.top_logprobs[row], expected.top_logprobs[0], rtol=0, atol=2e-5)


@EVERY_SMALL_CONFIG
def test_a_step_writes_its_slots_and_no_others(config: ModelConfig) -> None:
    shape = geometry(config, block_size=4, num_blocks=6)
    pool = KVPool.reserve(shape)
    executor = TorchExecutor(make_checkpoint(config, random_tensors(config)), pool, "float32")
    pool.data[:] = 7.0
    execute(executor, one_sequence_batch(SMALL_PROMPT[:6], 0, [5, 2], 4, True))
    written = (pool.data != 7.0).any(axis=(0, 2, 3, 5))  # [num_blocks, block_size]
    assert written.tolist() == [[False] * 4] * 2 + [[True, True, False, False]] + [[False] * 4] * 2 + [
        [True] * 4
    ]


@EVERY_SMALL_CONFIG
def test_copies_happen_before_any_write(config: ModelConfig) -> None:
    """Block 0 holds 5 tokens; in one step 3 of them are copied away and then block 0 is written over."""
    executor = make_executor(config, geometry(config, block_size=8, num_blocks=4))
    executor.pool.fill_(torch.nan)
    execute(executor, one_sequence_batch(SMALL_PROMPT[:5], 0, [0], 8, False))
    ours = one_sequence_batch([11, 12], 3, [2], 8, True)
    other = one_sequence_batch(SMALL_PROMPT[20:28], 0, [0], 8, True)
    step = merged([other, ours])
    copies = np.array([[0, 2, 3]], np.int32)
    result = execute(executor, Batch(**{**vars(step), "block_copies": copies}))
    assert torch.isnan(executor.pool[:, 2, ..., 5:, :]).all()  # not more than was asked for

    fresh = Stepper(make_executor(config, geometry(config)), 16, [0], 16).step([*SMALL_PROMPT[:3], 11, 12])
    assert result.token_ids[1] == fresh.token_ids[0]
    np.testing.assert_allclose(result.top_logprobs[1], fresh.top_logprobs[0], rtol=0, atol=2e-5)


@EVERY_SMALL_CONFIG
def test_a_bfloat16_pool_holds_rounded_keys_and_values(config: ModelConfig) -> None:
    exact, rounded = (
        make_executor(config, geometry(config)),
        make_executor(config, geometry(config, dtype="bfloat16")),
    )
    batch = one_sequence_batch(SMALL_PROMPT[:16], 0, [3], 16, True)
    a, b = execute(exact, batch), execute(rounded, batch)
    assert rounded.pool.dtype == torch.bfloat16
    first = exact.pool[0, 3].to(torch.bfloat16)  # K and V of the first layer saw no rounding before
    assert torch.equal(rounded.pool[0, 3], first)
    # The rounding is felt (attention reads what is stored), and is small.
    assert not np.array_equal(a.top_logprobs, b.top_logprobs)
    np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=0.3)


@EVERY_SMALL_CONFIG
def test_bfloat16_rounds_matrices_and_what_enters_them(config: ModelConfig) -> None:
    tensors = random_tensors(config)
    executor = TorchExecutor(make_checkpoint(config, tensors), geometry(config), "bfloat16")
    for name, weight in executor.weights.items():
        is_matrix = weight.ndim == 2 and name != "pos_embed.weight"
        assert weight.dtype == (torch.bfloat16 if is_matrix else torch.float32), name
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 32)).astype(np.float32))
    weight = torch.from_numpy(tensors["layers.1.up.weight"])
    exact = x.bfloat16().double() @ weight.bfloat16().double().T
    exact += torch.from_numpy(tensors.get("layers.1.up.bias", np.zeros(1)))
    torch.testing.assert_close(executor._linear(x, "layers.1.up").double(), exact, rtol=0, atol=1e-5)

    batch = one_sequence_batch(SMALL_PROMPT[:16], 0, [3], 16, True)
    a, b = execute(executor, batch), execute(make_executor(config, geometry(config)), batch)
    np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=0.3)


def test_bfloat16_files_are_taken_bit_by_bit() -> None:
    tensors = {n: torch.from_numpy(a).bfloat16() for n, a in random_tensors(SMALL_LLAMA).items()}
    bits = {n: t.view(torch.int16).numpy().view(np.uint16) for n, t in tensors.items()}
    stored = {n: StoredTensor(a.shape, "bfloat16", lambda a=a: a) for n, a in bits.items()}
    checkpoint = replace(make_checkpoint(SMALL_LLAMA, random_tensors(SMALL_LLAMA)), stored=stored)
    executor = TorchExecutor(checkpoint, geometry(SMALL_LLAMA), "bfloat16")
    for name, tensor in tensors.items():
        assert torch.equal(executor.weights[name].bfloat16(), tensor), name


def test_logits_are_made_in_slices_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor(SMALL_LLAMA, geometry(SMALL_LLAMA))
    whole = one_sequence_batch(SMALL_PROMPT[:10], 0, [0], 16, True)
    every_row = Batch(**{**vars(whole), "logit_rows": np.arange(10, dtype=np.int32)})
    expected = execute(executor, every_row)
    seen = []
    monkeypatch.setattr(torch_, "HEAD_ROWS", 4)
    monkeypatch.setattr(
        torch_, "sample_rows", lambda logits, *rest: (seen.append(logits.shape), sample_rows(logits, *rest))
    )
    assert_same(execute(executor, every_row), expected)
    assert seen == [(4, 97), (4, 97), (2, 97)]


@pytest.mark.parametrize("device", ["tpu", "cpu:1", "cuda:x", "", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    checkpoint = make_checkpoint(SMALL_GPT, random_tensors(SMALL_GPT))
    with pytest.raises(ConfigError, match=r'"cpu", "cuda" or|CUDA device|there is no device'):
        TorchExecutor(checkpoint, geometry(SMALL_GPT), "float32", device)


def test_without_torch_the_message_names_the_extra() -> None:
    program = "import sys; sys.modules['torch'] = None; import minivllm.executors.torch_"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.returncode == 1
    assert "ConfigError: the torch executor needs PyTorch: pip install torch" in found.stderr


@EVERY_SMALL_CONFIG
def test_cuda_agrees_with_the_cpu(config: ModelConfig) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    checkpoint, shape = make_checkpoint(config, random_tensors(config)), geometry(config)
    cuda = Stepper(TorchExecutor(checkpoint, shape, "float32", "cuda"), 16, [4, 1, 3, 0], 16)
    cpu = Stepper(TorchExecutor(checkpoint, shape, "float32", "cpu"), 16, [0, 1, 2, 3], 64)
    assert_same(cuda.step(SMALL_PROMPT), cpu.step(SMALL_PROMPT), tolerance=1e-4)
