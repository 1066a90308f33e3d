"""Clients that leave, do not read, or are cut off: their blocks are free within a step, and nothing hangs."""

import asyncio
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from conftest import find_real_model
from helpers_models import write_tiny_model
from helpers_server import MODEL, Live, events, eventually, live_server, with_setup

TEXT = "/v1/completions"
SERVE = (sys.executable, "-c", "from minivllm.cli import main; main()", "serve")


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
            eventually(lambda i=i: live.service.num_open == i + 1)
        eventually(lambda: engine.metrics().num_running > 0)
        gate.step()
        eventually(lambda: engine.metrics().num_running == 2)
    # Steps of 64 tokens: the prompt takes 10.
    connection = connect(live)
    connection.sendall(request({"prompt": "p" * 600, "max_tokens": 300, "stream": stream}))
    eventually(lambda: live.service.num_open == len(others) + 1)
    steps = {"queued": 1, "prompt": 3, "answer": 20}[stage]
    done = gate.num_steps
    gate.step(steps)
    eventually(lambda: gate.num_steps == done + steps)
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


# --- the server's own end ---


def test_draining_finishes_what_was_accepted_and_refuses_the_rest() -> None:
    with live_server() as live:
        live.gate.close()
        with live.http as http, http.stream("POST", TEXT, json={"prompt": "a", "stream": True}) as answer:
            live.loop.call_soon_threadsafe(live.server.drain)
            eventually(lambda: live.service.draining)
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


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def start_server(model: Path, *options: str) -> tuple["subprocess.Popen[str]", str]:
    """A process that serves, and its address."""
    process = subprocess.Popen(
        [*SERVE, str(model), "--port", "0", "--num-blocks", "64", "--served-model-name", MODEL, *options],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    address = ""
    for line in process.stderr:
        address = address or line.partition("listening on ")[2].partition(",")[0]
        if line.startswith("ready"):
            return process, address
    raise AssertionError(f"it ended with {process.wait()}")


def test_sigterm_ends_it_and_a_taken_port_is_an_error(tiny_model: Path) -> None:
    process, url = start_server(tiny_model, "--api-key", "secret")
    try:
        assert httpx.get(f"{url}/v1/models").status_code == 401
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
        assert client.completions.create(model=MODEL, prompt="hi", max_tokens=4).choices[0].text
        second = subprocess.run(
            [*SERVE, str(tiny_model), "--port", url.rsplit(":", 1)[1]],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert second.returncode == 1 and "cannot listen on 127.0.0.1" in second.stderr
        assert "Traceback" not in second.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stderr is not None and "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()


@pytest.mark.real_model
@pytest.mark.parametrize("twice", [False, True])
def test_sigterm_under_load(twice: bool) -> None:
    model = find_real_model()
    assert model is not None
    process, url = start_server(model, "--shutdown-timeout", "60" if twice else "0.5")
    try:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=30)
        streams = [
            client.completions.create(
                model=MODEL, prompt="Once", max_tokens=240, stream=True, extra_body={"ignore_eos": True}
            )
            for _ in range(4)
        ]
        for stream in streams:
            next(stream)
        process.send_signal(signal.SIGTERM)
        if twice:
            eventually(lambda: httpx.get(f"{url}/health").status_code == 503)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 128 + signal.SIGTERM
        else:
            for stream in streams:
                with pytest.raises(openai.APIError, match="the server ended"):
                    list(stream)
            assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
