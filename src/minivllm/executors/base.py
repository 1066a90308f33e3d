"""The executor interface: weights and one step of the model, on one device."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from minivllm.batch import Batch, IntArray, SamplingBatch, StepResult


class Executor(Protocol):
    """Runs the decoder over a paged KV pool. Constructed by ``minivllm.factory`` with a model and a pool.

    Two exist: ``executors.native`` (C++, CPU) and ``executors.torch_`` (readable reference, CPU and CUDA).
    An executor owns the weights and the only code that touches the pool's memory.
    """

    name: str  #: "native" or "torch"
    device: str  #: "cpu", "cuda"

    def execute(
        self,
        batch: Batch,
        sampling: SamplingBatch,
        before_sampling: Callable[[], object] | None = None,
    ) -> StepResult:
        """One step: copy blocks, write K and V of every row, attend, and draw a token for each logit row.

        The hidden states asked for are given as they are computed, NaN and infinities included.

        The step is a pure function of its arguments, the weights and the pool.

        Args:
            before_sampling: called between the model's layers and the drawing. What ``sampling.masks`` holds
                is read only after it, so that another thread can write them meanwhile.

        Raises:
            RuntimeError: "logit row R has no token to choose", and why: see ``minivllm.sampler``. It says
                nothing of other rows; the step may be repeated without that one.
        """
        ...

    # --- what is computed already, for keeping it beyond the process ---

    def identity(self) -> dict[str, str]:
        """All that K and V of a token depend on, besides the tokens before it and the cache's geometry.

        Names and values for people to read; executors with equal ones put the same bits into the cache. The
        first time it reads all weights.
        """
        ...

    def read_blocks(self, block_ids: IntArray) -> npt.NDArray[np.uint8]:
        """A copy of K and V of these blocks, [n, bytes of a block]."""
        ...

    def write_blocks(self, block_ids: IntArray, values: npt.NDArray[np.uint8]) -> None:
        """Put what ``read_blocks`` gave, [n, bytes of a block], into these blocks."""
        ...
