"""What a run shows: the KV memory and the requests of every step, and what follows. Runs nothing."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from minivllm.bench.memory.workload import Arrival


class Step(NamedTuple):
    """One step of a model over the pool; slots are counted with this step's tokens in them."""

    seconds: float
    rows: int  #: tokens computed
    context: int  #: tokens of all its sequences in the cache: what attention reads
    running: int  #: requests in the pool
    waiting: int  #: requests that have arrived and are not in the pool
    tokens: int  #: slots that hold a token, a shared one once
    reserved: int  #: empty slots that a running request will fill
    internal: int  #: empty slots that a running request holds and will never fill
    unshared: int  #: blocks that there would be without sharing
    blocks: int  #: blocks that there are


@dataclass
class Trace:
    """A whole run."""

    slots: int  #: tokens that the pool has memory for
    max_num_batched_tokens: int  #: rows of a step, at most
    steps: list[Step] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)  #: when each step began, seconds
    ends: dict[int, float] = field(default_factory=dict)  #: index of a request → when its last token came
    preemptions: int = 0


@dataclass(frozen=True)
class Figures:
    """The figures of one run. Means are over time, while requests wait for memory if they ever do."""

    name: str
    tokens: float  #: share of the pool's slots that hold tokens
    reserved: float  #: … that are empty and will be filled by who holds them
    internal: float  #: … that are empty and held for nothing
    external: float  #: … that nobody holds, or that are lost to the form of free memory
    running: float  #: requests at once
    throughput: float  #: requests finished a second
    latency: float  #: mean of each request's time from arrival to end over its output tokens, seconds a token
    sharing: float  #: blocks saved by sharing, of those that there would be without
    saturated: bool  #: whether requests waited
    preemptions: int

    @property
    def waste(self) -> float:
        """Share of the pool that holds no token."""
        return 1 - self.tokens


def figures(name: str, trace: Trace, requests: list[Arrival]) -> Figures:
    """Sum up a run in which every request was finished."""
    if len(trace.ends) != len(requests):
        raise RuntimeError(f"{len(requests)} requests were made, but {len(trace.ends)} finished")
    columns = np.array(trace.steps, np.float64)
    steps = dict(zip(Step._fields, columns.T, strict=True))
    starts = np.array(trace.starts)
    # Full: a request waits though the step could have computed some of it.
    full = (steps["waiting"] > 0) & (steps["rows"] < trace.max_num_batched_tokens)
    saturated = bool(full.any())
    busy = (steps["waiting"] > 0) & (np.arange(len(full)) >= full.argmax()) if saturated else full == full
    weights = steps["seconds"] * busy

    def mean(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
        return float((values * weights).sum() / weights.sum())

    first = float(starts[busy].min())
    last = float((starts + steps["seconds"])[busy].max())
    finished = sum(first < end <= last for end in trace.ends.values())
    tokens, reserved, internal = (
        mean(steps[name] / trace.slots) for name in ("tokens", "reserved", "internal")
    )
    return Figures(
        name=name,
        tokens=tokens,
        reserved=reserved,
        internal=internal,
        external=1 - tokens - reserved - internal,
        running=mean(steps["running"]),
        throughput=finished / (last - first),
        latency=float(np.mean([(trace.ends[i] - r.time) / r.output_len for i, r in enumerate(requests)])),
        sharing=1 - mean(steps["blocks"]) / mean(steps["unshared"]),
        saturated=saturated,
        preemptions=trace.preemptions,
    )
