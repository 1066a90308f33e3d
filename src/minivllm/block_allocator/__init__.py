"""Block allocator: physical block ids, reference counts and the free list. Knows no tensors or requests."""

from typing import Literal

from minivllm.block_allocator.interface import (
    AllocatorSnapshot,
    AllocatorStats,
    BlockAllocator,
    BlockState,
)
from minivllm.block_allocator.native import NativeBlockAllocator
from minivllm.block_allocator.reference import ReferenceBlockAllocator
from minivllm.errors import ConfigError

__all__ = [
    "AllocatorSnapshot",
    "AllocatorStats",
    "BlockAllocator",
    "BlockState",
    "NativeBlockAllocator",
    "ReferenceBlockAllocator",
    "create_block_allocator",
]


def create_block_allocator(
    num_blocks: int, kind: Literal["native", "reference"] = "native"
) -> BlockAllocator:
    """An allocator of ``num_blocks`` free blocks: the C++ one, or its Python twin, which answers the same."""
    if kind == "native":
        return NativeBlockAllocator(num_blocks)
    if kind == "reference":
        return ReferenceBlockAllocator(num_blocks)
    raise ConfigError(f"there is no block allocator {kind!r}: choose 'native' or 'reference'")
