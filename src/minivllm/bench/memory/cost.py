"""A model of time: what a step would cost, so that a run takes seconds instead of hours."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step: for the weights, for each row's arithmetic, for each cached token that is read."""

    step: float
    row: float
    context: float

    def seconds(self, rows: int, context: int) -> float:
        """A step of ``rows`` tokens whose sequences have ``context`` tokens in the cache, all together."""
        return self.step + self.row * rows + self.context * context

    def __str__(self) -> str:
        """In a report."""
        return (
            f"{self.step * 1e3:.3g} ms a step + {self.row * 1e6:.3g} µs a row + "
            f"{self.context * 1e9:.3g} ns a cached token read"
        )


def fit(rows: Sequence[int], context: Sequence[int], seconds: Sequence[float]) -> CostModel:
    """The model that fits measured steps best: least squares of the relative errors, no cost below zero."""
    features = np.stack([np.ones(len(rows)), np.array(rows), np.array(context)], axis=1)
    weighted = features / np.array(seconds)[:, None]
    best, least = np.zeros(3), np.inf
    for size in (1, 2, 3):  # of 3 costs, those above zero: few enough to try them all
        for kept in combinations(range(3), size):
            chosen = weighted[:, kept]
            costs, *_ = np.linalg.lstsq(chosen, np.ones(len(rows)), rcond=None)
            error = float(((chosen @ costs - 1) ** 2).sum())
            if (costs >= 0).all() and error < least:
                least = error
                best = np.zeros(3)
                best[list(kept)] = costs
    return CostModel(*best.tolist())
