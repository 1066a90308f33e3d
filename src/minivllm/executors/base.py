"""The executor interface: weights and one step of the model, on one device."""

from collections.abc import Callable
from typing import Protocol

from minivllm.batch import Batch, SamplingBatch, StepResult


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

        The step is a pure function of its arguments, the weights and the pool.

        Args:
            before_sampling: called between the model's layers and the drawing. What ``sampling.masks`` holds
                is read only after it, so that another thread can write them meanwhile.

        Raises:
            RuntimeError: "logit row R has no token to choose", and why: see ``minivllm.sampler``. It says
                nothing of other rows; the step may be repeated without that one.
        """
        ...
