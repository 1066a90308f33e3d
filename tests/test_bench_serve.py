"""``bench serve``: its figures against arithmetic by hand, and its client against servers of many kinds."""

import asyncio
import json
import math
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from helpers_server import MODEL, live_server

from minivllm.bench.serving.client import Client, Endpoint
from minivllm.bench.serving.figures import Figures, Spread, Trace, parse_goals
from minivllm.bench.serving.load import ServeReport, measure_server, run_load
from minivllm.bench.serving.plot import save_plot
from minivllm.bench.serving.workload import Planned, Workload, words
from minivllm.errors import ConfigError

T = TypeVar("T")

# --- figures ---


def test_figures_of_three_requests() -> None:
    """Readings, and by hand what comes of them."""
    traces = [
        # ttft 500 ms; gaps 100, 100, 200 ms; 5 tokens: (0.9 − 0.5) / 4 a token; 1000 ms in all
        Trace(10.0, [10.5, 10.6, 10.7, 10.9], 11.0, prompt_tokens=7, completion_tokens=5),
        # ttft 300 ms; a gap of 1000 ms; 2 tokens: 1000 ms a token; 1500 ms in all
        Trace(10.5, [10.8, 11.8], 12.0, prompt_tokens=9, completion_tokens=2),
        Trace(10.2, [10.3], 14.0, error="503 busy"),
    ]
    figures = Figures.of(traces, {"ttft": 400.0})
    assert figures.seconds == pytest.approx(4.0)
    assert (figures.completed, figures.failed, figures.errors) == (2, 1, {"503 busy": 1})
    assert (figures.prompt_tokens, figures.output_tokens, figures.output_tokens_counted) == (16, 7, True)
    assert figures.request_throughput == pytest.approx(2 / 4)
    assert figures.output_throughput == pytest.approx(7 / 4)
    assert figures.total_throughput == pytest.approx(23 / 4)
    assert figures.concurrency == pytest.approx((1.0 + 1.5 + 3.8) / 4)
    assert figures.goodput == pytest.approx(1 / 4)
    expected = {"ttft": [300, 500], "tpot": [100, 1000], "itl": [100, 100, 200, 1000], "e2e": [1000, 1500]}
    for name, values in expected.items():
        spread = figures.latencies[name]  # type: ignore[index]
        assert spread is not None
        assert spread.mean == pytest.approx(sum(values) / len(values))
        for share, value in ((0.5, spread.p50), (0.9, spread.p90), (0.99, spread.p99)):
            assert value == pytest.approx(interpolated(values, share))


def interpolated(values: Sequence[float], share: float) -> float:
    """The percentile by its definition: the place between the neighbours in order."""
    place = share * (len(values) - 1)
    low, rest = int(place), place - int(place)
    ordered = sorted(values)
    return ordered[low] + rest * (ordered[min(low + 1, len(values) - 1)] - ordered[low])


def test_spread_of_a_hundred() -> None:
    spread = Spread.of([i / 1000 for i in range(101)])
    assert spread is not None
    assert (spread.mean, spread.p50, spread.p90, spread.p99) == pytest.approx((50, 50, 90, 99))
    assert Spread.of([]) is None


def test_a_server_that_counts_nothing() -> None:
    figures = Figures.of([Trace(0.0, [1.0, 2.0, 4.0], 5.0), Trace(0.0, [], 5.0)])
    assert figures.prompt_tokens is figures.total_throughput is figures.goodput is None
    assert (figures.output_tokens, figures.output_tokens_counted) == (3, False)
    assert figures.latencies["tpot"] == Spread(1500.0, 1500.0, 1500.0, 1500.0)


def test_only_failures_have_no_latencies() -> None:
    figures = Figures.of([Trace(0.0, [0.5], 2.0, error="a"), Trace(0.0, [], 0.0, error="a")], {"ttft": 1e9})
    assert (figures.failed, figures.errors, figures.goodput, figures.output_tokens) == (2, {"a": 2}, 0.0, 0)
    assert set(figures.latencies.values()) == {None}


@pytest.mark.parametrize(
    ("goals", "kept"),
    [
        ({"ttft": 500.0}, True),
        ({"ttft": 499.0}, False),
        ({"itl": 200.0, "tpot": 100.1}, True),
        ({"itl": 199.0}, False),  # the longest gap
        ({"tpot": 99.0, "itl": 200.0}, False),
        ({"e2e": 999.0}, False),
    ],
)
def test_goals(goals: Any, kept: bool) -> None:
    trace = Trace(0.0, [0.5, 0.6, 0.7, 0.9], 1.0, completion_tokens=5)
    assert trace.keeps({name: limit + 1e-6 for name, limit in goals.items()}) is kept
    trace.error = "x"
    assert not trace.keeps(goals)


def test_goals_in_words() -> None:
    assert parse_goals(["ttft:500 itl:50", "e2e:1e3,tpot:2.5"]) == {
        "ttft": 500, "itl": 50, "e2e": 1000, "tpot": 2.5,
    }  # fmt: skip
    assert parse_goals([]) == {}
    for text in ("ttft", "ttft:", "ttft:-1", "ttft:nan", "speed:5", "ttft=5"):
        with pytest.raises(ConfigError, match="is no goal"):
            parse_goals([text])


# --- workloads ---


def test_arrivals_are_a_poisson_process() -> None:
    requests = Workload(20_000, request_rate=4.0, seed=3).requests()
    times = [request.at for request in requests]
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == 0.0 and min(gaps) >= 0
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 4, rel=0.03)
    # Of an exponential distribution: P(gap > t) = exp(-t / mean)
    for t in (0.1, 0.25, 0.5, 1.0):
        assert sum(gap > t for gap in gaps) / len(gaps) == pytest.approx(math.exp(-4 * t), abs=0.015)
    assert all(request.at == 0.0 for request in Workload(5).requests())


def test_lengths() -> None:
    fixed = Workload(10, input_len=7, output_len=9).requests()
    assert {(r.input_len, r.output_len) for r in fixed} == {(7, 9)}
    spread = Workload(20_000, input_len=200, output_len=50, lengths="sharegpt").requests()
    for values, mean in (([r.input_len for r in spread], 200), ([r.output_len for r in spread], 50)):
        assert min(values) >= 1 and max(values) <= 4 * mean
        assert 0.85 * mean < sum(values) / len(values) < 1.02 * mean, "the tail is cut"
        # Half of a log-normal of sigma 1 lies below mean × exp(-1/2)
        assert sorted(values)[len(values) // 2] == pytest.approx(mean * math.exp(-0.5), rel=0.05)


def test_a_seed_is_a_workload() -> None:
    a, again, b = (Workload(50, 2.0, lengths="sharegpt", seed=seed).requests() for seed in (1, 1, 2))
    assert a == again != b
    prompts = {words(request.seed, 20) for request in a}
    assert len(prompts) == 50 and all(len(prompt.split()) == 20 for prompt in prompts)


@pytest.mark.parametrize(
    "values",
    [{"num_prompts": 0}, {"request_rate": 0.0}, {"request_rate": math.nan}, {"max_concurrency": 0},
     {"input_len": 0}, {"output_len": 0}, {"seed": -1}],
)  # fmt: skip
def test_workloads_that_are_none(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        Workload(**{"num_prompts": 1} | values)


def test_requests_leave_when_they_are_due_and_there_is_room() -> None:
    """On a clock that only goes on when everyone waits for it."""
    now, under_way, most, sent = 0.0, 0, 0, []

    async def run(limit: int | None) -> list[Trace]:
        sleepers: list[tuple[float, asyncio.Future[None]]] = []

        async def sleep(seconds: float) -> None:
            future = asyncio.get_running_loop().create_future()
            sleepers.append((now + seconds, future))
            await future

        async def ask(request: Planned) -> Trace:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            sent.append((request.seed, now))
            await sleep(10.0)
            under_way -= 1
            return Trace(now, prompt_tokens=request.seed)

        async def time_passes() -> None:
            nonlocal now
            while True:
                for _ in range(20):
                    await asyncio.sleep(0)
                if not sleepers:
                    return
                sleepers.sort(key=lambda sleeper: sleeper[0])
                now, future = sleepers.pop(0)
                future.set_result(None)

        requests = [Planned(float(i), 1, 1, i) for i in range(5)]
        load = asyncio.ensure_future(run_load(ask, requests, limit, clock=lambda: now, sleep=sleep))
        await time_passes()
        return await load

    assert [t.prompt_tokens for t in asyncio.run(run(None))] == [0, 1, 2, 3, 4]
    assert sent == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)] and most == 5
    now, most = 0.0, 0
    sent.clear()
    asyncio.run(run(2))
    assert sent == [(0, 0.0), (1, 1.0), (2, 10.0), (3, 11.0), (4, 20.0)] and most == 2


# --- the client, against a server whose clock it reads ---


class Scripted:
    """A tiny OpenAI server, whose clock goes on as it sends: no faster than the client reads it.

    Args:
        script: the events of each answer, and the seconds that pass before each. Bytes are sent as they are.
        refused: fields that are a 400.
        tokens: of a prompt, as the server counts; None: it does not.
    """

    def __init__(
        self,
        script: Sequence[tuple[float, Any]],
        refused: Sequence[str] = (),
        tokens: Callable[[int], int] | None = lambda num_words: 3 * num_words + 20,
    ) -> None:
        self.bodies: list[Any] = []
        self.headers: list[Any] = []
        self._now = 100.0
        self._script = script
        self._refused = refused
        self._tokens = tokens

    def clock(self) -> float:
        self._read.set()
        return self._now

    async def use(self, do: Callable[[Client], Awaitable[T]], endpoint: Endpoint, model: str | None) -> T:
        """What is done with a client of this server."""
        self._read = asyncio.Event()  # the clock, since the last event
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/{endpoint:.*}", self._answer)
        async with TestServer(app) as server:
            return await do(Client(f"{server.make_url('/v1/')}", model, endpoint, "key", clock=self.clock))

    async def _models(self, request: web.Request) -> web.Response:
        self.headers.append(request.headers)
        return web.json_response({"data": [{"id": "fake"}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.headers.append(request.headers)
        body = await request.json()
        self.bodies.append((request.path, body))
        for name in self._refused:
            if name in body:
                return web.json_response({"error": {"message": f"no {name} here"}}, status=400)
        response = web.StreamResponse()
        await response.prepare(request)
        for seconds, event in self._events(body):
            self._now += seconds
            self._read.clear()
            await response.write(event)
            await self._read.wait()
        return response

    def _events(self, body: Any) -> Iterator[tuple[float, bytes]]:
        text = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        for seconds, event in self._script:
            if event == "usage":
                if self._tokens is None:
                    continue
                prompt = self._tokens(len(text.split()))
                event = {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": 4}}
            yield seconds, event if isinstance(event, bytes) else b"data: %s\n\n" % json.dumps(event).encode()


def text(piece: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": piece, "finish_reason": None}]}


def delta(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": None}


DONE = (0.0, b"data: [DONE]\n\n")
COMPLETION = [(0.25, text("a")), (0.5, text("b")), (0.0, b": a comment\n\n"), (0.125, text("")),
              (0.125, text("c d")), (0.5, "usage"), DONE]  # fmt: skip
CHAT = [(0.25, delta(role="assistant", content="")), (0.25, delta(reasoning_content="a")),
        (0.5, delta(content="b")), (0.5, delta()), (0.25, "usage"), DONE]  # fmt: skip


def ask(server: Scripted, endpoint: Endpoint = "completions", request: Planned | None = None) -> Trace:
    async def prepare_and_ask(client: Client) -> Trace:
        async with client:
            await client.prepare()
            return await client.ask(request or Planned(0.0, 320, 4, 5))

    return asyncio.run(server.use(prepare_and_ask, endpoint, None))


@pytest.mark.parametrize(
    ("endpoint", "script", "times", "seconds"),
    [("completions", COMPLETION, [0.25, 0.75, 1.0], 1.5), ("chat", CHAT, [0.5, 1.0], 1.75)],
)
def test_times_of_a_stream(endpoint: Endpoint, script: Any, times: list[float], seconds: float) -> None:
    server = Scripted(script)
    trace = ask(server, endpoint)
    assert trace.error is None
    assert [time - trace.sent_at for time in trace.piece_times] == times
    assert trace.e2e == seconds and trace.ttft == times[0] and trace.completion_tokens == 4
    assert all(headers["authorization"] == "Bearer key" for headers in server.headers)


def test_prompts_are_as_long_as_the_server_counts() -> None:
    """Three tokens a word and 20 around them: 100 words are 320."""
    server = Scripted(COMPLETION)
    trace = ask(server)
    path, body = server.bodies[-1]
    assert path == "/v1/completions" and trace.prompt_tokens == 320
    assert len(body.pop("prompt").split()) == 100
    assert body == {
        "model": "fake", "max_tokens": 4, "temperature": 0.0, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert ask(server, request=Planned(0.0, 5, 4, 5)).prompt_tokens == 23, "at least a word"


@pytest.mark.parametrize(
    "refused", [(), ("ignore_eos",), ("stream_options",), ("ignore_eos", "stream_options")]
)
def test_fields_that_a_server_does_not_take_are_left_out(refused: Sequence[str]) -> None:
    server = Scripted(COMPLETION, refused, tokens=None if "stream_options" in refused else len_plus_one)
    trace = ask(server)
    assert trace.error is None
    taken = {"ignore_eos", "stream_options"} - set(refused)
    assert server.bodies[-1][1].keys() & {"ignore_eos", "stream_options"} == taken
    if "stream_options" in refused:
        assert trace.prompt_tokens is None and trace.output_tokens == 3
        assert len(server.bodies[-1][1]["prompt"].split()) == 320


def len_plus_one(num_words: int) -> int:
    return num_words + 1


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ([(0.25, text("a"))], "without [DONE]"),
        ([(0.25, text("a")), (0.0, {"error": {"message": "out of\nmemory"}}), DONE], "out of memory"),
        ([(0.0, b"event: error\ndata: {\"error\": {\"message\": \"it broke\"}}\n\n")], "it broke"),
        ([(0.0, b"data: {]\n\n"), DONE], "not as OpenAI's"),
        ([(0.0, b"data: [1]\n\n"), DONE], "not as OpenAI's"),
        ([(0.0, b"data: 5\n\n"), DONE], "not as OpenAI's"),
        ([(0.0, {"choices": [], "usage": {"prompt_tokens": None, "completion_tokens": 1}}), DONE], "not as"),
    ],
)  # fmt: skip
def test_streams_that_break(script: Any, words: str) -> None:
    async def send(client: Client) -> Trace:
        async with client:
            return await client.send("a", 1)

    trace = asyncio.run(Scripted(script).use(send, "completions", "m"))
    assert trace.error is not None and words in trace.error
    with pytest.raises(ConfigError, match="does not answer a first request"):
        ask(Scripted(script))


def test_servers_that_are_none() -> None:
    async def prepare(url: str) -> None:
        async with Client(url, None, "chat") as client:
            await client.prepare()

    async def prepare_with(answer: Any) -> None:
        async def models(_: web.Request) -> web.Response:
            return web.json_response(answer, status=418)

        app = web.Application()
        app.router.add_get("/v1/models", models)
        async with TestServer(app) as server:
            await prepare(str(server.make_url("")))

    for url in ("", "127.0.0.1:8000", "ftp://x", "http://", "http://x:99999", "http://[::"):
        with pytest.raises(ConfigError, match="is no address"):
            asyncio.run(prepare(url))
    with pytest.raises(ConfigError, match="cannot be reached"):
        asyncio.run(prepare("http://127.0.0.1:9"))
    for answer in ({}, {"data": []}, [], {"error": "who are you?"}):
        with pytest.raises(ConfigError, match="names no model: 418"):
            asyncio.run(prepare_with(answer))


# --- a whole measurement of our own server ---


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_our_server(endpoint: Endpoint, tmp_path: Path) -> None:
    workload = Workload(12, 200.0, 4, input_len=60, output_len=9)
    done: list[None] = []
    with live_server(api_keys=("secret",)) as live:
        client = Client(live.url, None, endpoint, "secret")
        report, traces = asyncio.run(
            measure_server(client, workload, 2, {"e2e": 1e9}, lambda: done.append(None))
        )
        assert live.engine.metrics().finished_requests == 2 + 2 + 12
        live.wait_until_idle()
    figures = report.figures
    assert (figures.completed, figures.failed, len(done), len(traces)) == (12, 0, 12, 12)
    assert figures.output_tokens == 12 * 9 and figures.output_tokens_counted
    assert report.calibrated and report.ignore_eos and report.model == MODEL
    assert figures.prompt_tokens is not None
    assert 0.9 * 60 <= figures.prompt_tokens / 12 <= 1.1 * 60, "its tokens are bytes, five or six a word"
    assert figures.goodput == figures.request_throughput > 0
    # No pieces are lost: what came between the first and the last are the gaps.
    assert sum(len(trace.itl) + 1 for trace in traces) <= 12 * 9
    for trace in traces:
        assert trace.ttft is not None and 0 < trace.ttft <= trace.e2e
        assert sum(trace.itl) == pytest.approx(trace.piece_times[-1] - trace.piece_times[0])
    json.dumps(report.as_json(), allow_nan=False)
    picture = tmp_path / "plot.png"
    save_plot(report, traces, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_refused_requests_are_counted_and_nothing_else_fails() -> None:
    """Prompts beyond the context, which log-normal lengths bring."""
    workload = Workload(30, input_len=600, output_len=2, lengths="sharegpt", seed=1)
    too_long = sum(request.input_len > 1024 + 100 for request in workload.requests())
    short = sum(request.input_len < 1024 - 100 for request in workload.requests())
    with live_server() as live:
        report, _ = asyncio.run(
            measure_server(Client(live.url, None, "completions"), workload, 0, {}, lambda: None)
        )
        live.wait_until_idle()
    figures = report.figures
    assert 0 < too_long <= figures.failed and 0 < short <= figures.completed
    assert figures.completed + figures.failed == 30
    assert all(message.startswith("400 ") for message in figures.errors)


def test_a_picture_of_nothing_and_one_that_cannot_be_written(tmp_path: Path) -> None:
    script = [(0.0, {"error": {"message": "x"}}), DONE]
    good = Scripted(COMPLETION)

    async def measure(client: Client) -> tuple[ServeReport, list[Trace]]:
        return await measure_server(client, Workload(2), 0, {"ttft": 5.0}, lambda: None)

    report, traces = asyncio.run(good.use(measure, "completions", "m"))
    for trace in traces:
        trace.error = "x"
    save_plot(report, traces, tmp_path / "a.png")
    with pytest.raises(ConfigError, match="cannot be written"):
        save_plot(report, traces, tmp_path / "nowhere" / "a.png")
    with pytest.raises(ConfigError, match="does not answer a first request: x"):
        asyncio.run(Scripted(script).use(measure, "completions", "m"))


def test_the_command(tmp_path: Path) -> None:
    picture = tmp_path / "plot.png"
    with live_server() as live:

        def bench(*options: str) -> "subprocess.CompletedProcess[str]":
            code = "from minivllm.cli import main; main()"
            command = [sys.executable, "-c", code, "bench", "serve", "--base-url", live.url, *options]
            environment = os.environ | {"COLUMNS": "120"}
            return subprocess.run(
                command, capture_output=True, text=True, timeout=120, check=False, env=environment
            )

        sizes = ("--num-prompts", "6", "--input-len", "40", "--output-len", "5", "--seed", "3")
        table = bench(*sizes, "--goodput", "ttft:99999 itl:99999", "--plot", str(picture))
        assert table.returncode == 0, table.stderr
        for word in ("TTFT", "E2E", "p99", "tokens/s", "goodput", "really", "0 of 6"):
            assert word in table.stdout, table.stdout
        assert picture.read_bytes().startswith(b"\x89PNG")
        data = json.loads(bench(*sizes, "--json", "--endpoint", "chat").stdout)
        assert data["figures"]["completed"] == 6 and data["figures"]["output_tokens"] == 30
        assert data["workload"]["request_rate"] is None and data["endpoint"] == "chat"
        assert data["figures"]["latencies"]["ttft"].keys() == {"mean", "p50", "p90", "p99"}
        wrong = bench("--num-prompts", "0")
        assert wrong.returncode == 1 and "number of prompts is 0" in wrong.stderr
