"""NativeBlockAllocator: the C++ allocator (csrc/block_allocator.h) with the types of its interface.

The frequent calls (allocate, free, fork, publish, ref_count, …) are inherited from the extension as they are:
no Python frame lies between the caller and C++. Knows nothing of how blocks are kept.
"""

from collections.abc import Iterable

import numpy as np

from minivllm._core import BlockAllocator as CoreBlockAllocator
from minivllm.block_allocator.interface import (
    AllocatorSnapshot,
    AllocatorStats,
    PrefixMatch,
    PublishedBlocks,
)


class NativeBlockAllocator(CoreBlockAllocator):  # type: ignore[misc]  # the extension has no type stubs
    """See ``interface.BlockAllocator``."""

    def match_prefix(self, namespace: bytes, token_ids: Iterable[int], /) -> PrefixMatch:
        """Find the blocks of the leading tokens."""
        return PrefixMatch(*self._match_prefix(namespace, token_ids))

    def published(self) -> PublishedBlocks:
        """The prefix index."""
        namespaces, *arrays = self._published()
        namespace_index, parents, token_ids, block_ids = (np.frombuffer(array, np.int32) for array in arrays)
        token_ids = token_ids.reshape(-1, self.block_size)
        return PublishedBlocks(namespaces, namespace_index, parents, token_ids, block_ids)

    def stats(self) -> AllocatorStats:
        """Counts."""
        return AllocatorStats(*self._stats())

    def snapshot(self) -> AllocatorSnapshot:
        """Every block."""
        return AllocatorSnapshot(
            np.frombuffer(self._ref_counts(), np.int32), np.frombuffer(self._states(), np.uint8)
        )
