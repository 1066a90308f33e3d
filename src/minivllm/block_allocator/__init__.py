"""Block allocator: block ids, reference counts, free list and prefix index. Knows no tensors or requests."""

from typing import Literal

from minivllm.block_allocator.interface import (
    AllocatorSnapshot,
    AllocatorStats,
    BlockAllocator,
    BlockState,
    PrefixMatch,
    PublishedBlocks,
)
from minivllm.block_allocator.native import NativeBlockAllocator
from minivllm.block_allocator.reference import ReferenceBlockAllocator
from minivllm.errors import ConfigError, shown

__all__ = [
    "AllocatorSnapshot",
    "AllocatorStats",
    "BlockAllocator",
    "BlockState",
    "NativeBlockAllocator",
    "PrefixMatch",
    "PublishedBlocks",
    "ReferenceBlockAllocator",
    "create_block_allocator",
]


def create_block_allocator(
    num_blocks: int, block_size: int, kind: Literal["native", "reference"] = "native"
) -> BlockAllocator:
    """A new allocator, all blocks free: the C++ one, or its Python twin, which answers the same."""
    if kind == "native":
        return NativeBlockAllocator(num_blocks, block_size)
    if kind == "reference":
        return ReferenceBlockAllocator(num_blocks, block_size)
    raise ConfigError(f"there is no block allocator {shown(kind)}: choose 'native' or 'reference'")
