"""Generation: a text that the model is still to give, whole or as server-sent events.

What the answers look like is a ``Format``'s.
"""

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import JSONResponse
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from minivllm.engine.outputs import CompletionOutput, RequestOutput
from minivllm.sampling_params import SamplingParams
from minivllm.server.answer import Answer, check
from minivllm.server.errors import ApiError, as_api_error
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
        self.completion += output.num_tokens

    def usage(self) -> Usage:
        """As OpenAI has it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Generation(Answer):
    """A text to be generated while it is sent.

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
        super().__init__(service, body, params, make_prompts, num_prompts)
        self._format = answer_format
        self._form_field = form_field(body)
        self._wants_usage = body.wants_usage
        self._stream = bool(body.stream)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        with about_field(self._form_field):
            if self._stream:
                await self._answer_events(send)
            else:
                await self._answer_whole(scope, receive, send)

    async def _answer_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        tokens = TokenCount()
        async with self._answers(whole=True) as answers:
            outputs = await answers.all()
        for output in outputs:
            check(output)
            tokens.add(output)
        response = JSONResponse(self._format.whole(outputs, tokens.usage()))
        self._started = True
        await response(scope, receive, send)

    async def _answer_events(self, send: Send) -> None:
        tokens = TokenCount()
        async with self._answers(whole=False) as answers:
            order = {request_id: i for i, request_id in enumerate(answers.request_ids)}
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            try:
                await _send_events(send, self._format.opening(len(order)))
                async for outputs in answers:
                    chunks: list[Mapping[str, Any]] = []
                    for output in outputs:
                        check(output)
                        tokens.add(output)
                        chunks += self._format.chunks(order[output.request_id], output)
                    await _send_events(send, chunks)
            except Exception as error:
                await _end(send, _error_event(as_api_error(error)))
                return
        if self._wants_usage:
            await _send_events(send, [self._format.usage_chunk(tokens.usage())])
        await _end(send, _DONE)

    async def _give_up(self, send: Send, error: ApiError) -> None:
        await super()._give_up(send, error)
        if self._stream:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_end(send, _error_event(error)), LAST_WORDS_SECONDS)


def finish_reason(completion: CompletionOutput) -> FinishReason | None:
    """OpenAI's; those that it does not have have been raised as errors."""
    reason = completion.finish_reason
    return reason if reason == "stop" or reason == "length" else None


async def _send_events(send: Send, chunks: Seq[Mapping[str, Any]]) -> None:
    if chunks:
        body = b"".join(map(_event, chunks))
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _end(send: Send, event: bytes) -> None:
    await send({"type": "http.response.body", "body": event, "more_body": False})


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + to_json(data, inf_nan_mode="null") + b"\n\n"


def _error_event(error: ApiError) -> bytes:
    return b"event: error\n" + _event(error.body())
