"""run_load: each request at its time, and what was seen of it; and the report of a whole measurement."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from minivllm.bench.serving.client import Client
from minivllm.bench.serving.figures import Figures, Latency, Trace
from minivllm.bench.serving.workload import Planned, Workload
from minivllm.errors import ConfigError

Progress = Callable[[], None]


@dataclass(frozen=True)
class ServeReport:
    """A measurement and what it depends on."""

    base_url: str
    model: str
    endpoint: str
    workload: Workload
    ignore_eos: bool  #: the server takes it; else answers may end early
    calibrated: bool  #: prompts were made by the server's own count of tokens
    goals: Mapping[Latency, float]
    figures: Figures

    def as_json(self) -> dict[str, Any]:
        """Everything, in plain types; a request rate of infinity, which JSON has not, as null."""
        plain = asdict(self)
        if plain["workload"]["request_rate"] == float("inf"):
            plain["workload"]["request_rate"] = None
        return plain


async def measure_server(
    client: Client, workload: Workload, warmup: int, goals: Mapping[Latency, float], progress: Progress
) -> tuple[ServeReport, list[Trace]]:
    """Put the workload on a server.

    Args:
        warmup: requests of the same sizes that come before, at once, and do not count.
        progress: is called after each request that counts.

    Raises:
        ConfigError: the server does not answer as such a server does.
    """
    async with client:
        await client.prepare()
        if warmup:
            before = replace(workload, num_prompts=warmup, request_rate=float("inf"), seed=workload.seed + 1)
            traces = await run_load(client.ask, before.requests(), workload.max_concurrency)
            if all(trace.error for trace in traces):
                raise ConfigError(f"the requests fail that warm {client.base_url} up: {traces[0].error}")
        traces = await run_load(client.ask, workload.requests(), workload.max_concurrency, progress)
    report = ServeReport(
        base_url=client.base_url,
        model=client.model,
        endpoint=client.endpoint,
        workload=workload,
        ignore_eos="ignore_eos" in client.fields,
        calibrated=client.calibrated,
        goals=goals,
        figures=Figures.of(traces, goals),
    )
    return report, traces


async def run_load(
    ask: Callable[[Planned], Awaitable[Trace]],
    requests: Sequence[Planned],
    max_concurrency: int | None,
    progress: Progress = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> list[Trace]:
    """Ask each when it is due and there is room, answered or not what came before; traces in this order."""
    room = asyncio.Semaphore(max_concurrency or len(requests))
    start = clock()

    async def one(request: Planned) -> Trace:
        if (wait := start + request.at - clock()) > 0:
            await sleep(wait)
        async with room:
            trace = await ask(request)
        progress()
        return trace

    return await asyncio.gather(*(one(request) for request in requests))
