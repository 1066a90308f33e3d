"""NativeBlockAllocator: the C++ allocator (csrc/block_allocator.h) with the types of its interface.

The frequent calls (allocate, free, fork, ref_count, …) are inherited from the extension as they are: no
Python frame lies between the caller and C++. Knows nothing of how blocks are kept.
"""

import numpy as np

from minivllm._core import BlockAllocator as CoreBlockAllocator
from minivllm.block_allocator.interface import AllocatorSnapshot, AllocatorStats


class NativeBlockAllocator(CoreBlockAllocator):  # type: ignore[misc]  # the extension has no type stubs
    """See ``interface.BlockAllocator``."""

    def stats(self) -> AllocatorStats:
        """Counts."""
        return AllocatorStats(*self._stats())

    def snapshot(self) -> AllocatorSnapshot:
        """Every block."""
        return AllocatorSnapshot(
            np.frombuffer(self._ref_counts(), np.int32), np.frombuffer(self._states(), np.uint8)
        )
