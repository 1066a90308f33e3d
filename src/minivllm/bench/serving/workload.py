"""What is asked of a server, and when: arrival times, lengths, and the words of prompts. Asks nothing itself.

Everything is drawn from one seed, so that two servers get the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from minivllm.errors import ConfigError, counted

Lengths = Literal["fixed", "sharegpt"]
SIGMA = 1.0
"""Of the logarithm of the lengths in "sharegpt": most are short and some are long, as in the conversations
that people have shared. It is this shape that is meant, not the texts."""
LONGEST = 4.0  # times the mean: what is drawn longer is cut, so that servers need no endless context
#: Frequent, and one token each in most vocabularies.
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point "
    "home water room mother area money story fact month lot right study book eye job word business issue "
    "side kind head house service friend father power hour game line end member law car city name team"
)
WORDS = _WORDS.split()


@dataclass(frozen=True)
class Planned:
    """One request."""

    at: float  #: seconds after the start
    input_len: int  #: tokens
    output_len: int  #: tokens
    seed: int  #: of the prompt's words


@dataclass(frozen=True)
class Workload:
    """How many requests of what size come how fast.

    Raises:
        ConfigError: a number cannot be used.
    """

    num_prompts: int
    request_rate: float = math.inf  #: requests a second on average, as a Poisson process; inf: all at once
    max_concurrency: int | None = None  #: requests under way, at most; those that are due wait here
    input_len: int = 128  #: tokens, on average
    output_len: int = 128
    lengths: Lengths = "fixed"
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every value."""
        for name, value in (
            ("the number of prompts", self.num_prompts),
            ("the concurrency", 1 if self.max_concurrency is None else self.max_concurrency),
            ("the input length", self.input_len),
            ("the output length", self.output_len),
        ):
            if not 1 <= value < 2**31:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if not self.request_rate > 0:
            raise ConfigError(f"the request rate is {self.request_rate}; it must be above 0, or inf")
        if self.seed < 0:
            raise ConfigError(f"the seed is {self.seed}; it must be 0 or more")

    def requests(self) -> list[Planned]:
        """In the order of their arrival; the first comes at once."""
        rng = np.random.default_rng(self.seed)
        gaps = rng.exponential(1 / self.request_rate, self.num_prompts)
        arrivals = np.cumsum(gaps) - gaps[0]
        inputs, outputs = self._draw(rng, self.input_len), self._draw(rng, self.output_len)
        seeds = rng.integers(0, 2**31, self.num_prompts)
        return [
            Planned(float(at), int(i), int(o), int(s))
            for at, i, o, s in zip(arrivals, inputs, outputs, seeds, strict=True)
        ]

    def _draw(self, rng: np.random.Generator, mean: int) -> Sequence[int]:
        if self.lengths == "fixed":
            return [mean] * self.num_prompts
        # The mean of exp(N(mu, sigma²)) is exp(mu + sigma²/2).
        drawn = rng.lognormal(math.log(mean) - SIGMA**2 / 2, SIGMA, self.num_prompts)
        return [int(x) for x in np.clip(np.rint(drawn), 1, math.ceil(LONGEST * mean))]

    def __str__(self) -> str:
        """In words."""
        when = "all at once" if math.isinf(self.request_rate) else f"{self.request_rate:g} a second (Poisson)"
        limit = "" if self.max_concurrency is None else f", at most {self.max_concurrency} under way"
        shape = "" if self.lengths == "fixed" else " on average (log-normal)"
        return (
            f"{counted(self.num_prompts, 'request')}, {when}{limit}: "
            f"{counted(self.input_len, 'prompt token')} and {self.output_len:,} generated{shape}; "
            f"seed {self.seed}"
        )


def words(seed: int, count: int) -> str:
    """A prompt of that many random words: no two have a beginning in common that is worth caching."""
    rng = np.random.default_rng(seed)
    return " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), count))
