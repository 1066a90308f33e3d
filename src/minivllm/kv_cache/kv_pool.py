"""KVPool: the pre-allocated memory that holds every key and value, and its geometry.

Layout, row-major:  [num_layers, num_blocks, num_kv_heads, 2 (K, V), block_size, cell]
so that what a head reads of a block, its keys and then its values, is one run of memory. A cell is the
head_dim numbers of one token; with int8, a byte q for each, x = scale · q, and then the four bytes of their
float32 scale. Knows nothing of sequences.
"""

import contextlib
import math
import mmap
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from minivllm.batch import IntArray
from minivllm.errors import ConfigError, counted

KVDtype = Literal["float32", "bfloat16", "int8"]
_ITEM: dict[KVDtype, npt.DTypeLike] = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}
_SCALE_BYTES = 4


@dataclass(frozen=True)
class KVGeometry:
    """Shape of the pool. ``block_size`` counts tokens, ``num_blocks`` physical blocks."""

    num_layers: int
    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: KVDtype

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """[num_layers, num_blocks, num_kv_heads, 2, block_size, cell]; cell: head_dim, with int8 4 more."""
        cell = self.head_dim + (_SCALE_BYTES if self.dtype == "int8" else 0)
        return (self.num_layers, self.num_blocks, self.num_kv_heads, 2, self.block_size, cell)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers, K and V."""
        return math.prod(self.shape) // self.num_blocks * np.dtype(_ITEM[self.dtype]).itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.bytes_per_block * self.num_blocks

    @property
    def num_slots(self) -> int:
        """Tokens that the pool holds."""
        return self.num_blocks * self.block_size

    def __str__(self) -> str:
        """What is reserved, in one line for people."""
        return (
            f"{counted(self.num_blocks, 'block')} × {counted(self.block_size, 'token')} = "
            f"{counted(self.num_slots, 'token')}, "
            f"{self.num_bytes / 2**20:,.1f} MiB ({self.dtype})"
        )


@dataclass(frozen=True)
class KVPool:
    """Host memory of the geometry: page-aligned, zeroed. (CUDA: the torch executor reserves a tensor.)"""

    geometry: KVGeometry
    data: npt.NDArray[Any]  #: of ``geometry.shape``; float32, uint16 (bit patterns of bfloat16) or int8

    @classmethod
    def reserve(cls, geometry: KVGeometry) -> "KVPool":
        """Reserve host memory for the geometry. The system hands out its pages when they are first written.

        Raises:
            ConfigError: the system refuses that much memory.
        """
        try:
            # Private, so that it is ordinary memory (Python's default is shared memory, without huge pages).
            buffer = mmap.mmap(-1, geometry.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise ConfigError(
                f"the system does not give memory for a KV cache of {geometry} ({error}); "
                f"use a smaller num_blocks or kv_cache_memory"
            ) from None
        if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux: fewer TLB misses; a kernel without them says EINVAL
            with contextlib.suppress(OSError):
                buffer.madvise(mmap.MADV_HUGEPAGE)
        return cls(geometry, np.frombuffer(buffer, dtype=_ITEM[geometry.dtype]).reshape(geometry.shape))

    def read_blocks(self, block_ids: IntArray) -> npt.NDArray[np.uint8]:
        """A copy of these blocks, [n, bytes_per_block]: K and V of each, in the order of the pool's axes."""
        values = self.data[:, block_ids]  # [num_layers, n, num_kv_heads, 2, block_size, cell]
        ordered = np.ascontiguousarray(values.swapaxes(0, 1))
        return ordered.view(np.uint8).reshape(len(block_ids), self.geometry.bytes_per_block)

    def write_blocks(self, block_ids: IntArray, values: npt.NDArray[np.uint8]) -> None:
        """Put back what ``read_blocks`` gave, [n, bytes_per_block], into blocks that nobody uses."""
        num_layers, _, *rest = self.geometry.shape
        blocks = values.view(self.data.dtype).reshape(len(block_ids), num_layers, *rest)
        self.data[:, block_ids] = blocks.swapaxes(0, 1)
