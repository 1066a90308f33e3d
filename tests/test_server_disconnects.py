"""Clients that leave, do not read, or are cut off: their blocks are free within a step, and nothing hangs."""

import asyncio
import gc
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from helpers_server import MODEL, TEXT, Live, events, eventually, live_server, with_setup

from minivllm.server import run
from minivllm.server.embeddings import Embeddings
from minivllm.server.middleware import BodyLimit
from minivllm.server.settings import ServerSettings


@pytest.fixture
def live() -> Iterator[Live]:
    with live_server(with_setup(max_num_seqs=2)) as live:
        yield live
        live.gate.open()
        live.wait_until_idle()
        assert live.post(TEXT, {"prompt": "a"}).status_code == 200


def request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(data), data)
    )


def connect(live: Live) -> socket.socket:
    return socket.create_connection(("127.0.0.1", live.port), timeout=20)


def drop(connection: socket.socket, hard: bool) -> None:
    """Close it; hard: with a reset, as when the process is killed with unread data."""
    if hard:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("stage", ["connected", "headers", "body"])
def test_before_there_is_a_request(live: Live, stage: str, hard: bool) -> None:
    """llama.cpp#24496, ROCm/ATOM PR#1562, from here on: sockets dropped at every stage."""
    whole = request({"prompt": "a" * 100})
    end = {"connected": 0, "headers": 30, "body": len(whole) - 20}[stage]
    connection = connect(live)
    connection.sendall(whole[:end])
    time.sleep(0.02)
    drop(connection, hard)
    assert live.engine.metrics().num_running == 0


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["queued", "prompt", "answer"])
def test_blocks_are_free_within_a_step(live: Live, stage: str, stream: bool, hard: bool) -> None:
    engine, gate = live.engine, live.gate
    gate.close()
    others = []
    if stage == "queued":  # two others run, which is all that may
        for i in range(2):
            others.append(connect(live))
            others[-1].sendall(request({"prompt": f"other {i}", "max_tokens": 500}))
            eventually(lambda i=i: engine.metrics().num_running + live.num_waiting == i + 1)
        eventually(lambda: gate.held)
        gate.step()
        eventually(lambda: engine.metrics().num_running == 2)
    # Steps of 64 tokens: the prompt takes 10.
    connection = connect(live)
    connection.sendall(request({"prompt": "p" * 600, "max_tokens": 300, "stream": stream}))
    eventually(lambda: engine.metrics().num_running + live.num_waiting == len(others) + 1)
    steps = {"queued": 1, "prompt": 3, "answer": 20}[stage]
    done = gate.num_steps
    gate.step(steps)
    eventually(lambda: gate.num_steps == done + steps and gate.held)
    waiting = int(stage == "queued")
    eventually(lambda: engine.metrics().num_waiting == waiting and engine.metrics().num_running > 0)
    if stream and stage != "queued":
        assert b"200 OK" in connection.recv(1000)

    drop(connection, hard)
    eventually(lambda: live.service.num_open == len(others))
    steps_before = engine.metrics().steps
    gate.step(2)  # the one that was held, and, after the client's requests have been let go, one more
    eventually(lambda: engine.metrics().num_running == len(others) and engine.metrics().num_waiting == 0)
    assert engine.metrics().steps <= steps_before + 2
    if not others:
        assert engine.metrics().num_free_blocks == engine.metrics().num_blocks
        assert engine.metrics().steps == steps_before + 1
    for other in others:
        drop(other, hard)


def test_cancelled_async_calls(live: Live) -> None:
    live.gate.close()

    async def cancel() -> None:
        client = live.async_client
        calls = [
            asyncio.ensure_future(client.completions.create(model=MODEL, prompt="a", max_tokens=500))
            for _ in range(5)
        ]
        while live.service.num_open < 5:
            await asyncio.sleep(0.01)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await client.close()

    asyncio.run(cancel())
    eventually(lambda: live.service.num_open == 0)


def test_a_stream_that_is_closed_in_the_middle(live: Live) -> None:
    stream = live.client.completions.create(model=MODEL, prompt="a", max_tokens=900, stream=True)
    next(stream)
    live.gate.close()
    stream.close()
    eventually(lambda: live.service.num_open == 0)


def test_a_slow_reader_costs_its_answer_and_no_more() -> None:
    """It reads nothing while 4 answers of a megabyte are made, and then everything; or it is killed."""
    body = {"prompt": [f"prompt {i}" for i in range(4)], "max_tokens": 300, "stream": True, "logprobs": 20}
    with live_server(with_setup(num_blocks=100), send_buffer=2**16) as live:
        expected = live.post(TEXT, body | {"stream": False}).json()["choices"]
        for killed in (False, True):
            finished = live.engine.metrics().finished_requests
            reader = socket.socket()
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
            reader.connect(("127.0.0.1", live.port))
            reader.settimeout(20)
            reader.sendall(request(body))
            eventually(lambda f=finished: live.engine.metrics().finished_requests == f + 4)
            # The model has done its part; the answer is on its way, and others are served.
            assert live.engine.metrics().num_free_blocks == live.engine.metrics().num_blocks
            assert live.service.num_open == 1
            assert live.post(TEXT, {"prompt": "a"}).status_code == 200
            if killed:
                drop(reader, hard=True)
                eventually(lambda: live.service.num_open == 0)
                break
            data = b""
            while not data.endswith(b"0\r\n\r\n"):
                piece = reader.recv(2**20)
                assert piece
                data += piece
            reader.close()
            choices = [c for event in _events_of(data) for c in event["choices"]]
            assert len(choices) < 4 * 300 / 2, "unread pieces are merged"
            for choice in expected:
                pieces = [c for c in choices if c["index"] == choice["index"]]
                assert "".join(c["text"] for c in pieces) == choice["text"]
                logprobs = [c["logprobs"]["tokens"] for c in pieces if c["logprobs"]]
                assert [token for piece in logprobs for token in piece] == choice["logprobs"]["tokens"]
        live.wait_until_idle()


def _events_of(response: bytes) -> list[Any]:
    """Events of a chunked HTTP response."""
    _, _, rest = response.partition(b"\r\n\r\n")
    text = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        text += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return events(text.decode())


def test_many_clients_of_whom_some_leave() -> None:
    """Mixed sizes, streams and wholes, a pool too small for all of them; a third leaves at some time."""
    rng = random.Random(0)
    answered: list[str] = []

    async def client(http: httpx.AsyncClient, number: int) -> None:
        for i in range(6):
            body = {
                "prompt": "x" * rng.randrange(1, 200) + f" {number} {i}",
                "max_tokens": rng.randrange(1, 60),
                "stream": rng.random() < 0.5,
                "n": rng.randrange(1, 4),
            }
            call = asyncio.ensure_future(http.post(TEXT, json=body))
            if rng.random() < 0.33:
                await asyncio.wait([call], timeout=rng.random() * 0.2)
                call.cancel()
                await asyncio.wait([call])
                continue
            response = await call
            assert response.status_code == 200, response.text
            answered.append(response.text)
            assert not body["stream"] or events(response.text)

    async def clients(live: Live) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=live.url, timeout=60, limits=limits) as http:
            await asyncio.gather(*(client(http, number) for number in range(32)))

    with live_server(with_setup(num_blocks=48, max_num_seqs=16)) as live:
        live.gate.seconds = 0.001
        asyncio.run(clients(live))
        assert len(answered) > 80 and live.engine.metrics().preemptions > 0
        live.wait_until_idle()


# --- the server's own end ---


def test_draining_finishes_what_was_accepted_and_refuses_the_rest() -> None:
    with live_server() as live:
        live.gate.close()
        with live.http as http, http.stream("POST", TEXT, json={"prompt": "a", "stream": True}) as answer:
            live.loop.call_soon_threadsafe(live.server.drain)
            eventually(live.service.draining.is_set)
            for refused in (live.post(TEXT, {"prompt": "a"}), live.http.get("/health")):
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "shutting_down"
            live.gate.open()
            chunks = events(answer.read().decode())
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        eventually(lambda: live.server.should_exit)


@pytest.mark.parametrize("stream", [False, True])
def test_draining_has_an_end(stream: bool) -> None:
    with live_server(shutdown_timeout=0.2) as live:
        live.gate.close()
        answers: list[httpx.Response] = []
        body = {"prompt": "a", "max_tokens": 500, "stream": stream}
        caller = threading.Thread(target=lambda: answers.append(live.post(TEXT, body)))
        caller.start()
        eventually(lambda: live.engine.metrics().num_running == 1)
        live.gate.step(5)
        live.loop.call_soon_threadsafe(live.server.drain)
        time.sleep(0.4)
        live.gate.step()  # the step in which the engine is ends
        caller.join(20)
        (answer,) = answers
        assert "the server ended" in answer.text
        assert answer.status_code == (200 if stream else 503)
        eventually(lambda: live.server.should_exit)


HALF_BODIES = {
    "announced": request({"prompt": "a" * 100})[:-10],
    "waits to be asked": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
    b"content-length: 100\r\n\r\n",
    "in chunks": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b'transfer-encoding: chunked\r\n\r\n5\r\n{"pro\r\n',
}


@pytest.mark.parametrize("kind", HALF_BODIES)
def test_a_body_that_is_still_being_sent_at_the_end(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with live_server() as live, connect(live) as connection:
        connection.sendall(HALF_BODIES[kind])
        eventually(lambda: live.server.server_state.tasks)
        live.loop.call_soon_threadsafe(live.server.drain)
        answer = b""
        while piece := connection.recv(2**16):
            answer += piece
    answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ") and b"x-request-id" in head.lower()
    assert json.loads(body)["error"]["code"] == "shutting_down"
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_not_read_at_the_end(
    stream: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "LAST_CONNECTIONS_SECONDS", 0.2)
    body = {"prompt": ["a", "b", "c", "d"], "max_tokens": 300, "logprobs": 20, "stream": stream}
    with live_server(with_setup(num_blocks=100), send_buffer=2**16, shutdown_timeout=0.1) as live:
        reader = socket.socket()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        reader.connect(("127.0.0.1", live.port))
        reader.sendall(request(body))
        eventually(lambda: live.engine.metrics().finished_requests == 4)
        live.loop.call_soon_threadsafe(live.server.drain)
        eventually(lambda: live.server.should_exit)
    reader.close()
    assert "Traceback" not in caplog.text and "never retrieved" not in caplog.text


def test_a_route_that_takes_too_long_at_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "LAST_CONNECTIONS_SECONDS", 0.2)
    hurry, answers = threading.Event(), []
    with live_server(shutdown_timeout=0.1) as live:
        monkeypatch.setattr(live.engine, "encode", lambda *_: hurry.wait(20))
        caller = threading.Thread(target=lambda: answers.append(live.post("/tokenize", {"prompt": "a"})))
        caller.start()
        eventually(lambda: live.server.server_state.tasks)
        live.loop.call_soon_threadsafe(live.server.drain)
        caller.join(20)
        hurry.set()
    (answer,) = answers
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "shutting_down"
    assert answer.headers["x-request-id"] and "Traceback" not in caplog.text


@pytest.mark.parametrize("part", ["body", "answer"])
def test_what_fails_while_it_is_cancelled_is_not_mourned(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio would log an error that was never retrieved."""
    complaints: list[Any] = []

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))

        async def fail(*_: Any) -> Any:
            serving.cancel()
            raise RuntimeError("a bug")

        async def forever(*_: Any) -> Any:
            await loop.create_future()

        app: Any
        if part == "body":
            app = BodyLimit(forever, 1000, asyncio.Event())
            monkeypatch.setattr(app, "_read", fail)
        else:
            service: Any = SimpleNamespace(settings=ServerSettings(MODEL))
            body: Any = SimpleNamespace(cache_salt=None, priority=None, encoding_format=None)
            unused: Any = None
            app = Embeddings(service, body, unused, unused, 1)
            monkeypatch.setattr(app, "_answer", fail)
        scope = {"type": "http", "method": "POST", "headers": []}
        serving = asyncio.ensure_future(app(scope, forever, forever))
        with pytest.raises(asyncio.CancelledError):
            await serving

    asyncio.run(serve())
    gc.collect()
    assert not complaints
