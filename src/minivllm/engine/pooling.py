"""Pooler: from the hidden states of a prompt, as steps compute them, to its embedding. Knows only numbers."""

import math

import numpy as np
import numpy.typing as npt

from minivllm.sampling_params import EmbeddingParams


class Pooler:
    """Owner of the sum of one prompt's hidden states, so that memory does not grow with the prompt.

    They are added one by one in the order of their positions, so that the sum is the same bit for bit in
    whatever chunks they come.
    """

    def __init__(self, params: EmbeddingParams) -> None:
        self._normalize = params.normalize
        self._sum: npt.NDArray[np.float64] = np.zeros(0)
        self._count = 0

    def add(self, hidden: npt.NDArray[np.float32], begins: bool) -> None:
        """Take further ones.

        Args:
            hidden: [n, hidden_size].
            begins: they are the prompt's first; perhaps again, since it may have been preempted.
        """
        if begins or not self._count:
            self._sum, self._count = np.zeros(hidden.shape[1]), 0
        with np.errstate(invalid="ignore"):  # a broken model's infinities
            for row in hidden:
                self._sum += row
        self._count += len(hidden)

    def embedding(self) -> npt.NDArray[np.float32] | None:
        """[hidden_size]: the mean of what was added; of length 1 if that is asked for, unless it is zero.

        None: something that was added is no number.
        """
        if not np.isfinite(self._sum).all():
            return None
        mean = self._sum / self._count
        if self._normalize:
            mean /= math.hypot(*mean) or 1.0
        return mean.astype(np.float32)
