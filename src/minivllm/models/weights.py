"""Checkpoint: what every loader returns. Weights are read lazily, one tensor at a time.

So peak memory at load is the executor's own copy plus one tensor. Formats live in ``nanogpt``, ``hf``
and ``gguf``; this module only names what they have in common.
"""

import hashlib
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from minivllm.errors import ModelError, shown
from minivllm.models.config import ModelConfig, tensor_shapes
from minivllm.models.quants import BLOCKS, BlockType, bfloat16_to_float32, dequantize

WeightDtype = Literal["float32", "bfloat16"]  #: of weights in memory that are not quantised
TensorDtype = Literal["float32", "float16", "bfloat16", BlockType]


@dataclass(frozen=True)
class WeightTensor:
    """One tensor as the file stores it, under its canonical name (``models.config.tensor_shapes``)."""

    name: str
    shape: tuple[int, ...]
    dtype: TensorDtype
    data: npt.NDArray[Any]
    """float32/float16: that numpy dtype, of ``shape``; bfloat16: uint16 bit patterns, of ``shape``;
    others: uint8, [rows, bytes of a row] of ggml blocks (``models.quants``) of weights along the inputs.
    C-contiguous and aligned; often a read-only view of the mapped file."""

    @np.errstate(all="ignore")  # NaN of any kind
    def to_float32(self) -> npt.NDArray[np.float32]:
        """The values as a float32 array of ``shape`` (a copy, unless they are float32 already)."""
        if self.dtype == "float32":
            return self.data
        if self.dtype == "float16":
            return self.data.astype(np.float32)
        if self.dtype == "bfloat16":
            return bfloat16_to_float32(self.data)
        return dequantize(self.data, self.dtype)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file whose header has been checked; nothing of it is read before ``read``."""

    shape: tuple[int, ...]
    dtype: TensorDtype
    read: Callable[[], npt.NDArray[Any]]  #: data as in ``WeightTensor``, contiguous or not
    mapped: npt.NDArray[np.uint8] | None = field(default=None, repr=False)
    """The bytes that ``read`` reads, as ``map_file`` mapped them; None: they are in memory anyway."""

    def rows(self, start: int, stop: int) -> "StoredTensor":
        """Rows start : stop (of the first dimension), which must exist."""
        assert 0 <= start <= stop <= self.shape[0], "the caller has checked the shape"
        return replace(self, shape=(stop - start, *self.shape[1:]), read=lambda: self.read()[start:stop])

    def transposed(self) -> "StoredTensor":
        """[a, b] → [b, a]; not for quantised tensors."""
        assert self.dtype not in BLOCKS
        return replace(self, shape=self.shape[::-1], read=lambda: self.read().T)


@dataclass(frozen=True)
class TokenizerSource:
    """Where a checkpoint's tokenizer comes from; ``text.tokenizer.load_tokenizer`` builds it."""

    kind: Literal["hf", "gguf", "chars", "gpt2"]
    path: Path | None = None  #: hf: the directory; gpt2: the directory searched for vocabulary files
    data: Mapping[str, Any] | None = None  #: gguf: the ``tokenizer.*`` metadata; chars: {"itos": [...]}


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk, checked but not yet read.

    Raises:
        ModelError: on construction, where a tensor of ``tensor_shapes(config)`` is missing or has another
            shape.
    """

    config: ModelConfig
    dtype: WeightDtype  #: what ``dtype="auto"`` means for it
    path: Path
    eos_token_ids: tuple[int, ...]
    tokenizer: TokenizerSource | None
    stored: Mapping[str, StoredTensor] = field(repr=False)  #: by canonical name

    def __post_init__(self) -> None:
        for name, shape in tensor_shapes(self.config).items():
            if name not in self.stored:
                raise ModelError(f"{self.path}: the tensor for {name} {list(shape)} is missing")
            if self.stored[name].shape != shape:
                raise ModelError(
                    f"{self.path}: the tensor for {name} has shape {list(self.stored[name].shape)}, "
                    f"but the configuration asks for {list(shape)}"
                )

    def tensors(self) -> Iterator[WeightTensor]:
        """Every tensor of ``tensor_shapes(config)``, once, in that order, each read when it is asked for."""
        for name, shape in tensor_shapes(self.config).items():
            stored = self.stored[name]
            data = np.require(stored.read(), requirements=["C", "ALIGNED"])
            yield WeightTensor(name, shape, stored.dtype, data)
            if stored.mapped is not None:
                _release_pages(stored.mapped)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, of the configuration and of every tensor as it is stored.

        Two checkpoints with the same one are the same model, wherever they lie. The first time it reads
        all weights, about a gigabyte a second.
        """
        digest = hashlib.sha256(repr(self.config).encode())
        for tensor in self.tensors():
            digest.update(f"\n{tensor.name} {tensor.dtype} {tensor.shape}\n".encode())
            digest.update(tensor.data.data)
        return digest.hexdigest()


def split_rows(path: Path, name: str, tensor: StoredTensor, sizes: list[int]) -> list[StoredTensor]:
    """Consecutive runs of rows, of these sizes, which must add up to all rows.

    Raises:
        ModelError: they do not.
    """
    if not tensor.shape or tensor.shape[0] != sum(sizes):
        raise ModelError(
            f"{path}: tensor {shown(name)} has shape {list(tensor.shape)}, but the configuration asks for "
            f"{sum(sizes)} rows"
        )
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [tensor.rows(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def refuse_unused(path: Path, names: Iterable[str], used: Iterable[str]) -> None:
    """Refuse tensors that no part of the decoder would use: the model is not the one that we know.

    Raises:
        ModelError: one of ``names`` is not in ``used``.
    """
    unused = sorted(set(names) - set(used))
    if unused:
        more = f" (and {len(unused) - 1} more)" if len(unused) > 1 else ""
        raise ModelError(
            f"{path}: tensor {shown(unused[0])}{more} has no place in this model; "
            "the checkpoint is of a variant that is not implemented"
        )


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """The file's bytes, mapped read-only: uint8 [size].

    Raises:
        ModelError: the file is empty.
        OSError: it cannot be opened.
    """
    if path.stat().st_size == 0:
        raise ModelError(f"{path} is empty")
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))  # mapped as long as a view lives


def _release_pages(mapped: npt.NDArray[np.uint8]) -> None:
    """Let go of the memory behind a part of a mapped file; whoever reads it again gets it from the file.

    Otherwise a process seems to hold the whole file beside its packed copy of it.
    """
    base: Any = mapped
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):  # not everywhere
        whole = np.frombuffer(base, np.uint8)
        start = mapped.ctypes.data - whole.ctypes.data
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        base.madvise(mmap.MADV_DONTNEED, page, start + mapped.nbytes - page)
