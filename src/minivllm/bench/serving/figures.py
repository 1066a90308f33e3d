"""From what was seen of each request to figures: latencies, throughput, goodput. Reads no clock."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from minivllm.errors import ConfigError, shown

Latency = Literal["ttft", "tpot", "itl", "e2e"]


@dataclass
class Trace:
    """What was seen of one request. Times are readings of one clock, in seconds."""

    sent_at: float
    piece_times: list[float] = field(default_factory=list)  #: when each piece of text came
    ended_at: float = 0.0
    prompt_tokens: int | None = None  #: as the server counts them; None: it does not tell
    completion_tokens: int | None = None
    error: str | None = None  #: why it has failed, in a sentence; None: it has not

    @property
    def output_tokens(self) -> int:
        """The server's count; without one, every piece counts as a token."""
        return len(self.piece_times) if self.completion_tokens is None else self.completion_tokens

    @property
    def ttft(self) -> float | None:
        """Seconds to the first text; None: there is no text."""
        return self.piece_times[0] - self.sent_at if self.piece_times else None

    @property
    def itl(self) -> list[float]:
        """Seconds between each piece of text and the next."""
        return [b - a for a, b in zip(self.piece_times, self.piece_times[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; None: there is no second one."""
        if self.output_tokens < 2 or len(self.piece_times) < 2:
            return None
        return (self.piece_times[-1] - self.piece_times[0]) / (self.output_tokens - 1)

    @property
    def e2e(self) -> float:
        """Seconds to the end of the answer."""
        return self.ended_at - self.sent_at

    def keeps(self, goals: Mapping[Latency, float]) -> bool:
        """Whether it succeeded within these milliseconds; of its ``itl`` the longest counts."""
        worst = {"ttft": self.ttft, "tpot": self.tpot, "itl": max(self.itl, default=None), "e2e": self.e2e}
        return self.error is None and all(
            (seconds := worst[name]) is None or seconds * 1000 <= goal for name, goal in goals.items()
        )


@dataclass(frozen=True)
class Spread:
    """Of some milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread | None":
        """None: there are none. Percentiles are interpolated between neighbours."""
        if not seconds:
            return None
        values = 1000 * np.asarray(seconds)
        p50, p90, p99 = (float(x) for x in np.percentile(values, (50, 90, 99)))
        return cls(float(values.mean()), p50, p90, p99)


@dataclass(frozen=True)
class Figures:
    """How a server bore a load. Tokens and latencies are of the requests that succeeded."""

    seconds: float  #: from the first request to the last answer's end
    completed: int
    failed: int
    errors: dict[str, int]  #: what the failed ones were told, and how many
    prompt_tokens: int | None  #: None: the server does not count
    output_tokens: int
    output_tokens_counted: bool  #: by the server; False: pieces of text count instead
    request_throughput: float  #: answers a second
    output_throughput: float  #: generated tokens a second
    total_throughput: float | None  #: tokens a second, those of the prompts included
    concurrency: float  #: requests under way, on average
    goodput: float | None  #: requests a second that kept the goals; None: there are none
    latencies: dict[Latency, Spread | None]

    @classmethod
    def of(cls, traces: Sequence[Trace], goals: Mapping[Latency, float] | None = None) -> "Figures":
        """Of one load, with at least one request. Goals: the most milliseconds."""
        good = [trace for trace in traces if trace.error is None]
        seconds = max(t.ended_at for t in traces) - min(t.sent_at for t in traces)
        counts = [t.prompt_tokens for t in good if t.prompt_tokens is not None]
        prompt = sum(counts) if len(counts) == len(good) else None
        output = sum(t.output_tokens for t in good)

        def rate(count: float) -> float:
            return count / seconds if seconds else 0.0

        return cls(
            seconds=seconds,
            completed=len(good),
            failed=len(traces) - len(good),
            errors=dict(Counter(t.error for t in traces if t.error is not None).most_common()),
            prompt_tokens=prompt,
            output_tokens=output,
            output_tokens_counted=all(t.completion_tokens is not None for t in good),
            request_throughput=rate(len(good)),
            output_throughput=rate(output),
            total_throughput=None if prompt is None else rate(prompt + output),
            concurrency=rate(sum(t.e2e for t in traces)),
            goodput=rate(sum(t.keeps(goals) for t in traces)) if goals else None,
            latencies={
                "ttft": Spread.of([t.ttft for t in good if t.ttft is not None]),
                "tpot": Spread.of([t.tpot for t in good if t.tpot is not None]),
                "itl": Spread.of([gap for t in good for gap in t.itl]),
                "e2e": Spread.of([t.e2e for t in good]),
            },
        )


def parse_goals(texts: Sequence[str]) -> dict[Latency, float]:
    """The goals in ``["ttft:500 itl:50"]``, in milliseconds.

    Raises:
        ConfigError: that is no list of goals.
    """
    goals: dict[Latency, float] = {}
    for text in " ".join(texts).replace(",", " ").split():
        name, _, limit = text.partition(":")
        try:
            milliseconds = float(limit)
        except ValueError:
            milliseconds = 0.0
        for known in get_args(Latency):
            if name == known and milliseconds > 0:
                goals[known] = milliseconds
                break
        else:
            raise ConfigError(
                f"{shown(text)} is no goal; goals are {', '.join(get_args(Latency))} and milliseconds, "
                "as in 'ttft:500 itl:50'"
            )
    return goals
