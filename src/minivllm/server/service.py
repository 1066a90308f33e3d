"""Service: the model behind the routes, from the time it is loaded to the time it is let go.

It decides whether a request may come in at all, has prompts made in threads of their own (the event loop
never tokenises nor renders), and hands them to the AsyncEngine.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

import minivllm
from minivllm.config import EngineConfig
from minivllm.engine.async_engine import Answers, AsyncEngine
from minivllm.engine.inference_engine import InferenceEngine
from minivllm.errors import RequestError, shown
from minivllm.sampling_params import RequestParams
from minivllm.server.errors import ApiError, queue_full, shutting_down, unavailable
from minivllm.server.metrics import ServerMetrics
from minivllm.server.settings import ServerSettings
from minivllm.text.tokenizer import Tokenizer

PREPARING_THREADS = 2

T = TypeVar("T")


class Service:
    """Owner of the engine's life and of the threads that make prompts."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.metrics = ServerMetrics(settings.model_name)
        self.draining = asyncio.Event()  #: set once the server is to end
        self.created = int(time.time())
        self.fingerprint = ""  #: changes when the same request may be answered otherwise
        self.num_open = 0  #: requests that are being answered
        self._engine: AsyncEngine | None = None
        self._pool = ThreadPoolExecutor(PREPARING_THREADS, thread_name_prefix="mini-vllm prompts")
        self._preparing: dict[Future[Any], int] = {}  # and for how many prompts

    def start(self, engine: InferenceEngine, config: EngineConfig | None = None) -> None:
        """From now on requests are answered, by this engine, which was made after this configuration."""
        made_of = f"{minivllm.__version__} {self.settings.model_name} {engine.executor.name} {config}"
        self.fingerprint = f"fp_{hashlib.sha256(made_of.encode()).hexdigest()[:12]}"
        self._engine = AsyncEngine(engine, self.metrics)
        self.metrics.watch(self._engine)

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, give the open ones that long, then end them."""
        self.draining.set()
        await self._wait_for_open(seconds)
        if self.num_open and self._engine is not None:
            self._engine.abort_all()
            await self._wait_for_open(1.0)

    async def close(self) -> None:
        """End the engine's thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._engine is not None:
            await self._engine.close()

    def health(self) -> None:
        """Nothing, if requests would be answered.

        Raises:
            ApiError: 503, with the reason why they would not.
        """
        complaint = self._ready().health()
        if complaint is not None:
            raise unavailable(complaint, "engine_stopped")

    @property
    def engine(self) -> InferenceEngine:
        """What is read only of it. Raises as ``health``."""
        return self._ready().engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's.

        Raises:
            RequestError: it has none.
        """
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise RequestError("this model has no tokenizer, which this request needs; give it token ids")
        return tokenizer

    def check_model(self, wanted: str | None) -> None:
        """Refuse what is meant for another model.

        Raises:
            ApiError: 404.
        """
        served = self.settings.model_name
        if wanted is not None and wanted != served:
            raise ApiError(
                404,
                f"there is no model {shown(wanted)} here; this server has {shown(served)}",
                param="model",
                code="model_not_found",
            )

    async def prepare(self, make: Callable[[], T], num_prompts: int = 1) -> T:
        """The result of ``make``, which runs in another thread.

        Its prompts count as waiting until the caller goes on, which is to hand them to the engine. A request
        with more prompts than may wait is let in when nothing does.

        Raises:
            ApiError: 429: too much is waiting already.
            Exception: that of ``make``.
        """
        num_waiting, max_queue = self.num_waiting, self.settings.max_queue
        if num_waiting and num_waiting + num_prompts > max_queue:
            raise queue_full(num_waiting, max_queue)
        job = self._pool.submit(make)
        self._preparing[job] = num_prompts
        try:
            return await asyncio.wrap_future(job)
        finally:
            if job.done():
                del self._preparing[job]
            else:  # who waited for it has gone; it ends in its thread
                job.add_done_callback(self._preparing.pop)

    @property
    def num_waiting(self) -> int:
        """Prompts that are being made, or wait for their first step. Raises as ``health``."""
        return self._ready().num_waiting + sum(self._preparing.values())

    @asynccontextmanager
    async def answers(
        self,
        make_prompts: Callable[[], Seq[Seq[int]]],
        num_prompts: int,
        params: RequestParams,
        *,
        whole: bool,
        cache_salt: str | None,
        priority: int,
    ) -> AsyncIterator[Answers]:
        """The answers to what ``make_prompts`` returns. See ``AsyncEngine.requests`` and ``prepare``.

        Grammars, too, are compiled where prompts are made.
        """
        engine, arrived_at = self._ready(), time.monotonic()
        self.num_open += 1
        try:
            prompts, grammar = await self.prepare(
                lambda: (make_prompts(), engine.engine.compile_grammar(params)), num_prompts
            )
            async with engine.requests(
                prompts,
                [params] * len(prompts),
                whole=whole,
                cache_salt=cache_salt,
                priority=priority,
                arrived_at=arrived_at,
                grammars=[grammar] * len(prompts),
            ) as answers:
                yield answers
        finally:
            self.num_open -= 1

    def _ready(self) -> AsyncEngine:
        if self.draining.is_set():
            raise shutting_down()
        if self._engine is None:
            raise unavailable("the model is still being loaded; try again soon", "loading")
        return self._engine

    async def _wait_for_open(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self.num_open and time.monotonic() < until:
            await asyncio.sleep(0.02)


async def _service(request: Request) -> Service:  # not async, it would be called in a thread
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


#: A route's parameter
ServiceOf = Annotated[Service, Depends(_service)]
