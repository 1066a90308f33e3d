"""``mini-vllm bench memory``: every count against one made the slow way, and the issue's own thresholds."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli import mini_vllm

from minivllm.batch import Batch, SamplingBatch, StepResult
from minivllm.bench.memory import paper
from minivllm.bench.memory.contiguous import (
    SCHEMES,
    BuddyAllocator,
    Scheme,
    reservation,
    run_contiguous,
)
from minivllm.bench.memory.cost import CostModel, fit
from minivllm.bench.memory.measure import COST, Setting, _Runner, measure
from minivllm.bench.memory.simulate import (
    Decoding,
    RecordingExecutor,
    run_paged,
    simulated_engine,
    simulated_step,
)
from minivllm.bench.memory.trace import Step, Trace, figures
from minivllm.bench.memory.workload import ALPACA, SHAREGPT, Arrival, Lengths, Workload, arrivals
from minivllm.engine.inference_engine import InferenceEngine
from minivllm.errors import ConfigError

SMALL = Workload("small", Lengths(20, 0.8, 80), Lengths(25, 0.8, 80))
DECODINGS = [Decoding(), Decoding(samples=3), Decoding(beams=3)]


def small_engine(num_blocks: int = 40, block_size: int = 8) -> InferenceEngine:
    return simulated_engine(num_blocks, block_size, 160, 64, 16)


# --- the requests ---


@pytest.mark.parametrize("lengths", [SHAREGPT.prompt, SHAREGPT.output, ALPACA.prompt, ALPACA.output])
def test_lengths_have_the_mean_that_they_say(lengths: Lengths) -> None:
    drawn = lengths.draw(np.random.default_rng(7), 200_000)
    assert drawn.min() >= 1 and drawn.max() <= lengths.most
    assert drawn.mean() == pytest.approx(lengths.mean, rel=0.015)


def test_the_same_requests_come_at_every_rate() -> None:
    slow, fast = arrivals(SHAREGPT, 4000, 2.0, 3), arrivals(SHAREGPT, 5000, 8.0, 3)
    for a, b in zip(slow, fast, strict=False):
        assert (a.prompt_len, a.output_len) == (b.prompt_len, b.output_len)
        assert a.time == pytest.approx(4 * b.time)
    gaps = np.diff([request.time for request in slow])
    assert gaps.mean() == pytest.approx(0.5, rel=0.05)
    assert gaps.std() == pytest.approx(0.5, rel=0.1)  # a Poisson process: deviation and mean are equal
    assert arrivals(SHAREGPT, 9, 2.0, 4) != arrivals(SHAREGPT, 9, 2.0, 3)
    shared = arrivals(replace(SHAREGPT, shared_len=80), 4000, 2.0, 3)
    assert [request.prompt_len - 80 for request in shared] == [request.prompt_len for request in slow]


# --- contiguous reservation ---


def naive_buddy(free: list[bool], length: int) -> int | None:
    """Where a buddy allocator puts a piece: in the smallest free aligned window, of these the first."""

    def is_free(first: int, size: int) -> bool:
        return first + size <= len(free) and all(free[first : first + size])

    best: tuple[int, int] | None = None
    for first in range(0, len(free), length):
        if is_free(first, length):
            size, start = length, first
            while is_free(start // (2 * size) * 2 * size, 2 * size):
                size *= 2
                start = start // size * size
            if best is None or (size, start) < best:
                best = (size, start)
    return None if best is None else best[1]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 70), st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
def test_the_buddy_allocator_is_one(size: int, wishes: list[tuple[bool, int]]) -> None:
    buddy, free = BuddyAllocator(size), [True] * size
    held: list[tuple[int, int]] = []
    for gives, number in wishes:
        if gives and held:
            first, length = held.pop(number % len(held))
            buddy.free(first)
            free[first : first + length] = [True] * length
        else:
            length = 2 ** int(np.ceil(np.log2(number)))
            first = buddy.allocate(number)
            assert first == naive_buddy(free, length)
            if first is not None:
                assert all(free[first : first + length])
                free[first : first + length] = [False] * length
                held.append((first, length))
    for first, _ in held:
        buddy.free(first)
    fresh = BuddyAllocator(size)
    while (first := fresh.allocate(1)) is not None:  # and all of it has come together again
        assert buddy.allocate(1) == first
    assert buddy.allocate(1) is None


def test_reservations_are_the_papers() -> None:
    request = Arrival(0.0, 100, 25)  # "if the true output length is 25, it reserves 32 positions"
    assert reservation("max", request, 2048) == 2048
    assert reservation("pow2", request, 2048) == 132
    assert reservation("oracle", request, 2048) == 125
    assert reservation("pow2", Arrival(0.0, 1024, 1024), 2048) == 2048
    assert reservation("pow2", Arrival(0.0, 1024, 600), 1700) == 1700


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("decoding", [Decoding(), Decoding(samples=3)])
def test_with_memory_for_all_there_is_no_difference(scheme: Scheme, decoding: Decoding) -> None:
    """Both play by one rule: with plenty of memory they compute the same rows in the same steps."""
    requests = arrivals(SMALL, 60, 40.0, 5)
    engine = simulated_engine(4000, 8, 160, 32, 14)
    engine.kv_cache.prefix_caching = False
    ours = run_paged(engine, requests, cost=COST, decoding=decoding)
    theirs = run_contiguous(
        scheme, requests, slots=2**17, max_model_len=160, max_num_batched_tokens=32, max_num_seqs=14,
        cost=COST, width=decoding.width,
    )  # fmt: skip
    kept = ("seconds", "rows", "context", "running", "waiting")
    assert [[getattr(step, name) for name in kept] for step in ours.steps] == [
        [getattr(step, name) for name in kept] for step in theirs.steps
    ]
    assert ours.starts == theirs.starts and ours.ends == theirs.ends
    assert max(step.waiting for step in ours.steps) > 0  # for the limits of a step, not for memory


@pytest.mark.parametrize("scheme", SCHEMES)
def test_contiguous_counts_add_up(scheme: Scheme) -> None:
    requests = arrivals(SMALL, 40, 100.0, 1)
    trace = run_contiguous(
        scheme, requests, slots=700, max_model_len=160, max_num_batched_tokens=64, max_num_seqs=16, cost=COST
    )
    assert sum(step.rows for step in trace.steps) == sum(r.prompt_len + r.output_len - 1 for r in requests)
    for step in trace.steps:
        assert min(step.tokens, step.reserved, step.internal) >= 0
        held = step.tokens + step.reserved + step.internal
        assert held <= 700
        if scheme == "max":
            assert (
                held == 160 * step.running and step.running <= 2
            )  # a buddy's pieces: 512 and 128 do not fit
        if scheme == "oracle":
            assert step.internal == 0
    assert len(trace.ends) == 40


# --- our engine ---


class Checking:
    """Beside each step: the same counts by sets of slots, and the allocator's own."""

    def __init__(self, engine: InferenceEngine, width: int) -> None:
        self.width = width
        assert isinstance(engine.executor, RecordingExecutor)
        self.recorder, self.kv_cache = engine.executor, engine.kv_cache
        self.shared = 0
        engine.executor._execute = self.execute

    def execute(self, batch: Batch, sampling: SamplingBatch) -> StepResult:
        size = self.kv_cache.block_size
        slots: set[int] = set()
        unshared = 0
        for table, context in zip(batch.block_tables.tolist(), batch.context_lens.tolist(), strict=True):
            own = {table[i // size] * size + i % size for i in range(context)}
            assert len(own) == context
            slots |= own
            unshared += len({slot // size for slot in own})
        blocks = {slot // size for slot in slots}
        context = sum(batch.context_lens.tolist())
        assert self.recorder.steps[-1] == (
            len(batch.token_ids), context, len(slots), len(blocks), unshared
        )  # fmt: skip
        copied_from = set(batch.block_copies[:, 0].tolist()) - blocks
        in_use = self.kv_cache.geometry.num_blocks - self.kv_cache.num_free_blocks
        if self.width == 1:
            assert in_use == len(blocks | copied_from)
        else:  # after a preemption, samples may wait for a sibling: with blocks, but not in the batch
            assert in_use >= len(blocks | copied_from)
        self.kv_cache.check_integrity()
        self.shared += unshared - len(blocks)
        return simulated_step(batch, sampling)


@pytest.mark.parametrize("decoding", DECODINGS, ids=str)
@pytest.mark.parametrize("shared_len", [0, 21])
def test_what_is_in_the_pool_is_counted_right(decoding: Decoding, shared_len: int) -> None:
    engine = small_engine(num_blocks=60)
    checking = Checking(engine, decoding.width)
    requests = arrivals(replace(SMALL, shared_len=shared_len), 30, 200.0, 2)
    trace = run_paged(engine, requests, cost=COST, shared_len=shared_len, decoding=decoding)
    assert len(trace.ends) == 30 and not engine.has_unfinished_requests()
    assert engine.metrics().num_free_blocks == 60
    assert max(step.waiting for step in trace.steps) > 0
    for step in trace.steps:
        assert step.tokens + step.internal == step.blocks * 8 <= trace.slots
    assert (checking.shared > 0) == (decoding.width > 1 or shared_len > 0)
    summed = figures("paged", trace, requests)
    assert (summed.sharing > 0) == (checking.shared > 0)


def test_time_is_the_cost_models_and_the_arrivals() -> None:
    requests = [Arrival(1.0, 10, 3), Arrival(50.0, 30, 2)]
    trace = run_paged(small_engine(), requests, cost=CostModel(step=1.0, row=0.5, context=0.25))
    rows, context = [10, 1, 1, 30, 1], [10, 11, 12, 30, 31]
    assert [step.rows for step in trace.steps] == rows and [step.context for step in trace.steps] == context
    seconds = [1 + r / 2 + c / 4 for r, c in zip(rows, context, strict=True)]
    assert [step.seconds for step in trace.steps] == seconds
    assert trace.starts == [1.0, 1 + seconds[0], 1 + sum(seconds[:2]), 50.0, 50 + seconds[3]]
    assert trace.ends == {0: 1 + sum(seconds[:3]), 1: 50 + sum(seconds[3:])}


def test_simulated_samples_differ_and_repeat() -> None:
    def texts(seed: int) -> list[list[int]]:
        engine = small_engine()
        engine.add_request([1, 2, 3], replace(Decoding(samples=4).params(6), seed=seed))
        while not (outputs := engine.step()):
            pass
        return [completion.token_ids for completion in outputs[0].outputs]

    assert texts(1) == texts(1)
    assert len({tuple(text) for text in (*texts(1), *texts(2))}) == 8


def test_a_benchmarks_cache_is_not_saved(tmp_path: Path) -> None:
    engine = small_engine()
    for call in (engine.save_prefix_cache, engine.load_prefix_cache):
        with pytest.raises(ConfigError, match="benchmark"):
            call(tmp_path / "file")


# --- what follows ---


def test_figures_worked_out_by_hand() -> None:
    def step(seconds: float, waiting: int, tokens: int, **others: int) -> Step:
        values = dict.fromkeys(("context", "reserved", "internal"), 0) | {"rows": 4, "running": 2}
        values |= {"unshared": 4, "blocks": 4}
        return Step(seconds=seconds, waiting=waiting, tokens=tokens, **(values | others))

    trace = Trace(100, max_num_batched_tokens=10)
    trace.steps = [
        step(5, 0, 10),  # nobody waits
        step(5, 1, 20, rows=10),  # for the step's rows are used up, not the memory
        step(1, 1, 80, reserved=10, running=3),
        step(3, 2, 60, internal=20, running=5, unshared=8),
        step(4, 0, 50),
    ]
    trace.starts = [0, 5, 10, 11, 14]
    trace.ends = {0: 11.0, 1: 14.0, 2: 18.0}
    summed = figures("x", trace, [Arrival(1.0, 5, 10), Arrival(4.0, 5, 4), Arrival(8.0, 5, 2)])
    assert (summed.tokens, summed.reserved, summed.internal) == pytest.approx((0.65, 0.025, 0.15))
    assert summed.external == pytest.approx(0.175) and summed.waste == pytest.approx(0.35)
    assert summed.running == pytest.approx(4.5) and summed.saturated
    assert summed.throughput == 2 / 4
    assert summed.latency == pytest.approx((10 / 10 + 10 / 4 + 10 / 2) / 3)
    assert summed.sharing == pytest.approx(1 - 4 / 7)
    del trace.ends[2]
    with pytest.raises(RuntimeError, match="3 requests were made, but 2 finished"):
        figures("x", trace, [Arrival(1.0, 5, 10)] * 3)


def test_the_fit_finds_the_costs_again() -> None:
    rng = np.random.default_rng(0)
    rows, context = rng.integers(1, 500, 200).tolist(), rng.integers(1, 15_000, 200).tolist()
    for model in (CostModel(1e-2, 4e-4, 3e-6), CostModel(0.0, 4e-4, 0.0)):
        found = fit(rows, context, [model.seconds(r, c) for r, c in zip(rows, context, strict=True)])
        assert [found.step, found.row, found.context] == pytest.approx(
            [model.step, model.row, model.context], rel=1e-6, abs=1e-12
        )
    falling = fit([1, 2, 3, 4], [9, 9, 9, 9], [4.0, 3.0, 2.0, 1.0])
    assert min(falling.step, falling.row, falling.context) >= 0


def test_the_papers_figures_are_bars() -> None:
    for published in paper.FIGURES.values():
        shares = [published.tokens, published.reserved, published.internal, published.external]
        assert sum(share for share in shares if share is not None) <= 100.1
    assert paper.FIGURES["max"].running["sharegpt"] == paper.SLOTS // paper.MAX_MODEL_LEN


def test_paging_is_worth_what_it_should_be() -> None:
    found = _Runner(Setting(), lambda note: None).compare(SHAREGPT, 240, 3.4)
    ours, others = found.paged, found.contiguous
    assert ours.saturated and ours.waste < 0.04 and ours.internal < 0.02
    assert ours.running >= 2 * others["max"].running
    assert ours.running >= 1.5 * others["pow2"].running
    assert ours.running > others["oracle"].running
    assert others["max"].running == pytest.approx(paper.FIGURES["max"].running["sharegpt"])
    for name, theirs in others.items():  # the baselines are the paper's, or near it
        assert 100 * theirs.tokens == pytest.approx(paper.FIGURES[name].tokens, abs=3)
        assert ours.throughput > theirs.throughput


# --- the command ---


def test_the_command_reports_draws_and_repeats(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = ["bench", "memory", "--requests", "12", "--workload", "alpaca", "--num-blocks", "1000"]
    shown = mini_vllm(*command, "--png", tmp_path / "bars.png")
    assert shown.returncode == 0, shown.stderr
    for words in ("16,000 tokens", "paged", "oracle", "132.44", "37.56 %", "among beams", "3.58"):
        assert words in shown.stdout
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
    told = json.loads(mini_vllm(*command, "--json").stdout)
    here = measure(Setting(workload="alpaca", requests=12, num_blocks=1000), lambda note: None)
    assert told == json.loads(json.dumps(here.as_json()))
    assert told["schemes"]["contiguous"]["max"]["name"] == "max" and len(told["rates"]) == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--workload", "x"], "no workload 'x'; use sharegpt or alpaca"),
        (["--requests", "0"], "requests is 0; it must be from 1 to 100,000"),
        (["--requests", "100000000"], "requests is 100000000"),
        (["--rate", "inf"], "rate is inf"),
        (["--rate", "1e-300"], "rate is 1e-300"),
        (["--seed", str(2**64)], "seed is 18446744073709551616"),
        (["--block-size", str(10**12)], "block_size is 1000000000000"),
        (["--num-blocks", "0"], "num_blocks is 0"),
        (["--num-blocks", str(10**12)], "num_blocks is 1000000000000"),
        (["--max-model-len", str(10**12)], "max_model_len is 1000000000000"),
        (["--max-num-batched-tokens", str(10**12)], "max_num_batched_tokens is 1000000000000"),
        (["--quantization", "int8"], "quantization is 'int8', but a simulation has no weights; add --real"),
        (["--quantization", "none", "--json"], "quantization is 'none'"),
        (["--rate", "-1"], "rate is -1"),
        (["--rate", "nan"], "rate is nan"),
        (["--seed", "-1"], "seed is -1"),
        (["--block-size", "0"], "block_size is 0"),
        (["--num-blocks", "9"], "the pool holds 144 tokens"),
        (["--max-model-len", "100"], "max_model_len is 100"),
        (["--max-model-len", "2500"], "6 contiguous pieces of 4,096"),
        (["--max-num-batched-tokens", "3"], "max_num_batched_tokens 3"),
        (["--real", "absent"], "no model 'absent'"),
        (["--requests", "2", "--png", "/absent/x.png"], "/absent/x.png"),
    ],
)
def test_wrong_settings_are_refused(options: list[str], words: str) -> None:
    result = mini_vllm("bench", "memory", *options)
    assert result.returncode == 1 and words in result.stderr, result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.real_model
def test_a_real_model_runs(tmp_path: Path) -> None:
    from conftest import find_real_model

    result = mini_vllm(
        "bench", "memory", "--workload", "alpaca", "--requests", "4", "--real", find_real_model(), "--json"
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["rates"] == [] and report["cost"]["row"] > 0
    assert report["cost"] != {"step": COST.step, "row": COST.row, "context": COST.context}
