"""AsyncEngine: an engine in a thread, for an event loop, over the fake model."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fakes import fake_continuation
from helpers_engine import Setup, assert_idle
from helpers_server import Gate

from minivllm.engine import async_engine
from minivllm.engine.async_engine import AsyncEngine, EngineStoppedError, RequestTimes, merged
from minivllm.engine.inference_engine import InferenceEngine
from minivllm.engine.outputs import CompletionOutput, Logprob, RequestOutput
from minivllm.errors import RequestError
from minivllm.sampling_params import SamplingParams

SETUP = Setup(eos=(), budget=16)


def with_engine(
    test: Callable[[AsyncEngine, Gate], Awaitable[None]], setup: Setup = SETUP, observer: Any = None
) -> InferenceEngine:
    """Run the test, close the engine, and see that nothing is left."""
    engine = setup.engine()
    gate = Gate(engine)

    async def run() -> None:
        running = AsyncEngine(engine, observer)
        try:
            await asyncio.wait_for(test(running, gate), 30)
        finally:
            gate.open()
            await running.close()

    asyncio.run(run())
    engine.kv_cache.check_integrity()
    return engine


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


def test_pieces_and_wholes_are_the_same() -> None:
    async def test(engine: AsyncEngine, gate: Gate) -> None:
        prompts = [[1, 2, 3], [4] * 40, [5]]
        wishes = [params(30), params(7), params(1)]
        async with engine.requests(prompts, wishes, whole=True) as answers:
            wholes = await answers.all()
        for output, prompt, wish in zip(wholes, prompts, wishes, strict=True):
            expected = fake_continuation(prompt, wish.max_tokens or 0, frozenset())
            assert output.outputs[0].token_ids == expected and output.finished
        pieces: dict[str, list[int]] = {}
        async with engine.requests(prompts, wishes) as answers:
            async for outputs in answers:
                assert len({output.request_id for output in outputs}) == len(outputs)
                for output in outputs:
                    pieces.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
            assert [pieces[i] for i in answers.request_ids] == [o.outputs[0].token_ids for o in wholes]

    assert_idle(with_engine(test))


def test_what_is_not_read_is_merged() -> None:
    async def test(engine: AsyncEngine, gate: Gate) -> None:
        async with engine.requests([[1], [2]], [params(200), params(150)]) as answers:
            await until(lambda: not engine.engine.has_unfinished_requests() and answers.complete)
            batches = [outputs async for outputs in answers]
        (outputs,) = batches
        assert [len(o.outputs[0].token_ids) for o in outputs] == [200, 150]
        assert all(output.finished for output in outputs)
        for output, prompt in zip(outputs, ([1], [2]), strict=True):
            tokens = output.outputs[0].token_ids
            assert tokens == fake_continuation(prompt, len(tokens), frozenset())

    with_engine(test)


def test_a_refusal_reaches_the_caller_and_nobody_else() -> None:
    async def test(engine: AsyncEngine, gate: Gate) -> None:
        with pytest.raises(RequestError, match="prompt 2 of 2"):
            async with engine.requests([[1], []], [params(1)] * 2):
                raise AssertionError
        assert engine.num_waiting == 0
        async with engine.requests([[1]], [params(3)], whole=True) as answers:
            assert len((await answers.all())[0].outputs[0].token_ids) == 3

    assert_idle(with_engine(test))


@pytest.mark.parametrize("admitted", [False, True])
def test_leaving_frees_the_blocks(admitted: bool) -> None:
    async def test(engine: AsyncEngine, gate: Gate) -> None:
        gate.close()

        async def ask(prompt: list[int]) -> None:
            async with engine.requests([prompt], [params(100)], whole=True) as answers:
                await answers.all()

        first = asyncio.ensure_future(ask([1] * 50))
        await until(lambda: engine.engine.metrics().num_running == 1)
        second = asyncio.ensure_future(ask([2] * 50))  # its command waits for the step to end
        await until(lambda: engine.num_waiting == 1)
        if admitted:
            gate.step()
            await until(
                lambda: engine.engine.metrics().num_running == 2 or engine.engine.metrics().num_waiting
            )
        for task in (first, second):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        gate.step()  # the one it is in
        await until(lambda: not engine.engine.has_unfinished_requests() and engine.num_waiting == 0)

    assert_idle(with_engine(test))


def test_what_is_told_of_an_idle_engine_is_up_to_date() -> None:
    """However its last request ended, and though no other comes."""

    async def test(engine: AsyncEngine, gate: Gate) -> None:
        def is_idle() -> bool:
            told = engine.snapshot
            return told == engine.engine.metrics() and told.num_running == told.num_waiting == 0

        gate.close()
        leaves = asyncio.ensure_future(_ask(engine))
        await until(lambda: gate.held)
        leaves.cancel()
        gate.step()
        await until(lambda: not engine.engine.has_unfinished_requests())
        await until(is_idle)
        gate.open()
        await _ask(engine)
        await until(is_idle)
        gate.close()
        aborted = asyncio.ensure_future(_ask(engine))
        await until(lambda: engine.engine.metrics().num_running == 1)
        engine.abort_all()
        gate.open()
        await aborted
        await until(is_idle)

    assert_idle(with_engine(test))


def test_a_failed_step_ends_its_requests_and_no_others() -> None:
    async def test(engine: AsyncEngine, gate: Gate) -> None:
        executor: Any = engine.engine.executor
        executor.fail_at = 3
        async with engine.requests([[1]], [params(10)], whole=True) as answers:
            (output,) = await answers.all()
        assert output.outputs[0].finish_reason == "error"
        executor.fail_at = None
        async with engine.requests([[1]], [params(10)], whole=True) as answers:
            (output,) = await answers.all()
        assert output.outputs[0].finish_reason == "length" and engine.health() is None

    assert_idle(with_engine(test))


def test_a_broken_engine_fails_everyone_at_once() -> None:
    async def test(engine: AsyncEngine, gate: Gate) -> None:
        def broken() -> Any:
            raise RuntimeError("a bug")

        gate.close()
        running = asyncio.ensure_future(_ask(engine))
        await until(lambda: engine.engine.metrics().num_running == 1)
        late = asyncio.ensure_future(_ask(engine))
        await until(lambda: engine.num_waiting == 1)
        engine.engine.scheduler.schedule = broken  # type: ignore[method-assign]
        gate.open()
        for task in (running, late, asyncio.ensure_future(_ask(engine))):
            with pytest.raises(EngineStoppedError, match="a bug"):
                await task
        assert "a bug" in (engine.health() or "")

    with_engine(test)


async def _ask(engine: AsyncEngine) -> list[RequestOutput]:
    async with engine.requests([[1]], [params(10)], whole=True) as answers:
        return await answers.all()


def test_closing_fails_what_runs() -> None:
    async def test(engine: AsyncEngine, gate: Gate) -> None:
        gate.close()
        running = asyncio.ensure_future(_ask(engine))
        await until(lambda: engine.engine.metrics().num_running == 1)
        closing = asyncio.ensure_future(engine.close())
        await asyncio.sleep(0)  # it has asked for the end before the engine can finish anything
        gate.open()
        await closing
        with pytest.raises(EngineStoppedError):
            await running
        with pytest.raises(EngineStoppedError):
            await _ask(engine)

    with_engine(test)


def test_abort_all() -> None:
    async def test(engine: AsyncEngine, gate: Gate) -> None:
        gate.close()
        tasks = [asyncio.ensure_future(_ask(engine)) for _ in range(3)]
        await until(lambda: engine.num_waiting + engine.engine.metrics().num_running == 3)
        engine.abort_all()
        gate.open()
        for outputs in await asyncio.gather(*tasks):
            assert outputs[0].outputs[0].finish_reason == "abort"

    assert_idle(with_engine(test))


def test_health_needs_steps_that_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine: AsyncEngine, gate: Gate) -> None:
        monkeypatch.setattr(async_engine, "STALL_SECONDS", 0.05)
        await asyncio.sleep(0.1)
        assert engine.health() is None  # it has nothing to do
        gate.close()
        task = asyncio.ensure_future(_ask(engine))
        await until(lambda: engine.health() is not None)
        gate.open()
        await task
        assert engine.health() is None

    with_engine(test)


def test_what_an_observer_is_told() -> None:
    class Notes:
        def __init__(self) -> None:
            self.rows = 0
            self.outputs: list[tuple[RequestOutput, float | None, int, float, float]] = []

        def step(self, num_tokens: int) -> None:
            self.rows += num_tokens

        def output(self, output: RequestOutput, times: RequestTimes, now: float) -> None:
            self.outputs.append((output, times.first_token_at, times.num_tokens, times.arrived_at, now))

    notes, started = Notes(), time.monotonic()

    async def test(engine: AsyncEngine, gate: Gate) -> None:
        async with engine.requests([[7] * 20], [params(4)], whole=True, arrived_at=started) as answers:
            await answers.all()

    engine = with_engine(test, observer=notes)
    assert notes.rows == engine.metrics().computed_tokens == 20 + 3
    assert [(first is None, n) for _, first, n, _, _ in notes.outputs] == [
        (True, 0), (False, 1), (False, 2), (False, 3),
    ]  # fmt: skip
    for output, _, _, arrived_at, now in notes.outputs:
        assert output.admitted_at is not None and started == arrived_at <= output.admitted_at <= now


def test_merging_keeps_choices_apart() -> None:
    def piece(index: int, text: str, tokens: list[int], reason: Any = None) -> CompletionOutput:
        logprobs = [{token: Logprob(-1.0, 1, None)} for token in tokens]
        return CompletionOutput(index, text, tokens, -1.0 * len(tokens), logprobs, reason)

    def output(*pieces: CompletionOutput, finished: bool = False) -> RequestOutput:
        return RequestOutput("r", None, [1], list(pieces), finished, 0, 0)

    both = merged(
        output(piece(0, "a", [1]), piece(2, "x", [5])),
        output(piece(0, "b", [2, 3], "stop"), piece(1, "y", [6], "stop"), finished=True),
    )
    assert both.finished
    by_index = {c.index: (c.text, c.token_ids, len(c.logprobs or []), c.finish_reason) for c in both.outputs}
    assert by_index == {0: ("ab", [1, 2, 3], 3, "stop"), 1: ("y", [6], 1, "stop"), 2: ("x", [5], 1, None)}
