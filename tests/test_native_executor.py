"""The native executor: its arithmetic by instruction set, and bit for bit the same answer however it runs.

The oracle is a plain numpy decoder (``oracle_decoder``), the sampler's is ``minivllm.sampler``.
"""

import dataclasses
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_shapes import CONFIGS, GPT, LLAMA
from helpers_step import Stepper, make_checkpoint, merged, one_sequence_batch, random_tensors
from minivllm._core import supported_isas
from oracle_decoder import forward

from minivllm.batch import Batch, SamplingBatch, StepResult
from minivllm.errors import ConfigError
from minivllm.executors import native
from minivllm.executors.native import NativeExecutor, available_threads, cpu_quota
from minivllm.kv_cache.kv_pool import KVGeometry, KVPool
from minivllm.models.config import ModelConfig
from minivllm.models.weights import Checkpoint, StoredTensor
from minivllm.sampler import sample

Tensors = dict[str, np.ndarray[Any, Any]]

LONG = np.random.default_rng(1).integers(0, 131, 1100).tolist()  # three context splits, the last a short one


def bf16_rounded(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The nearest bfloat16 values, as float32."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def make(
    config: ModelConfig,
    dtype: str = "float32",
    block_size: int = 16,
    num_slots: int = 2400,
    threads: int = 2,
    kv_dtype: str | None = None,
    tensors: Tensors | None = None,
) -> NativeExecutor:
    num_blocks = -(-num_slots // block_size)
    geometry = KVGeometry(
        config.num_layers,
        num_blocks,
        config.num_kv_heads,
        block_size,
        config.head_dim,
        kv_dtype or dtype,  # type: ignore[arg-type]
    )
    pool = KVPool.reserve(geometry)
    # What was not written is not read: NaN, also as the scale of an 8-bit cell.
    pool.data[:] = {"f": np.nan, "u": 0x7FC0, "i": -1}[pool.data.dtype.kind]
    checkpoint = make_checkpoint(config, tensors or random_tensors(config))
    return NativeExecutor(checkpoint, pool, dtype, threads)  # type: ignore[arg-type]


def table_of(num_tokens: int, block_size: int, seed: int = 0) -> list[int]:
    """Blocks for that many tokens, in any order in a pool of 2400 slots."""
    blocks = np.random.default_rng(seed).permutation(2400 // block_size)
    return blocks[: -(-num_tokens // block_size)].tolist()


def greedy(rows: int, num_logprobs: int = 20) -> SamplingBatch:
    return sampling(rows, temperature=np.zeros(rows, np.float32), num_logprobs=num_logprobs)


def sampling(rows: int, **fields: Any) -> SamplingBatch:
    """Temperature 1 and nothing else, but for the fields given (arrays, or one value for all rows)."""
    fills: dict[str, tuple[Any, type]] = {
        "temperature": (1, np.float32),
        "top_k": (0, np.int32),
        "top_p": (1, np.float32),
        "min_p": (0, np.float32),
        "repetition_penalty": (1, np.float32),
        "presence_penalty": (0, np.float32),
        "frequency_penalty": (0, np.float32),
        "seed": (0, np.uint64),
        "choice": (0, np.int32),
        "position": (0, np.int32),
        "num_logprobs": (-1, np.int32),
        "given_token_ids": (-1, np.int32),
        "mask_row": (-1, np.int32),
    }
    arrays = {name: np.full(rows, fields.pop(name, fill), dtype) for name, (fill, dtype) in fills.items()}
    for kind, values, dtype in (("penalty", "penalty_counts", np.int32), ("bias", "bias_values", np.float32)):
        arrays[f"{kind}_start"] = fields.pop(f"{kind}_start", np.zeros(rows + 1, np.int32))
        arrays[f"{kind}_token_ids"] = fields.pop(f"{kind}_token_ids", np.empty(0, np.int32))
        arrays[values] = fields.pop(values, np.empty(0, dtype))
    arrays["masks"] = fields.pop("masks", np.empty((0, 0), np.uint32))
    assert not fields
    return SamplingBatch(**arrays)


def prompt_batch(tokens: list[int], block_size: int = 16, seed: int = 0) -> Batch:
    return one_sequence_batch(tokens, 0, table_of(len(tokens), block_size, seed), block_size, draws=True)


def same(a: StepResult, b: StepResult, row: int = 0, hidden_row: int | None = None) -> bool:
    """Whether row ``row`` of a is b's first row, bit for bit.

    Args:
        hidden_row: its place among the hidden states; None: every logit row has one.
    """
    rows = {"hidden": row if hidden_row is None else hidden_row}
    return all(
        getattr(a, field.name)[rows.get(field.name, row)].tobytes() == getattr(b, field.name)[0].tobytes()
        for field in dataclasses.fields(StepResult)
    )


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_instruction_set_follows_the_oracle(
    isa: str, kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIVLLM_ISA", isa)
    config, tokens = CONFIGS[kind], LONG[:75]
    tensors = random_tensors(config)
    if dtype == "bfloat16":  # matrices are kept in it; what remains is the rounding of activations
        tensors = {
            name: bf16_rounded(x) if x.ndim == 2 and not name.startswith("pos_embed") else x
            for name, x in tensors.items()
        }
    logits = forward(config, tensors, tokens)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    executor = make(config, dtype, tensors=tensors)
    assert executor.isa == isa
    batch = dataclasses.replace(prompt_batch(tokens), logit_rows=np.arange(75, dtype=np.int32))
    result = executor.execute(batch, greedy(75))
    expected = np.take_along_axis(logprobs, result.top_token_ids, axis=1)
    if dtype == "float32":
        np.testing.assert_allclose(result.top_logprobs, expected, rtol=0, atol=3e-5)
        np.testing.assert_array_equal(result.token_ids, logits.argmax(-1))
    else:
        np.testing.assert_allclose(result.top_logprobs, expected, rtol=0, atol=0.3)
        assert np.abs(result.top_logprobs - expected).mean() < 0.03


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "int8")]
)
def test_a_long_context_is_the_same_bit_for_bit_however_it_is_computed(
    kind: str, dtype: str, kv_dtype: str
) -> None:
    """1,100 tokens: more than the decoder takes at once, and three splits of the context."""
    config = CONFIGS[kind]
    executor = make(config, dtype, kv_dtype=kv_dtype)
    whole = Stepper(executor, 16, table_of(1101, 16), 2000)
    first = whole.step(LONG)
    second = whole.step([*LONG, 5])
    if dtype == "float32":
        logits = forward(config, random_tensors(config), LONG)[-1]
        expected = logits - np.log(np.exp(logits).sum())
        np.testing.assert_allclose(first.top_logprobs[0], expected[first.top_token_ids[0]], rtol=0, atol=5e-5)
    for threads, block_size, chunk in [(1, 16, 2000), (2, 1, 513), (3, 256, 37), (2, 48, 700)]:
        other = make(config, dtype, block_size, threads=threads, kv_dtype=kv_dtype)
        stepper = Stepper(other, block_size, table_of(1101, block_size, seed=chunk), chunk)
        assert same(stepper.step(LONG), first), (threads, block_size, chunk)
        assert same(stepper.step([*LONG, 5]), second), (threads, block_size, chunk)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("isa", supported_isas())
def test_company_does_not_matter(isa: str, kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, a chunk and decodes together give each row what it gets alone."""
    monkeypatch.setenv("MINIVLLM_ISA", isa)
    config = CONFIGS[kind]
    together, apart = make(config, dtype), make(config, dtype, block_size=1, threads=1)
    blocks = iter(range(150))
    batches, alone = [], []
    for length, cached in [(1, 0), (30, 29), (17, 0), (70, 3), (64, 63), (65, 64), (33, 0), (2, 1)]:
        tokens = LONG[length : 2 * length]
        table = [next(blocks) for _ in range(-(-length // 16))]
        if cached:
            together.execute(one_sequence_batch(tokens[:cached], 0, table, 16, False), greedy(0))
        batches.append(one_sequence_batch(tokens[cached:], cached, table, 16, True))
        alone.append(Stepper(apart, 1, list(range(2400)), 2000).step(tokens))
    result = together.execute(merged(batches), greedy(len(batches)))
    for row, expected in enumerate(alone):
        assert same(result, expected, row), row


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("block_size", [1, 7, 16, 512])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "int8")]
)
def test_rows_that_share_blocks_attend_together_and_get_what_they_get_alone(
    isa: str, block_size: int, dtype: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences whose first 0, 520 or 1,030 tokens are the same blocks, in one step with others."""
    monkeypatch.setenv("MINIVLLM_ISA", isa)
    threads = 1 + block_size % 3
    together = make(GPT, dtype, block_size, num_slots=12_000, threads=threads, kv_dtype=kv_dtype)
    blocks = iter(np.random.default_rng(1).permutation(12_000 // block_size).tolist())
    common = [next(blocks) for _ in range(-(-1030 // block_size))]
    together.execute(one_sequence_batch(LONG[:1030], 0, common, block_size, False), greedy(0))
    batches, alone = [], []
    lengths = [(1030, 1), (1030, 9), (1030, 60), (520, 500), (520, 2), (0, 30), (1030, 5), (1030, 3)]
    for shared, own in lengths:
        num_shared = shared // block_size
        kept = num_shared * block_size
        tokens = LONG[:kept] + LONG[own : shared - kept + 2 * own]
        table = common[:num_shared]
        table += [next(blocks) for _ in range(-(-len(tokens) // block_size) - num_shared)]
        if len(tokens) - 1 > kept:
            together.execute(one_sequence_batch(tokens[kept:-1], kept, table, block_size, False), greedy(0))
        batches.append(one_sequence_batch(tokens[-1:], len(tokens) - 1, table, block_size, True))
        apart = make(GPT, dtype, 16, kv_dtype=kv_dtype, threads=2)
        alone.append(Stepper(apart, 16, table_of(len(tokens), 16), 2000).step(tokens))
    for order in (range(8), [2, 0, 5, 3, 7, 6, 1, 4]):
        result = together.execute(merged([batches[i] for i in order]), greedy(8))
        for row, i in enumerate(order):
            assert same(result, alone[i], row), (row, i)


def test_kv_dtype_and_weight_dtype_mix() -> None:
    logits = forward(LLAMA, random_tensors(LLAMA), LONG[:50])[-1]
    expected = logits - np.log(np.exp(logits).sum())
    for dtype, kv_dtype in [
        ("float32", "bfloat16"),
        ("float32", "int8"),
        ("bfloat16", "float32"),
        ("bfloat16", "int8"),
    ]:
        result = make(LLAMA, dtype, kv_dtype=kv_dtype).execute(prompt_batch(LONG[:50]), greedy(1))
        np.testing.assert_allclose(
            result.top_logprobs[0], expected[result.top_token_ids[0]], rtol=0, atol=0.3, err_msg=kv_dtype
        )


def test_weights_of_every_stored_dtype_are_taken() -> None:
    """float32 and bfloat16 files give the same bits where the values are the same."""
    tensors = {name: bf16_rounded(x) for name, x in random_tensors(LLAMA).items()}
    halves = {
        name: StoredTensor(x.shape, "bfloat16", lambda x=x: (x.view(np.uint32) >> 16).astype(np.uint16))
        for name, x in tensors.items()
    }
    pool = make(LLAMA).pool
    for dtype in ("float32", "bfloat16"):
        checkpoint = Checkpoint(LLAMA, "bfloat16", Path("memory"), (), None, halves)
        ours = NativeExecutor(checkpoint, pool, dtype, 2)  # type: ignore[arg-type]
        other = NativeExecutor(make_checkpoint(LLAMA, tensors), pool, dtype, 1)  # type: ignore[arg-type]
        assert ours.model_bytes == other.model_bytes > 0
        batch = prompt_batch(LONG[:20])
        assert same(ours.execute(batch, greedy(1)), other.execute(batch, greedy(1)))


def test_copies_happen_before_any_write() -> None:
    """Tokens are computed in one block, copied, and read there while the source is written over."""
    executor = make(LLAMA, block_size=8)
    expected = executor.execute(one_sequence_batch(LONG[:7], 0, [9], 8, True), greedy(1))
    executor.execute(one_sequence_batch(LONG[:5], 0, [0], 8, False), greedy(0))
    other = one_sequence_batch(LONG[20:28], 0, [0], 8, True)
    ours = one_sequence_batch(LONG[5:7], 5, [2], 8, True)
    copies = np.array([[0, 1, 5], [1, 2, 5]], np.int32)  # by way of block 1
    step = dataclasses.replace(merged([other, ours]), block_copies=copies)
    assert same(executor.execute(step, greedy(2)), expected, row=1)


@pytest.mark.parametrize("isa", supported_isas())
def test_the_sampler_is_its_definition(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose logits are a table: row t of ``logits`` follows token t."""
    monkeypatch.setenv("MINIVLLM_ISA", isa)
    vocab, hidden = 300, 64
    config = dataclasses.replace(
        LLAMA, vocab_size=vocab, hidden_size=hidden, num_layers=1, norm_eps=0.0, tied_head=False
    )
    tensors = {name: np.zeros_like(x) for name, x in random_tensors(config).items()}
    rng = np.random.default_rng(5)
    logits = (rng.normal(0, 3, (hidden, vocab)) * rng.choice([0.1, 1, 3], (hidden, 1))).astype(np.float32)
    logits[::3] = np.round(logits[::3])  # ties
    # The norm of 8 e_t is 8 e_t exactly (the mean square is 64 / 64), and so the logits are 8 head[:, t].
    tensors["embed.weight"][:hidden] = 8 * np.eye(hidden)
    tensors["final_norm.weight"][:] = 1
    tensors["head.weight"] = logits.T / 8
    executor = make(config, tensors=tensors)
    batch = merged([one_sequence_batch([t], 0, [t], 16, True) for t in range(hidden)])
    for trial in range(30):
        seen = [rng.choice(vocab, rng.integers(0, 40), replace=False) for _ in range(hidden)]
        biased = [rng.choice(vocab, rng.integers(0, 3), replace=False) for _ in range(hidden)]
        starts = [np.cumsum([0, *map(len, ids)]).astype(np.int32) for ids in (seen, biased)]
        penalised = trial % 2 == 1
        settings = sampling(
            hidden,
            temperature=rng.choice([0, 0.2, 1, 2], hidden),
            top_k=rng.choice([0, 1, 7, 100, 1000], hidden),
            top_p=rng.choice([1, 0.9, 0.3], hidden),
            min_p=rng.choice([0, 0.1], hidden),
            repetition_penalty=rng.choice([1, 1.2], hidden),
            presence_penalty=rng.choice([0, 0.5], hidden),
            frequency_penalty=rng.choice([0, -0.5], hidden),
            seed=rng.integers(0, 2**64, hidden, dtype=np.uint64),
            choice=rng.integers(0, 4, hidden),
            position=rng.integers(0, 1000, hidden),
            num_logprobs=rng.integers(-1, 21, hidden),
            **(
                {
                    "penalty_start": starts[0],
                    "penalty_token_ids": np.concatenate(seen).astype(np.int32),
                    "penalty_counts": rng.integers(0, 3, starts[0][-1]).astype(np.int32),
                    "bias_start": starts[1],
                    "bias_token_ids": np.concatenate(biased).astype(np.int32),
                    "bias_values": rng.choice([-np.inf, 2.0], starts[1][-1]).astype(np.float32),
                }
                if penalised
                else {}
            ),
        )
        if trial % 3 == 2:  # bits beyond the vocabulary are not looked at; token 299 is never biased away
            masks = rng.integers(0, 2**32, (5, -(-vocab // 32) + 1), np.uint32)
            masks[:, (vocab - 1) // 32] |= np.uint32(1 << (vocab - 1) % 32)
            settings = dataclasses.replace(
                settings,
                mask_row=rng.integers(-1, 5, hidden).astype(np.int32),
                masks=masks,
                bias_values=np.maximum(settings.bias_values, np.float32(-50)),
            )
        result, expected = executor.execute(batch, settings), sample(logits, settings)
        np.testing.assert_array_equal(result.token_ids, expected.token_ids)
        np.testing.assert_array_equal(result.ranks, expected.ranks)
        np.testing.assert_array_equal(result.top_token_ids, expected.top_token_ids)
        np.testing.assert_allclose(result.logprobs, expected.logprobs, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(result.top_logprobs, expected.top_logprobs, rtol=1e-6, atol=1e-6)


def test_a_broken_model_is_an_error_not_a_token() -> None:
    tensors = random_tensors(LLAMA)
    tensors["layers.1.o.weight"][3, 4] = np.nan
    executor = make(LLAMA, tensors=tensors)
    for temperature in (0, 1):
        with pytest.raises(RuntimeError, match="logit row 0 has no token to choose"):
            executor.execute(prompt_batch(LONG[:9]), sampling(1, temperature=temperature))


GOOD = one_sequence_batch(LONG[:20], 5, [3, 1], 16, True)
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "token": ({"token_ids": np.full(20, 203, np.int32)}, ValueError, "there is no token 203"),
    "negative token": ({"token_ids": np.full(20, -1, np.int32)}, ValueError, "there is no token -1"),
    "slot": ({"slot_mapping": np.full(20, 2400, np.int32)}, ValueError, "there is no slot 2400"),
    "other slot": ({"slot_mapping": GOOD.slot_mapping + 1}, ValueError, "not where its block table has"),
    "block": ({"block_tables": np.array([[3, 150]], np.int32)}, ValueError, "there is no block 150"),
    "negative block": ({"block_tables": np.array([[-1, 1]], np.int32)}, ValueError, "no block -1"),
    "short table": ({"block_tables": np.array([[3]], np.int32)}, ValueError, "shorter than its context"),
    "positions": ({"positions": GOOD.positions + 1}, ValueError, "do not lead up to context_lens"),
    "context": ({"context_lens": np.array([19], np.int32)}, ValueError, "less than its rows"),
    "query_start": ({"query_start": np.array([0, 19], np.int32)}, ValueError, "does not span the rows"),
    "logit_rows": ({"logit_rows": np.array([20], np.int32)}, ValueError, "descend, or leave the rows"),
    "hidden_rows": ({"hidden_rows": np.array([1, 1], np.int32)}, ValueError, "hidden_rows do not ascend"),
    "hidden_rows beyond": ({"hidden_rows": np.array([20], np.int32)}, ValueError, "or leave the rows"),
    "copy": ({"block_copies": np.array([[0, 150, 1]], np.int32)}, ValueError, "no copy of 1 slots"),
    "long copy": ({"block_copies": np.array([[0, 1, 17]], np.int32)}, ValueError, "no copy of 17 slots"),
    "rows": ({"positions": GOOD.positions[:-1]}, ValueError, "not for every row"),
    "dtype": ({"token_ids": GOOD.token_ids.astype(np.int64)}, TypeError, "token_ids"),
    "stride": ({"slot_mapping": np.repeat(GOOD.slot_mapping, 2)[::2]}, TypeError, "slot_mapping"),
    "rank": ({"block_tables": np.array([3, 1], np.int32)}, TypeError, "block_tables"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_batch_that_does_not_fit_is_refused_before_anything_is_written(name: str) -> None:
    changes, error, message = WRONG[name]
    executor = make(LLAMA)
    executor.execute(one_sequence_batch(LONG[20:25], 0, [3, 1], 16, False), greedy(0))
    executor.execute(GOOD, greedy(1))  # itself it is good
    before = executor.pool.data.tobytes()
    with pytest.raises(error, match=message):
        executor.execute(dataclasses.replace(GOOD, **changes), greedy(1))
    assert executor.pool.data.tobytes() == before


def test_sampling_that_does_not_fit_is_refused() -> None:
    executor = make(LLAMA)
    with pytest.raises(ValueError, match="temperature is not for 1 rows"):
        executor.execute(GOOD, greedy(2))
    for token_id in (203, -2):
        with pytest.raises(ValueError, match=f"given_token_ids: no token {token_id}"):
            executor.execute(GOOD, sampling(1, given_token_ids=token_id))
    with pytest.raises(ValueError, match="bias_token_ids: no token 203"):
        ids, values = np.array([203], np.int32), np.zeros(1, np.float32)
        start = np.array([0, 1], np.int32)
        executor.execute(GOOD, sampling(1, bias_start=start, bias_token_ids=ids, bias_values=values))
    no_bits = np.zeros((1, 1), np.uint32)
    with pytest.raises(ValueError, match="mask_row: no mask 0"):
        executor.execute(GOOD, sampling(1, mask_row=0))
    with pytest.raises(ValueError, match="masks have fewer bits"):
        executor.execute(GOOD, sampling(1, mask_row=0, masks=no_bits))
    with pytest.raises(RuntimeError, match="logit row 0 has no token to choose"):
        executor.execute(GOOD, sampling(1, mask_row=0, masks=np.zeros((1, 99), np.uint32)))


def test_learned_positions_end() -> None:
    config = dataclasses.replace(GPT, max_position=8)
    with pytest.raises(ValueError, match="the model has no position 8"):
        make(config).execute(prompt_batch(LONG[:9]), greedy(1))


def test_a_pool_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit the model"):
        NativeExecutor(make_checkpoint(LLAMA, random_tensors(LLAMA)), make(GPT).pool, "float32", 1)


def test_two_threads_of_python_take_turns() -> None:
    executor = make(LLAMA)
    batches = [
        one_sequence_batch(LONG[:300], 0, list(range(19)), 16, True),
        one_sequence_batch(LONG[300:333], 0, [148, 149, 147], 16, True),
    ]
    expected = [executor.execute(batch, greedy(1)) for batch in batches]
    wrong = []

    def run(i: int) -> None:
        for _ in range(20):
            if not same(executor.execute(batches[i], greedy(1)), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_row_may_yield_several_tokens_and_given_ones() -> None:
    executor = make(LLAMA)
    tokens = LONG[:130]
    rows = np.array([*range(120), *[129] * 40], np.int32)  # more than a slice of the head, and not distinct
    batch = dataclasses.replace(prompt_batch(tokens), logit_rows=rows)
    given = np.array([*tokens[1:121], *[-1] * 40], np.int32)
    choices = np.array([*[0] * 120, *range(40)], np.int32)
    result = executor.execute(
        batch,
        sampling(160, given_token_ids=given, choice=choices, num_logprobs=np.full(160, 3, np.int32), seed=5),
    )
    assert result.token_ids[:120].tolist() == tokens[1:121]
    assert len(set(result.token_ids[120:].tolist())) > 10
    for row in (0, 60, 119, 120, 137, 159):
        alone = executor.execute(
            dataclasses.replace(batch, logit_rows=rows[row : row + 1]),
            sampling(1, given_token_ids=given[row], choice=choices[row], num_logprobs=3, seed=5),
        )
        assert same(result, alone, row, hidden_row=0)  # of the prompt's end, in both


def test_settings_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="threads is 0"):
        make(LLAMA, threads=0)
    monkeypatch.setenv("MINIVLLM_ISA", "sse9")
    with pytest.raises(ConfigError, match=r"MINIVLLM_ISA='sse9' is not among .*scalar"):
        make(LLAMA)


def test_number_of_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native.os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    for quota, expected in [(None, 6), (2.9, 2), (0.5, 1), (64.0, 6)]:
        monkeypatch.setattr(native, "cpu_quota", lambda *_, quota=quota: quota)
        assert available_threads() == expected


def test_cpu_quota(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    assert cpu_quota(membership, tmp_path) is None  # no cgroups at all
    v2 = tmp_path / "a" / "b"
    v2.mkdir(parents=True)
    membership.write_text("0::/a/b\n")
    assert cpu_quota(membership, tmp_path) is None
    (v2 / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(membership, tmp_path) is None
    (v2.parent / "cpu.max").write_text("150000 100000\n")
    assert cpu_quota(membership, tmp_path) == 1.5
    (v2 / "cpu.max").write_text("300000 100000\n")  # the parent is stricter
    assert cpu_quota(membership, tmp_path) == 1.5
    v1 = tmp_path / "cpu,cpuacct" / "x"
    v1.mkdir(parents=True)
    (v1 / "cpu.cfs_quota_us").write_text("50000\n")
    (v1 / "cpu.cfs_period_us").write_text("100000\n")
    membership.write_text("4:memory:/x\n3:cpu,cpuacct:/x\n0::/\n")
    assert cpu_quota(membership, tmp_path) == 0.5
    (v1 / "cpu.cfs_quota_us").write_text("-1\n")
    assert cpu_quota(membership, tmp_path) is None
    # In a container the path is the host's; the quota is at the root of what is mounted.
    membership.write_text("0::/docker/0123\n")
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    assert cpu_quota(membership, tmp_path) == 2.0
