"""answer_batch: a file of requests, answered as the server would answer them, without HTTP.

Each line goes through the server's own application, in this process. Many are under way at once, each in
the hands of a worker that fetches the next one when it is done, so memory does not grow with the file.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message

from minivllm.config import EngineConfig
from minivllm.engine.async_engine import EngineStoppedError
from minivllm.engine.inference_engine import InferenceEngine
from minivllm.server.app import create_app
from minivllm.server.batch_file import BadLine, Batch, parsed_line
from minivllm.server.service import Service
from minivllm.server.settings import ServerSettings

MAX_QUEUE = 2**20  # nobody is to be refused for others who wait


@dataclass(frozen=True)
class AppAnswer:
    """What the application says to one request."""

    status_code: int
    request_id: str
    body: Any  #: the JSON value


def answer_batch(
    batch: Batch,
    engine: InferenceEngine,
    model_name: str,
    in_flight: int,
    progress: Callable[[], None],
    config: EngineConfig | None = None,
) -> int:
    """Answer every line that is still without an answer.

    Args:
        model_name: what requests may call the model.
        in_flight: lines under way at once.
        progress: is called after each line.
        config: what the engine was made after, for the fingerprint; see ``Service.start``.

    Returns:
        The number of lines whose answer is an error.

    Raises:
        EngineStoppedError: the engine broke. The lines under way are without an answer, for a next run.
        OSError: an answer cannot be written.
    """
    service = Service(ServerSettings(model_name, max_queue=MAX_QUEUE))
    return asyncio.run(_run(batch, service, engine, config, in_flight, progress))


async def _run(
    batch: Batch,
    service: Service,
    engine: InferenceEngine,
    config: EngineConfig | None,
    in_flight: int,
    progress: Callable[[], None],
) -> int:
    service.start(engine, config)
    app, lines = create_app(service), batch.unanswered()

    async def work() -> int:
        num_errors = 0
        for number, line in lines:  # the same for all workers
            num_errors += not await _answer(app, batch, number, line)
            progress()
        return num_errors

    try:
        # What ends one of them ends the others too, each by itself.
        results = await asyncio.gather(*(work() for _ in range(in_flight)), return_exceptions=True)
    finally:
        await service.close()
    num_errors = 0
    for result in results:
        if isinstance(result, BaseException):
            raise result
        num_errors += result
    return num_errors


async def _answer(app: ASGIApp, batch: Batch, number: int, line: bytes) -> bool:
    """Write a line's answer, and say whether it is a good one."""
    request = parsed_line(line)
    if isinstance(request, BadLine):
        error = {"code": "invalid_line", "message": f"line {number}: {request.message}"}
        batch.write(number, request.custom_id, None, error)
        return False
    answer = await post(app, request.url, request.body)
    if answer.status_code == 503:  # what follows would be answered no better
        raise EngineStoppedError(f"{answer.body['error']['message']}; run it again for the rest")
    response = {"status_code": answer.status_code, "request_id": answer.request_id, "body": answer.body}
    batch.write(number, request.custom_id, response, None)
    return answer.status_code == 200


async def post(app: ASGIApp, path: str, body: bytes) -> AppAnswer:
    """Give an ASGI application a JSON body, as if it had come over HTTP from a client who waits."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
    }
    to_come: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    start: Message = {}
    pieces: list[bytes] = []

    async def receive() -> Message:
        return to_come.pop() if to_come else await asyncio.get_running_loop().create_future()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        else:
            pieces.append(message.get("body", b""))

    await app(scope, receive, send)
    request_id = Headers(raw=start["headers"]).get("x-request-id", "")
    return AppAnswer(start["status"], request_id, json.loads(b"".join(pieces)))
