"""The native executor: one call into C++ a step, on CPU. Knows nothing of requests, text or file formats.

The only module that touches the decoder in ``_core``.
"""

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from minivllm._core import Decoder, supported_isas
from minivllm.batch import Batch, IntArray, SamplingBatch, StepResult
from minivllm.config import Quantization
from minivllm.errors import ConfigError
from minivllm.kv_cache.kv_pool import KVPool
from minivllm.models.config import tensor_shapes
from minivllm.models.weights import Checkpoint, WeightDtype

Format = Literal["float32", "bfloat16", "int8", "int4"]

#: What ``quantization="auto"`` makes of the stored types that are quantised
_NEAREST: dict[str, Format] = {
    "q4_0": "int4", "q4_1": "int4", "q4_k": "int4",
    "q5_0": "int8", "q5_1": "int8", "q8_0": "int8", "q2_k": "int8", "q3_k": "int8", "q5_k": "int8",
    "q6_k": "int8", "iq4_nl": "int8", "iq4_xs": "int8",
}  # fmt: skip
#: Bits of a weight in memory. int8: groups of 32 with a float16 scale; int4: with a scale and a minimum
_BITS: dict[Format, float] = {"float32": 32, "bfloat16": 16, "int8": 8.5, "int4": 5}

ISA_VARIABLE = "MINIVLLM_ISA"


class NativeExecutor:
    """Weights packed for the processor, and the step over them.

    A row's result is the same bit for bit whatever the batch, chunking, block size and number of threads.

    Args:
        checkpoint: read once, tensor by tensor; peak memory is the packed model and one tensor.
        pool: every step writes keys and values to it. Its geometry must fit the model.
        dtype: of the weights in memory, and of activations that enter a matmul.
        threads: None: as many as this process may use at a time.
        quantization: as in ``EngineConfig``.

    Raises:
        ConfigError: threads is less than 1, or MINIVLLM_ISA names an instruction set that is not there.
    """

    name = "native"
    device = "cpu"

    def __init__(
        self,
        checkpoint: Checkpoint,
        pool: KVPool,
        dtype: WeightDtype,
        threads: int | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        if threads is None:
            threads = available_threads()
        if threads < 1:
            raise ConfigError(f"threads is {threads}; it must be at least 1")
        isa = os.environ.get(ISA_VARIABLE, "")
        if isa and isa not in (isas := supported_isas()):
            raise ConfigError(
                f"{ISA_VARIABLE}={isa!r} is not among the instruction sets that this build and processor "
                f"have: {', '.join(isas)}"
            )
        self.pool = pool
        self._checkpoint = checkpoint  # for its fingerprint; its weights stay in their file
        self._number_formats = {"dtype": dtype, "quantization": quantization or "none"}
        formats = matrix_formats(checkpoint, dtype, quantization)
        try:
            self._decoder = Decoder(checkpoint.config, pool, dtype, formats, threads, isa)
        except OSError as error:
            raise ConfigError(f"{threads} threads cannot be started: {error}; use fewer threads") from error
        for tensor in checkpoint.tensors():
            self._decoder.load(tensor.name, tensor.data, tensor.dtype)
        self._decoder.check_complete()
        self.threads: int = self._decoder.num_threads
        self.isa: str = self._decoder.isa  #: instruction set that the kernels use
        self.model_bytes: int = self._decoder.model_bytes  #: memory of the packed weights

    def execute(
        self,
        batch: Batch,
        sampling: SamplingBatch,
        before_sampling: Callable[[], object] | None = None,
    ) -> StepResult:
        """One step, as ``executors.base.Executor`` says, with the GIL released.

        Raises:
            TypeError: an array has another dtype or rank than ``minivllm.batch`` says, or is not contiguous.
            ValueError: the arrays contradict each other, the model or the pool. Nothing has been written.
            RuntimeError: a row's logits have no token to choose (NaN, or every token banned).
        """
        return StepResult(*self._decoder.execute(batch, sampling, before_sampling))

    def identity(self) -> dict[str, str]:
        """Model, executor, instruction set and the formats of numbers. (Threads change no bit.)"""
        model = self._checkpoint.fingerprint
        return {"model": model, "executor": self.name, "instruction set": self.isa, **self._number_formats}

    def read_blocks(self, block_ids: IntArray) -> npt.NDArray[np.uint8]:
        """K and V of these blocks."""
        return self.pool.read_blocks(block_ids)

    def write_blocks(self, block_ids: IntArray, values: npt.NDArray[np.uint8]) -> None:
        """Put K and V into these blocks."""
        self.pool.write_blocks(block_ids, values)


def matrix_formats(
    checkpoint: Checkpoint, dtype: WeightDtype, quantization: Quantization | None
) -> dict[str, Format]:
    """The format that each matrix of a checkpoint is packed in; vectors and learned positions are float32.

    Of matrices that the decoder packs together (q, k and v; gate and up), it takes the most precise.
    """
    formats: dict[str, Format] = {}
    for name, shape in tensor_shapes(checkpoint.config).items():
        if len(shape) != 2 or name.startswith("pos_embed."):
            continue
        if quantization == "auto":
            formats[name] = _NEAREST.get(checkpoint.stored[name].dtype, dtype)
        elif quantization == "int4" and name.startswith(("embed.", "head.")):
            formats[name] = "int8"  # they decide more than their share of the memory, as ggml's files have it
        else:
            formats[name] = quantization or dtype
    return formats


def packed_bytes(checkpoint: Checkpoint, dtype: WeightDtype, quantization: Quantization | None) -> int:
    """About the memory that the packed weights of a checkpoint will take."""
    formats = matrix_formats(checkpoint, dtype, quantization)
    shapes = tensor_shapes(checkpoint.config)
    bits = sum(math.prod(shape) * _BITS[formats.get(name, "float32")] for name, shape in shapes.items())
    return int(bits) // 8


def available_threads() -> int:
    """Processors that this process may use at a time: the smaller of its affinity and its cgroup's quota."""
    # macOS has no affinity.
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return max(1, min(count, count if quota is None else int(quota)))


def cpu_quota(membership: Path, root: Path) -> float | None:
    """Processors that this process's cgroup may use, by the strictest quota up its tree; None: no quota.

    Args:
        membership: /proc/self/cgroup, lines ``id:controllers:path``.
        root: /sys/fs/cgroup.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # v2
            quotas += _quotas(root, path, lambda group: (group / "cpu.max").read_text().split())
        elif "cpu" in controllers.split(","):  # v1
            quotas += _quotas(
                root / controllers,
                path,
                lambda group: [(group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")],
            )
    return min(quotas, default=None)


def _quotas(root: Path, path: str, read: Callable[[Path], list[str]]) -> Iterator[float]:
    """Quota over period of the cgroup and its ancestors, where they have one.

    In a container the cgroup's own path may not be visible; its quota is then at the root.
    """
    group = Path("/") / path
    for ancestor in (group, *group.parents):
        try:
            quota, period = read(root / ancestor.relative_to("/"))
            if quota != "max" and int(quota) > 0:
                yield int(quota) / int(period)
        except (OSError, ValueError):
            continue
