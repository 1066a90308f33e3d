"""Requests like those of the paper: lengths of prompts and outputs, and when they arrive. Runs nothing.

The paper (arXiv 2309.06180, section 6.1) replays the lengths of ShareGPT and Alpaca, whose means it gives in
Figure 11; arrivals are a Poisson process. The data sets are not ours to ship, so lengths are drawn from
log-normal distributions with those means; their spread is our choice.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

_NORMAL = NormalDist()


@dataclass(frozen=True)
class Lengths:
    """Token counts: log-normal, rounded, from 1 to ``most``; longer ones are cut to it."""

    mean: float  #: of the counts, cut ones included
    sigma: float  #: standard deviation of the logarithm
    most: int

    @property
    def mu(self) -> float:
        """Mean of the logarithm, so that the mean after the cut is ``mean``: found by halving."""
        low, high = math.log(self.mean) - 10 * self.sigma**2, math.log(self.most) + 10 * self.sigma
        for _ in range(60):
            middle = (low + high) / 2
            if _mean_cut(middle, self.sigma, self.most) < self.mean:
                low = middle
            else:
                high = middle
        return high

    def draw(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        """So many counts."""
        values = np.exp(rng.normal(self.mu, self.sigma, count))
        return np.clip(np.rint(values), 1, self.most).astype(np.int64)

    def __str__(self) -> str:
        """In a report."""
        return f"mean {self.mean:g} (log-normal, sigma {self.sigma:g}, at most {self.most:,})"


def _mean_cut(mu: float, sigma: float, most: int) -> float:
    """Mean of min(X, most) for a log-normal X."""
    z = (math.log(most) - mu) / sigma
    return math.exp(mu + sigma**2 / 2) * _NORMAL.cdf(z - sigma) + most * (1 - _NORMAL.cdf(z))


@dataclass(frozen=True)
class Workload:
    """What the requests are like."""

    name: str
    prompt: Lengths  #: of each request's own
    output: Lengths
    shared_len: int = 0  #: tokens that all prompts begin with, before their own

    def __str__(self) -> str:
        """In a report."""
        shared = f"{self.shared_len} shared tokens, then " if self.shared_len else ""
        return f"{self.name}: {shared}prompt {self.prompt}, output {self.output}"


SHAREGPT = Workload("ShareGPT-like", Lengths(161.31, 1.2, 1024), Lengths(337.99, 0.9, 1024))
ALPACA = Workload("Alpaca-like", Lengths(19.31, 0.5, 1024), Lengths(58.45, 1.0, 1024))
#: Sentences to translate behind an instruction with examples. The paper gives the prefixes' lengths alone
TRANSLATION = Workload("translation-like", Lengths(40, 0.5, 512), Lengths(40, 0.5, 512))

WORKLOADS = {"sharegpt": SHAREGPT, "alpaca": ALPACA}


@dataclass(frozen=True)
class Arrival:
    """A request: when it comes, and how long it is. Nobody but an oracle knows ``output_len`` before."""

    time: float  #: seconds
    prompt_len: int  #: the shared tokens included
    output_len: int


def arrivals(workload: Workload, count: int, rate: float, seed: int) -> list[Arrival]:
    """Poisson arrivals at ``rate`` a second. The same seed gives the same requests at every rate."""
    for_prompts, for_outputs, for_times = (np.random.default_rng((seed, i)) for i in range(3))
    prompts = workload.prompt.draw(for_prompts, count) + workload.shared_len
    outputs = workload.output.draw(for_outputs, count)
    times = np.cumsum(for_times.exponential(1, count)) / rate
    return [Arrival(*row) for row in zip(times.tolist(), prompts.tolist(), outputs.tolist(), strict=True)]
