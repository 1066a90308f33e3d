"""AsyncEngine: an InferenceEngine in a thread of its own, for callers that live in an asyncio event loop.

    event loop                                     engine thread
    requests() ── add, abandon ──► commands ──►  [ commands, then a step ] over and over
    Answers ◄── unread pieces, merged ◄─────────  outboxes

The thread is the engine's only user, so nothing waits for a lock: commands wait in a queue and are carried
out between two steps. A slow reader costs no more than its answer: what it has not read is merged into one
piece for each request. Knows nothing of HTTP.
"""

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from minivllm.engine.inference_engine import InferenceEngine
from minivllm.engine.metrics import EngineMetrics
from minivllm.engine.outputs import CompletionOutput, RequestOutput
from minivllm.errors import MiniVLLMError
from minivllm.sampling_params import RequestParams
from minivllm.text.grammar import Grammar

logger = logging.getLogger(__name__)

STALL_SECONDS = 60.0
"""An engine that has work and finishes no step for this long is not healthy."""


class EngineStoppedError(MiniVLLMError):
    """The engine does not run any more: it was closed, or it broke."""


@dataclass
class RequestTimes:
    """When what happened to a request, in seconds of ``time.monotonic``, before its newest output."""

    arrived_at: float
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_tokens: int = 0  #: generated so far, over all choices


class Observer(Protocol):
    """Whoever counts (a server's metrics). Called in the engine's thread, so it must be quick."""

    def step(self, num_tokens: int) -> None:
        """A step is done, in which so many rows went through the model."""

    def output(self, output: RequestOutput, times: RequestTimes, now: float) -> None:
        """A request gives something new."""


class AsyncEngine:
    """Owner of the engine's thread. Its methods belong to the event loop."""

    def __init__(self, engine: InferenceEngine, observer: Observer | None = None) -> None:
        self.engine = engine  #: what is read only (tokenizer, limits, chat_prompt) may be used from anywhere
        self.snapshot: EngineMetrics = engine.metrics()  #: as of the last step
        self._observer = observer
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._open: set[Answers] = set()  # those whose requests are in the engine
        self._num_adding = 0
        self._advanced_at = time.monotonic()
        self._stopped: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="mini-vllm engine", daemon=True)
        self._thread.start()

    # --- for the event loop ---

    @asynccontextmanager
    async def requests(
        self,
        prompts: Seq[Seq[int]],
        params: Seq[RequestParams],
        *,
        whole: bool = False,
        cache_salt: str | None = None,
        priority: int = 0,
        arrived_at: float | None = None,
        grammars: Seq[Grammar | None] | None = None,
    ) -> "AsyncIterator[Answers]":
        """Queue requests, all or none, and read their outputs within the ``async with``.

        Leaving it, in whatever way, aborts what is not finished: its blocks are free before the next step.

        Args:
            prompts: token ids of each.
            params: of each.
            whole: the answers are wanted at the end only.
            cache_salt: as for ``InferenceEngine.add_request``, and so is ``priority``.
            arrived_at: ``time.monotonic()`` of the arrival, for the observer; None: now.
            grammars: of each, as ``InferenceEngine.compile_grammar`` gives them in a thread that may take its
                time; None: nothing is asked that needs one.

        Raises:
            RequestError: anything about a request is wrong.
            EngineStoppedError: the engine has stopped, now or before the answers were complete.
        """
        arrived_at = time.monotonic() if arrived_at is None else arrived_at
        answers = Answers(asyncio.get_running_loop(), whole, arrived_at)
        self._num_adding += len(prompts)
        self._commands.put(partial(self._add, answers, prompts, params, cache_salt, priority, grammars))
        try:
            if self._stopped is not None:  # set before the queue's last reading: nobody else answers this
                raise EngineStoppedError(str(self._stopped))
            await answers.admitted
            yield answers
        finally:
            self._commands.put(partial(self._abandon, answers))

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their first step, or, preempted, for another one."""
        return self.engine.scheduler.num_waiting + self._num_adding

    def abort_all(self) -> None:
        """End every request now; their readers get outputs with finish_reason "abort"."""
        self._commands.put(self._abort_all)

    async def close(self) -> None:
        """End the thread after the step that it is in. Requests that are not finished fail."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    def health(self) -> str | None:
        """What is wrong with the engine, in a sentence; None: nothing."""
        if self._stopped is not None or not self._thread.is_alive():
            return f"the engine has stopped: {self._stopped}"
        since = time.monotonic() - self._advanced_at
        if since > STALL_SECONDS and self.engine.has_unfinished_requests():
            return f"the engine has not finished a step for {since:.0f} seconds"
        return None

    # --- in the engine's thread ---

    def _run(self) -> None:
        try:
            while self._obey():
                self._step()
        except Exception as error:
            logger.exception("the engine broke")
            self._stop(error)
        else:
            self._stop(EngineStoppedError("it was closed"))

    def _obey(self) -> bool:
        """Carry out the commands that are there, waiting for one if there is nothing else to do.

        False: one of them was to end.
        """
        obeyed = False
        while True:
            idle = not self.engine.has_unfinished_requests()
            if idle:  # it may wait for long, and meanwhile this is what is told
                self.snapshot = self.engine.metrics()
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                break
            if command is None:
                return False
            if idle:
                self._advanced_at = time.monotonic()
            command()
            obeyed = True
        if obeyed:
            self.snapshot = self.engine.metrics()
        return True

    def _step(self) -> None:
        try:
            self.engine.step()
        except Exception as error:
            # Those requests of the step that are over by it have an output that says so. If none are, the
            # next step would fail as this one.
            if self.engine.metrics().finished_requests == self.snapshot.finished_requests:
                raise
            logger.error("a step failed: %s", error)
        now = time.monotonic()
        earlier, self.snapshot = self.snapshot, self.engine.metrics()
        if self.snapshot.steps > earlier.steps:
            self._advanced_at = now
            if self._observer is not None:
                self._observer.step(self.snapshot.computed_tokens - earlier.computed_tokens)
        self._collect(now)

    def _collect(self, now: float) -> None:
        """Hand what the outboxes hold to the readers, and wake those who wait for it: once for each loop."""
        to_wake: dict[asyncio.AbstractEventLoop, list[Answers]] = {}
        for answers in [answers for answers in self._open if answers.outbox]:
            if answers.collect(self._observer, now):
                to_wake.setdefault(answers.loop, []).append(answers)
            if answers.complete:
                self._open.discard(answers)
        for loop, woken in to_wake.items():
            _call_soon(loop, partial(_wake, woken))

    def _add(
        self,
        answers: "Answers",
        prompts: Seq[Seq[int]],
        params: Seq[RequestParams],
        cache_salt: str | None,
        priority: int,
        grammars: Seq[Grammar | None] | None,
    ) -> None:
        refusal: Exception | None = None
        try:
            request_ids = self.engine.add_requests(
                prompts,
                params,
                stream=True,
                outbox=answers.outbox,
                cache_salt=cache_salt,
                priority=priority,
                grammars=grammars,
            )
            answers.expect(request_ids)
            self._open.add(answers)
        except Exception as error:
            refusal = error
        _call_soon(answers.loop, partial(self._added, answers, len(prompts), refusal))

    def _added(self, answers: "Answers", num_prompts: int, refusal: Exception | None) -> None:
        """In the event loop: tell who waits in ``requests``."""
        self._num_adding -= num_prompts
        if answers.admitted.done():  # its caller has gone
            return
        if refusal is None:
            answers.admitted.set_result(None)
        else:
            answers.admitted.set_exception(refusal)

    def _abandon(self, answers: "Answers") -> None:
        if answers in self._open:
            self._open.discard(answers)
            self.engine.abandon(answers.outbox)

    def _abort_all(self) -> None:
        for answers in self._open:
            for request_id in answers.request_ids:
                self.engine.abort(request_id)
        self._collect(time.monotonic())

    def _stop(self, error: Exception) -> None:
        """Fail everyone who waits, those included whose commands come too late."""
        self._stopped = error
        failure = EngineStoppedError(f"the engine has stopped: {error}")
        for answers in self._open:
            answers.fail(failure)
            _call_soon(answers.loop, partial(_wake, [answers]))
        self._open.clear()
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if isinstance(command, partial) and command.func == self._add:
                late: Answers = command.args[0]
                _call_soon(late.loop, partial(self._added, late, len(command.args[1]), failure))


class Answers:
    """The outputs of the requests that were queued together, on their way from thread to reader.

    Iterating gives lists of what is new, at most one output for each request in each; ``whole``: everything,
    once it is complete.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, whole: bool, arrived_at: float) -> None:
        self.loop = loop
        self.outbox: deque[RequestOutput] = deque()  #: the engine's
        self.admitted: asyncio.Future[None] = loop.create_future()
        self.request_ids: list[str] = []  #: in the order of the prompts
        self.news = asyncio.Event()
        self._whole = whole
        self._arrived_at = arrived_at
        self._times: dict[str, RequestTimes] = {}  # of unfinished requests; the engine thread's
        self._lock = threading.Lock()  # over what both threads touch:
        self._unread: dict[str, RequestOutput] = {}
        self._error: Exception | None = None
        self._told = False  # the reader was woken, and has not looked yet
        self._ended = False

    # --- the reader's ---

    async def __aiter__(self) -> AsyncIterator[list[RequestOutput]]:
        """What is new, whenever there is something.

        Raises:
            EngineStoppedError: there will be nothing more, though the answers are not complete.
        """
        ended = False
        while not ended:
            await self.news.wait()
            self.news.clear()
            with self._lock:
                outputs, self._unread = list(self._unread.values()), {}
                ended, error = self._ended, self._error
                self._told = False
            if outputs:
                yield outputs
            if error is not None:
                raise error

    async def all(self) -> list[RequestOutput]:
        """The whole answers, in the order of the prompts. For ``whole``."""
        outputs = {output.request_id: output async for batch in self for output in batch}
        return [outputs[request_id] for request_id in self.request_ids]

    # --- the engine thread's ---

    @property
    def complete(self) -> bool:
        """Every request is finished."""
        return not self._times

    def expect(self, request_ids: Seq[str]) -> None:
        """These are in the engine now."""
        self.request_ids = list(request_ids)
        self._times = {request_id: RequestTimes(self._arrived_at) for request_id in request_ids}

    def collect(self, observer: Observer | None, now: float) -> bool:
        """Take over what the outbox holds. Whether the reader must be woken for it."""
        outputs = list(self.outbox)
        self.outbox.clear()
        for output in outputs:
            times = self._times[output.request_id]
            if observer is not None:
                observer.output(output, times, now)
            if num_new := output.num_tokens:
                times.num_tokens += num_new
                times.last_token_at = now
                times.first_token_at = times.first_token_at or now
            if output.finished:
                del self._times[output.request_id]
        with self._lock:
            for output in outputs:
                unread = self._unread.get(output.request_id)
                self._unread[output.request_id] = output if unread is None else merged(unread, output)
            self._ended = self.complete
            wake = not self._told and (self._ended or not self._whole)
            self._told = self._told or wake
        return wake

    def fail(self, error: Exception) -> None:
        """Let the reader know that nothing more will come."""
        with self._lock:
            self._error = error
            self._ended = True


def merged(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """Two pieces of one request as one. The lists of ``earlier`` are used up."""
    completions = {completion.index: completion for completion in earlier.outputs}
    for completion in later.outputs:
        before = completions.get(completion.index)
        completions[completion.index] = completion if before is None else _joined(before, completion)
    prompt_logprobs = later.prompt_logprobs if earlier.prompt_logprobs is None else earlier.prompt_logprobs
    return replace(later, outputs=list(completions.values()), prompt_logprobs=prompt_logprobs)


def _joined(earlier: CompletionOutput, later: CompletionOutput) -> CompletionOutput:
    earlier.token_ids.extend(later.token_ids)
    if earlier.logprobs is not None:
        earlier.logprobs.extend(later.logprobs or [])
    return replace(
        later, text=earlier.text + later.text, token_ids=earlier.token_ids, logprobs=earlier.logprobs
    )


def _wake(woken: Seq[Answers]) -> None:
    for answers in woken:
        answers.news.set()


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:  # the loop is closed, and nobody is left to be told
        logger.debug("an event loop closed while its requests ran")
