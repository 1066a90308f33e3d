"""Generation: an answer that the model is still to give, whole or as server-sent events.

Everything about it ends when the client goes away or the time is up, whatever it was doing: waiting, being
computed, or being sent to a reader who does not read. What the answers look like is a ``Format``'s.
"""

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from minivllm.engine.async_engine import Answers
from minivllm.engine.outputs import CompletionOutput, RequestOutput
from minivllm.sampling_params import SamplingParams
from minivllm.server.errors import (
    ApiError,
    as_api_error,
    bad_request,
    internal_error,
    timed_out,
    unavailable,
)
from minivllm.server.forms import about_field, form_field
from minivllm.server.protocol import GenerationRequest
from minivllm.server.responses import FinishReason, Usage
from minivllm.server.service import Service

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the events back
]
_DONE = b"data: [DONE]\n\n"
LAST_WORDS_SECONDS = 1.0  # for telling a client that does not read that its time is up


@dataclass(frozen=True)
class Head:
    """What all objects of one answer have in common."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def new(cls, prefix: str, service: Service) -> "Head":
        """With an id of its own."""
        name = service.settings.model_name
        return cls(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), name, service.fingerprint)


class Format(ABC):
    """What the answers of a route look like."""

    @abstractmethod
    def opening(self, num_prompts: int) -> list[Mapping[str, Any]]:
        """The events before anything is generated."""

    @abstractmethod
    def chunks(self, prompt: int, output: RequestOutput) -> list[Mapping[str, Any]]:
        """The events that tell what is new of one prompt's answers."""

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> Mapping[str, Any]:
        """The event that tells only the usage."""

    @abstractmethod
    def whole(self, outputs: Seq[RequestOutput], usage: Usage) -> Mapping[str, Any]:
        """Everything at once; one output for each prompt."""


@dataclass
class TokenCount:
    """Tokens over all prompts and choices."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    _seen: set[str] = field(default_factory=set)

    def add(self, output: RequestOutput) -> None:
        """Count what is new."""
        if output.request_id not in self._seen:
            self._seen.add(output.request_id)
            self.prompt += len(output.prompt_token_ids)
            self.cached += output.num_cached_tokens
        self.completion += sum(len(completion.token_ids) for completion in output.outputs)

    def usage(self) -> Usage:
        """As OpenAI has it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Generation(Response):
    """An answer to be generated while it is sent.

    Args:
        body: the request; how it wants to be served.
        make_prompts: gives the token ids of each prompt; run in another thread.
        num_prompts: how many it will give.
    """

    def __init__(
        self,
        service: Service,
        body: GenerationRequest,
        params: SamplingParams,
        make_prompts: Callable[[], Seq[Seq[int]]],
        num_prompts: int,
        answer_format: Format,
    ) -> None:
        super().__init__()
        self._service = service
        self._body = body
        self._params = params
        self._make_prompts = make_prompts
        self._num_prompts = num_prompts
        self._format = answer_format
        self._stream = bool(body.stream)
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the client leaves first.

        Raises:
            Exception: what is wrong with the request, as long as nothing was sent.
        """
        answer = self._answer_events(send) if self._stream else self._answer_whole(scope, receive, send)
        work = asyncio.ensure_future(answer)
        gone = asyncio.ensure_future(_disconnected(receive))
        seconds = self._service.settings.request_timeout
        try:
            await asyncio.wait({work, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            late = not work.done() and not gone.done()
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)  # which also has seen their errors
        if not work.cancelled():
            work.result()
        elif late and seconds is not None:
            await self._give_up(send, timed_out(seconds))

    async def _answer_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        tokens = TokenCount()
        async with self._answers() as answers:
            outputs = await answers.all()
        for output in outputs:
            _check(output)
            tokens.add(output)
        response = JSONResponse(self._format.whole(outputs, tokens.usage()))
        self._started = True
        await response(scope, receive, send)

    async def _answer_events(self, send: Send) -> None:
        tokens = TokenCount()
        async with self._answers() as answers:
            order = {request_id: i for i, request_id in enumerate(answers.request_ids)}
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            try:
                await _send_events(send, self._format.opening(len(order)))
                async for outputs in answers:
                    chunks: list[Mapping[str, Any]] = []
                    for output in outputs:
                        _check(output)
                        tokens.add(output)
                        chunks += self._format.chunks(order[output.request_id], output)
                    await _send_events(send, chunks)
            except Exception as error:
                await _end(send, _error_event(as_api_error(error)))
                return
        if self._body.wants_usage:
            await _send_events(send, [self._format.usage_chunk(tokens.usage())])
        await _end(send, _DONE)

    @asynccontextmanager
    async def _answers(self) -> AsyncIterator[Answers]:
        with about_field(form_field(self._body)):
            async with self._service.answers(
                self._make_prompts,
                self._num_prompts,
                self._params,
                whole=not self._stream,
                cache_salt=self._body.cache_salt,
                priority=self._body.priority or 0,
            ) as answers:
                yield answers

    async def _give_up(self, send: Send, error: ApiError) -> None:
        if not self._started:
            raise error
        if self._stream:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_end(send, _error_event(error)), LAST_WORDS_SECONDS)


def finish_reason(completion: CompletionOutput) -> FinishReason | None:
    """OpenAI's; those that it does not have have been raised as errors."""
    reason = completion.finish_reason
    return reason if reason == "stop" or reason == "length" else None


def _check(output: RequestOutput) -> None:
    """Raise what ended the request before its time."""
    for completion in output.outputs:
        if completion.finish_reason == "abort":
            raise unavailable("the server ended before the answer was complete", "shutting_down")
        if completion.finish_reason == "error" and completion.stop_reason is not None:
            raise bad_request(
                f"the answer cannot go on in the form that it must have: {completion.stop_reason}"
            )
        if completion.finish_reason == "error":
            raise internal_error("the model failed while it was answering; the server's log says more")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_events(send: Send, chunks: Seq[Mapping[str, Any]]) -> None:
    if chunks:
        body = b"".join(_event(chunk) for chunk in chunks)
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _end(send: Send, event: bytes) -> None:
    await send({"type": "http.response.body", "body": event, "more_body": False})


def _event(data: Mapping[str, Any]) -> bytes:
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"


def _error_event(error: ApiError) -> bytes:
    return b"event: error\n" + _event(error.body())
