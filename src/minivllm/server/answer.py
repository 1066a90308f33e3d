"""Answer: a response that the model is still to give.

Everything about it ends when the client goes away or the time is up, whatever it was doing: waiting, being
computed, or being sent to a reader who does not read.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from minivllm.engine.async_engine import Answers
from minivllm.engine.outputs import RequestOutput
from minivllm.sampling_params import RequestParams
from minivllm.server.errors import ApiError, bad_request, internal_error, timed_out, unavailable
from minivllm.server.protocol import ModelRequest
from minivllm.server.service import Service


class Answer(Response, ABC):
    """An answer to be made while it is sent.

    Args:
        body: the request; how it wants to be served.
        make_prompts: gives the token ids of each prompt; run in another thread.
        num_prompts: how many it will give.
    """

    def __init__(
        self,
        service: Service,
        body: ModelRequest,
        params: RequestParams,
        make_prompts: Callable[[], Seq[Seq[int]]],
        num_prompts: int,
    ) -> None:
        super().__init__()
        self._service = service
        self._cache_salt = body.cache_salt
        self._priority = body.priority or 0
        self._params = params
        self._make_prompts = make_prompts
        self._num_prompts = num_prompts
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the client leaves first.

        Raises:
            Exception: what is wrong with the request, as long as nothing was sent.
        """
        work = asyncio.ensure_future(self._answer(scope, receive, send))
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

    @abstractmethod
    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Make it and send it. ``_started`` is set before anything is sent."""

    @asynccontextmanager
    async def _answers(self, whole: bool) -> AsyncIterator[Answers]:
        async with self._service.answers(
            self._make_prompts,
            self._num_prompts,
            self._params,
            whole=whole,
            cache_salt=self._cache_salt,
            priority=self._priority,
        ) as answers:
            yield answers

    async def _give_up(self, send: Send, error: ApiError) -> None:
        """The time is up, and ``_answer`` has been cancelled."""
        if not self._started:
            raise error


def check(output: RequestOutput) -> None:
    """Raise what ended a request before its time."""
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
