"""Shared prefixes: what is found in the cache is not computed, and no answer is different for it."""

import random
from dataclasses import replace

import numpy as np
import pytest
from fakes import fake_continuation, fake_kv_cache
from helpers_engine import Setup, answer, assert_idle, run
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.batch import NO_SLOT
from minivllm.engine.inference_engine import InferenceEngine
from minivllm.sampling_params import SamplingParams

SHORT = SamplingParams(max_tokens=3, ignore_eos=True)
PROMPT = [random.Random(1).randrange(1, 256) for _ in range(40)]


def computed_by(engine: InferenceEngine, *prompts: list[int]) -> int:
    """Rows that the prompts take, asked together, the rows of the answers' own tokens left out."""
    before = engine.metrics().computed_tokens
    for prompt in prompts:
        engine.add_request(prompt, SHORT)
    outputs = run(engine)
    for output in outputs.values():
        expected = fake_continuation(output.prompt_token_ids, 3, frozenset())
        assert output.outputs[0].token_ids == expected
    return engine.metrics().computed_tokens - before - 2 * len(prompts)


# --- what is computed, and what is found ---


@pytest.mark.parametrize(
    ("prompt", "computed"),
    [
        ([*PROMPT[:33], 1, 2, 3], 4),  # 2 whole blocks of 16; the third was never full
        ([*PROMPT[:32], 1, 2, 3], 3),  # 2 whole blocks
        ([*PROMPT[:31], 1, 2, 3], 3),  # 1 whole block, 15 tokens of the second
        (PROMPT[:31], 1),  # all but its last token
        (PROMPT[:32], 1),  # all of it is there: the last token is computed only for what it yields
        (PROMPT[:16], 1),
        ([1, *PROMPT], 41),  # the same tokens at other places are others
    ],
)
def test_only_what_is_new_is_computed(prompt: list[int], computed: int) -> None:
    engine = Setup().engine()
    assert computed_by(engine, PROMPT) == 40
    assert computed_by(engine, prompt) == computed
    metrics = engine.metrics()
    assert (metrics.queried_tokens, metrics.cached_tokens) == (40 + len(prompt), len(prompt) - computed)
    assert metrics.prefix_hit_rate == metrics.cached_tokens / metrics.queried_tokens


def test_outputs_tell_what_was_cached() -> None:
    engine = Setup().engine()
    assert engine.metrics().prefix_hit_rate == 0
    assert answer(engine, PROMPT, SHORT).num_cached_tokens == 0
    assert answer(engine, PROMPT, SHORT).num_cached_tokens == 32
    engine.reset_prefix_cache()
    assert engine.metrics().num_cached_blocks == 0
    assert answer(engine, PROMPT, SHORT).num_cached_tokens == 0
    off = Setup(prefix_caching=False).engine()
    assert [answer(off, PROMPT, SHORT).num_cached_tokens for _ in range(2)] == [0, 0]


def test_an_answer_is_a_prefix_too() -> None:
    engine = Setup().engine()
    first = answer(engine, PROMPT, SamplingParams(max_tokens=30, ignore_eos=True))
    talk = PROMPT + first.outputs[0].token_ids + [7, 8, 9]
    # Its 70 tokens but the last were computed; 4 whole blocks hold 64 of them, and the rest fills none.
    assert answer(engine, talk, SHORT).num_cached_tokens == 64


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    # A step computes one block of the first; those of the others are its copies, but for their last tokens.
    assert computed_by(Setup(budget=16).engine(), *[PROMPT] * 5) == 40 + 4 * 8
    shared = [PROMPT[:32] + [i] * 5 for i in range(1, 9)]
    assert computed_by(Setup(num_blocks=256).engine(), *shared) == 32 + 8 * 5


def test_one_that_waits_for_a_prefix_lets_others_overtake() -> None:
    engine = Setup().engine()
    ids = [engine.add_request(prompt, SHORT) for prompt in (PROMPT, PROMPT, [5, 6, 7])]
    engine.step()
    assert (engine.metrics().num_running, engine.metrics().num_waiting) == (2, 1)
    outputs = run(engine)
    assert [outputs[i].num_cached_tokens for i in ids] == [0, 32, 0]


def test_one_that_waits_goes_on_when_the_other_is_aborted() -> None:
    engine = Setup(budget=16).engine()
    first, second = (engine.add_request(PROMPT, SHORT) for _ in range(2))
    engine.step()
    assert engine.metrics().num_waiting == 1
    engine.abort(first)
    outputs = run(engine)
    assert outputs[second].num_cached_tokens == 16  # the one block that the first had time for
    assert outputs[second].outputs[0].token_ids == fake_continuation(PROMPT, 3, frozenset())


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    # Both fit until the first has grown; the second then gives way, and nobody needs all of its blocks.
    engine = Setup(num_blocks=8, block_size=4, budget=64).engine()
    for prompt in ([1] * 10, [2] * 8):
        engine.add_request(prompt, SamplingParams(max_tokens=14, ignore_eos=True))
    run(engine)
    metrics = engine.metrics()
    assert metrics.preemptions >= 1
    assert metrics.computed_tokens < 18 + 2 * 13 + metrics.preemptions * 8


# --- the bookkeeping ---


def test_a_whole_hit_writes_nothing_and_copies_nothing() -> None:
    engine = Setup().engine()
    answer(engine, PROMPT[:32], SHORT)
    engine.add_request(PROMPT[:32], SHORT)
    batch = engine.kv_cache.batch(engine.scheduler.schedule())
    assert batch.slot_mapping.tolist() == [NO_SLOT] and batch.positions.tolist() == [31]
    assert batch.block_copies.shape == (0, 3) and batch.context_lens.tolist() == [32]
    run(engine)


def test_a_partial_hit_copies_its_tokens_and_holds_their_block_until_then() -> None:
    engine = Setup(num_blocks=6).engine()
    answer(engine, PROMPT[:32], SHORT)
    engine.add_request([*PROMPT[:21], 1, 2], SHORT)
    batch = engine.kv_cache.batch(engine.scheduler.schedule())
    ((source, destination, count),) = batch.block_copies.tolist()
    assert count == 5 and source != destination
    assert batch.block_tables[0, 1] == destination and batch.slot_mapping.tolist() == [
        destination * 16 + offset for offset in (5, 6)
    ]
    engine.kv_cache.check_integrity()
    assert engine.kv_cache.num_free_blocks == 6 - 3  # two of its own table, and the one that is copied from
    again = engine.kv_cache.batch(engine.scheduler.schedule())  # a plan not carried out is made anew
    assert again.block_copies.tolist() == batch.block_copies.tolist()
    run(engine)


def test_a_copy_that_is_never_made_lets_its_block_go() -> None:
    engine = Setup().engine()
    answer(engine, PROMPT[:32], SHORT)
    request_id = engine.add_request([*PROMPT[:21], 1, 2], SHORT)
    engine.scheduler.schedule()
    engine.abort(request_id)
    engine.kv_cache.check_integrity()
    assert_idle(engine)


def test_a_sequence_as_large_as_the_pool_gets_in_whatever_is_cached() -> None:
    engine = Setup(num_blocks=3, block_size=4).engine()
    for first in range(3, 12):
        prompt = [1, 2, 3, 4, 5, 6, *range(first, first + 3)]
        assert len(answer(engine, prompt, SHORT).outputs[0].token_ids) == 3


def test_reset_while_running() -> None:
    engine = Setup(budget=16).engine()
    request_id = engine.add_request(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True))
    for _ in range(4):
        engine.step()
    engine.reset_prefix_cache()
    outputs = run(engine)
    assert outputs[request_id].outputs[0].token_ids == fake_continuation(PROMPT, 20, frozenset())
    assert answer(engine, PROMPT, SHORT).num_cached_tokens == 39  # published again when it went on


def test_nothing_is_published_before_it_is_computed() -> None:
    engine = Setup().engine()
    engine.add_request(PROMPT, SHORT)
    engine.scheduler.schedule()
    assert fake_kv_cache(4, 4).num_cached_blocks == 0
    assert engine.kv_cache._allocator.stats().num_published == 0
    run(engine)
    assert engine.kv_cache._allocator.stats().num_published == 2


# --- the same answers ---


@st.composite
def related_prompts(draw: st.DrawFn) -> list[list[int]]:
    """Prompts that share beginnings of every length, whole ones included."""
    stems = draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=12), min_size=1, max_size=3))
    prompts = []
    for _ in range(draw(st.integers(2, 12))):
        parts = draw(st.lists(st.sampled_from(stems), min_size=1, max_size=4))
        prompts.append([token_id for part in parts for token_id in part][: draw(st.integers(1, 40))])
    return prompts


@settings(max_examples=60, deadline=None)
@given(
    prompts=related_prompts(),
    block_size=st.sampled_from([1, 2, 4, 7]),
    spare=st.integers(0, 30),
    budget=st.sampled_from([1, 5, 64]),
    steps=st.integers(0, 6),
)
def test_every_answer_is_the_models(
    prompts: list[list[int]], block_size: int, spare: int, budget: int, steps: int
) -> None:
    num_blocks = -(-50 // block_size) + spare
    engine = Setup(num_blocks=num_blocks, block_size=block_size, budget=budget).engine()
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    half = len(prompts) // 2
    ids = [engine.add_request(prompt, params) for prompt in prompts[:half]]
    collected = {}
    for _ in range(steps):
        collected |= {output.request_id: output for output in engine.step()}
        engine.kv_cache.check_integrity()
    ids += [engine.add_request(prompt, params) for prompt in prompts[half:]]
    collected |= run(engine)
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert collected[request_id].outputs[0].token_ids == fake_continuation(prompt, 9, frozenset())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hit_changes_no_bit(dtype: str) -> None:
    rng = random.Random(3)
    stem = [rng.randrange(1, 256) for _ in range(60)]
    prompts = [stem[: rng.randrange(1, 60)] + [rng.randrange(1, 256)] * rng.randrange(4) for _ in range(12)]
    prompts += [stem[:16], stem[:32], stem[:32]]
    params = SamplingParams(max_tokens=6, temperature=0.9, seed=5, logprobs=3, ignore_eos=True)
    setup = Setup(model="native", dtype=dtype)
    alone = [answer(replace(setup, prefix_caching=False).engine(), prompt, params) for prompt in prompts]
    for block_size, num_blocks in ((16, 64), (1, 200), (5, 30)):
        engine = replace(setup, block_size=block_size, num_blocks=num_blocks).engine()
        for _ in range(2):
            ids = [engine.add_request(prompt, params) for prompt in prompts]
            outputs = run(engine)
            assert sum(outputs[i].num_cached_tokens for i in ids) > 0
            for request_id, expected in zip(ids, alone, strict=True):
                (got,), (want,) = outputs[request_id].outputs, expected.outputs
                assert got.token_ids == want.token_ids
                assert got.logprobs is not None and want.logprobs is not None
                for a, b in zip(got.logprobs, want.logprobs, strict=True):
                    assert list(a) == list(b)
                    assert np.array_equal([x.logprob for x in a.values()], [x.logprob for x in b.values()])
