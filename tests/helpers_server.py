"""A live server in a thread, over an engine whose steps a test can hold."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import openai
from helpers_engine import Setup, assert_idle

from minivllm.engine.inference_engine import InferenceEngine
from minivllm.server.run import Server, listen
from minivllm.server.service import Service
from minivllm.server.settings import ServerSettings

MODEL = "tiny"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI: Any = [{"role": "user", "content": "Hi"}]
SERVE = (sys.executable, "-c", "from minivllm.cli import main; main()", "serve")
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
#: The fake model never ends by itself, so that tests say how long an answer is.
ENDLESS = Setup(eos=(), chat_template=TEMPLATE)


class Gate:
    """Lets an engine's steps through, or a number of them, or none."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._permits = threading.Semaphore(0)
        self._open = True
        self.num_steps = 0
        self.held = False  #: a step waits to be let through
        self.seconds = 0.0  #: that each step takes more
        executor: Any = engine.executor
        execute = executor.execute

        def gated(*arguments: Any) -> Any:
            if not self._open:
                self.held = True
                self._permits.acquire()
                self.held = False
            self.num_steps += 1
            time.sleep(self.seconds)
            return execute(*arguments)

        executor.execute = gated

    def close(self) -> None:
        self._open = False

    def step(self, count: int = 1) -> None:
        self._permits.release(count)

    def open(self) -> None:
        self._open = True
        self._permits.release()  # for a step that waits


@dataclass
class Live:
    """A server that runs, and ways to talk to it."""

    url: str
    service: Service
    server: Server
    loop: asyncio.AbstractEventLoop
    engine: InferenceEngine
    gate: Gate

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30)

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30)

    @property
    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30)

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def num_waiting(self) -> int:
        """Requests that no step has begun, as the server knows it."""
        assert self.service._engine is not None
        return self.service._engine.num_waiting

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        with self.http as http:
            return http.post(path, json=body, **more)

    def wait_until_idle(self) -> None:
        """Every block is free, and nothing is open."""
        eventually(lambda: not self.engine.has_unfinished_requests() and self.service.num_open == 0)
        assert_idle(self.engine)
        self.engine.kv_cache.check_integrity()


@contextmanager
def live_server(
    engine: InferenceEngine | Setup = ENDLESS,
    *,
    load: bool = True,
    send_buffer: int | None = None,
    **settings: Any,
) -> Iterator[Live]:
    """A server on a free port.

    Args:
        load: False: it is without its model, which ``service.start`` gives it.
        send_buffer: bytes that the kernel keeps for a client that does not read.
    """
    if isinstance(engine, Setup):
        engine = engine.engine()
    service = Service(ServerSettings(**{"model_name": MODEL, "port": 0, "shutdown_timeout": 5.0} | settings))
    listener = listen(service.settings)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    server = Server(service)
    ready: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        if load:
            service.start(engine)
        ready.append(asyncio.get_running_loop())
        await server.serve([listener])
        await service.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    eventually(lambda: server.started)
    url = f"{service.settings.scheme}://127.0.0.1:{listener.getsockname()[1]}"
    live = Live(url, service, server, ready[0], engine, Gate(engine))
    try:
        yield live
    finally:
        live.gate.open()
        server.end()
        thread.join(20)
        assert not thread.is_alive(), "the server did not end"


def eventually(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until the condition holds."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.005)


def events(text: str) -> list[Any]:
    """The data of server-sent events; the last one must be [DONE], which is left out."""
    blocks = text.split("\n\n")
    assert blocks.pop() == "", "a stream ends with a blank line"
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def with_setup(**changes: Any) -> Setup:
    return replace(ENDLESS, **changes)


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


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error, whose shape is always the same."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json" and response.headers["x-request-id"]
    body = response.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"] and len(body["error"]["message"]) < 700
    return dict(body["error"])
