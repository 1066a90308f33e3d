"""Connections that bring no request, too many of them, and what is no HTTP."""

import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import h11
import httpx
import pytest
from helpers_models import write_tiny_model
from helpers_server import Live, eventually, live_server, start_server

from minivllm.errors import ConfigError
from minivllm.server import connections
from minivllm.server.run import listen
from minivllm.server.settings import ServerSettings

GET = b"GET /version HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(api_keys=("key",)) as live:
        yield live


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def until_closed(connection: socket.socket) -> bytes:
    answer = b""
    while piece := connection.recv(2**16):
        answer += piece
    return answer


def assert_error(answer: bytes, status: int) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and b"x-request-id: req-" in head.lower()
    assert json.loads(body)["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", None),
        (b"G", 408),
        (GET + b"X-", 408),
        (POST + b"content-length: 5", 408),
        (GET + b"\r\n" + GET, 408),  # half a head after a whole request
        (POST + b"content-length: 1000\r\n\r\n{", None),  # has its 401, and would send the body for ever
    ],
)
def test_a_connection_without_a_request_ends(
    live: Live, monkeypatch: pytest.MonkeyPatch, sent: bytes, status: int | None
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    with connect(live.port) as connection:
        connection.sendall(sent)
        answer = until_closed(connection)
    if status is not None:
        assert_error(answer[answer.rindex(b"HTTP/1.1") :], status)
    eventually(lambda: not live.server.server_state.connections)


def test_a_head_that_comes_byte_by_byte_ends(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    with connect(live.port) as connection, pytest.raises(OSError):
        until = time.monotonic() + 20
        connection.sendall(GET + b"x: ")
        while time.monotonic() < until:
            connection.sendall(b"a")
            time.sleep(0.01)


def test_an_answer_may_take_longer_than_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.1)
    with live_server() as live, live.http as http:
        live.gate.seconds = 0.03
        for stream in (False, True):
            answer = http.post("/v1/completions", json={"prompt": "a", "stream": stream})
            assert answer.status_code == 200 and answer.elapsed.total_seconds() > 0


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # no host
        GET + b"content-length: x\r\n\r\n",
        GET + b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
        POST + b"transfer-encoding: gzip\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_in_the_same_shape(live: Live, data: bytes) -> None:
    with connect(live.port) as connection:
        connection.sendall(data)
        answer = until_closed(connection)
    assert_error(answer, 501 if b"HTTP/1.1 501" in answer else 400)


def test_websockets_are_not_offered(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    headers = {"connection": "Upgrade", "upgrade": "websocket", "authorization": "Bearer key"}
    with live.http as http:
        assert http.get("/v1/models", headers=headers).status_code == 200
    assert "pip install" not in caplog.text


def test_too_many_connections(tmp_path: Path) -> None:
    """They are sent away, with one line in the log, and when they are gone the server is as before."""
    model = write_tiny_model(tmp_path)
    process, url = start_server(model)
    try:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (80, 80))
        port = int(url.rsplit(":", 1)[1])
        with ExitStack() as stack:
            opened = [stack.enter_context(connect(port)) for _ in range(120)]
            for connection in opened:
                with suppress(OSError):
                    connection.sendall(GET + b"X-")
            opened[-1].settimeout(20)
            with suppress(ConnectionResetError):
                assert opened[-1].recv(1) == b""

        def serves() -> bool:
            with suppress(httpx.TransportError):
                return httpx.get(f"{url}/health").status_code == 200
            return False

        eventually(serves)
    finally:
        process.terminate()
        process.wait(20)
    assert process.stderr is not None
    log = process.stderr.read()
    assert log.count("too many connections") == 1 and "Traceback" not in log and log.count("\n") < 10


def test_of_two_servers_on_one_port_the_second_says_which() -> None:
    """Before either has begun to load its model."""
    first = listen(ServerSettings("m", port=0))
    port = first.getsockname()[1]
    with first, pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already"):
        listen(ServerSettings("m", port=port))
    code = (
        "from minivllm.server.run import listen; from minivllm.server.settings import ServerSettings; "
        f"listen(ServerSettings('m', port={port}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)  # it is free again


@pytest.mark.parametrize("request_line", [b"GET / HTTP/1.1", b"GET / HTTP/1.0", b"HEAD / HTTP/1.1"])
@pytest.mark.parametrize("headers", [[], [(b"content-length", b"14")]])
def test_the_short_way_for_pieces_is_h11s(request_line: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    """Two answers on one connection, where it goes on: the first in pieces, the second of a known length."""
    pieces = [b"", b""] if request_line.startswith(b"HEAD") else [b"data: a\n\n", b"", b"\xff" * 5]

    def answered(connection: h11.Connection) -> list[bytes | None]:
        sent: list[bytes | None] = []
        for framing in (headers, [(b"content-length", b"2")]):
            connection.receive_data(request_line + b"\r\nhost: x\r\n\r\n")
            assert type(connection.next_event()) is h11.Request
            assert type(connection.next_event()) is h11.EndOfMessage
            sent.append(connection.send(h11.Response(status_code=200, headers=framing, reason=b"OK")))
            body = pieces if framing is headers else [piece[:2] for piece in pieces[:1]]
            sent += [connection.send(h11.Data(data=piece)) for piece in body]
            sent.append(connection.send(h11.EndOfMessage()))
            if connection.our_state is not h11.DONE:
                break
            connection.start_next_cycle()
        return sent

    expected = answered(h11.Connection(h11.SERVER))
    assert answered(connections.Framing(h11.SERVER)) == expected
    with pytest.raises(h11.LocalProtocolError):
        connections.Framing(h11.SERVER).send(h11.Data(data=b"before any answer"))
