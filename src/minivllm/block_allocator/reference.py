"""ReferenceBlockAllocator: the allocator in plain Python: the specification that the C++ one is held to.

Knows no more than its interface says. The free list is a ``dict`` used as an ordered set: it pops its newest
entry, and drops any entry, in O(1).
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from operator import index
from typing import Any

import numpy as np

from minivllm.block_allocator.interface import AllocatorSnapshot, AllocatorStats, BlockState
from minivllm.errors import BlockError

MAX_BLOCKS = 2**31 - 2
MAX_REFERENCES = 2**31 - 1


class ReferenceBlockAllocator:
    """See ``interface.BlockAllocator``."""

    def __init__(self, num_blocks: int) -> None:
        num_blocks = _to_integer(num_blocks, "num_blocks")
        if not 1 <= num_blocks <= MAX_BLOCKS:
            raise BlockError(
                f"cannot manage {_shown(num_blocks)} blocks: the number must be from 1 to {MAX_BLOCKS}"
            )
        self._ref_counts = [0] * num_blocks
        self._states = [BlockState.FREE] * num_blocks
        self._free = dict.fromkeys(range(num_blocks - 1, -1, -1))  # next to be allocated: the newest entry
        self._num_shared = 0
        self._num_references = 0
        self._peak_in_use = 0
        self._total_allocated = 0

    @property
    def num_blocks(self) -> int:
        """Physical blocks."""
        return len(self._ref_counts)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated."""
        return len(self._free)

    def allocate(self, count: int, /) -> list[int] | None:
        """Take ``count`` blocks, or ``None``."""
        count = _to_integer(count, "the number of blocks")
        if count < 0:
            raise BlockError(f"cannot allocate {_shown(count)} blocks: the number must be 0 or more")
        if count > len(self._free):
            return None
        block_ids = [self._free.popitem()[0] for _ in range(count)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
            self._states[block_id] = BlockState.IN_USE
        self._num_references += count
        self._total_allocated += count
        self._peak_in_use = max(self._peak_in_use, self.num_blocks - len(self._free))
        return block_ids

    def free(self, block_ids: Iterable[int], /) -> None:
        """Drop one reference for each entry."""
        known_ids = self._known_ids(block_ids)
        wanted: Counter[int] = Counter()
        for block_id in known_ids:
            wanted[block_id] += 1
            held = self._ref_counts[block_id]
            if held == 0:
                raise BlockError(f"block {block_id} cannot be freed: it is free already")
            if wanted[block_id] > held:
                times = known_ids.count(block_id)
                raise BlockError(
                    f"block {block_id} cannot be freed {times} times in one call: "
                    f"its reference count is {held}"
                )
        for block_id in known_ids:
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 1:
                self._num_shared -= 1
            elif self._ref_counts[block_id] == 0:
                self._states[block_id] = BlockState.FREE
                self._free[block_id] = None
        self._num_references -= len(known_ids)

    def fork(self, block_ids: Iterable[int], /) -> None:
        """Add one reference for each entry."""
        known_ids = self._known_ids(block_ids)
        wanted: Counter[int] = Counter()
        for block_id in known_ids:
            wanted[block_id] += 1
            if self._ref_counts[block_id] == 0:
                raise BlockError(f"block {block_id} cannot be forked: it is free")
            if self._ref_counts[block_id] + wanted[block_id] > MAX_REFERENCES:
                raise BlockError(
                    f"block {block_id} cannot be forked: its reference count would pass {MAX_REFERENCES}"
                )
        for block_id in known_ids:
            self._ref_counts[block_id] += 1
            if self._ref_counts[block_id] == 2:
                self._num_shared += 1
        self._num_references += len(known_ids)

    def ref_count(self, block_id: int, /) -> int:
        """References to the block."""
        return self._ref_counts[self._known_id(block_id)]

    def is_shared(self, block_id: int, /) -> bool:
        """Whether it has more than one."""
        return self.ref_count(block_id) > 1

    def stats(self) -> AllocatorStats:
        """Counts."""
        return AllocatorStats(
            num_blocks=self.num_blocks,
            num_free=len(self._free),
            num_cached=0,
            num_in_use=self.num_blocks - len(self._free),
            num_shared=self._num_shared,
            peak_in_use=self._peak_in_use,
            num_references=self._num_references,
            total_allocated=self._total_allocated,
        )

    def snapshot(self) -> AllocatorSnapshot:
        """Every block."""
        ref_counts = np.array(self._ref_counts, np.int32)
        states = np.array(self._states, np.uint8)
        ref_counts.flags.writeable = states.flags.writeable = False
        return AllocatorSnapshot(ref_counts, states)

    def check_integrity(self) -> None:
        """Raise ``BlockError`` if an invariant is broken."""
        for defect in self._defects():
            raise BlockError(defect)

    def _defects(self) -> Iterator[str]:
        for block_id in self._free:
            if not 0 <= block_id < self.num_blocks:
                yield f"the free list holds the unknown block {block_id}"
        for block_id, (count, state) in enumerate(zip(self._ref_counts, self._states, strict=True)):
            if count < 0:
                yield f"block {block_id} has the reference count {count}"
            if state != (BlockState.IN_USE if count > 0 else BlockState.FREE):
                yield f"block {block_id} has the reference count {count} but the state {state}"
            if (block_id in self._free) != (count == 0):
                where = "is on" if block_id in self._free else "is not on"
                yield f"block {block_id} has the reference count {count} but {where} the free list"
        shared = sum(count > 1 for count in self._ref_counts)
        if shared != self._num_shared:
            yield f"{shared} blocks are shared, but {self._num_shared} are counted"
        references = sum(self._ref_counts)
        if references != self._num_references:
            yield f"the reference counts add up to {references}, but {self._num_references} are counted"
        in_use = self.num_blocks - len(self._free)
        if self._peak_in_use < in_use:
            yield f"{in_use} blocks are in use, but the peak is {self._peak_in_use}"

    def _known_ids(self, block_ids: Iterable[int]) -> list[int]:
        try:
            ids = iter(block_ids)
        except TypeError:
            raise BlockError(f"block ids must be a list of integers{_not_what(block_ids)}") from None
        return [self._known_id(block_id) for block_id in list(ids)]

    def _known_id(self, block_id: int) -> int:
        block_id = _to_integer(block_id, "a block id")
        if not 0 <= block_id < self.num_blocks:
            raise BlockError(f"block {_shown(block_id)} is unknown: the ids are 0 to {self.num_blocks - 1}")
        return block_id


def _to_integer(value: Any, what: str) -> int:
    """``value`` as an int: an int, or what converts to one without loss (numpy's integers), except bool."""
    if not isinstance(value, bool):
        try:
            return index(value)
        except TypeError:
            pass
    raise BlockError(f"{what} must be an integer{_not_what(value)}")


def _not_what(value: object) -> str:
    return f", not {_shown(value)} ({type(value).__name__})"


def _shown(value: object) -> str:
    """``ascii(value)``, cut after 80 characters. (Numbers of thousands of digits cannot be printed.)"""
    try:
        text = ascii(value)
    except Exception:
        return "an unprintable value"
    return text if len(text) <= 80 else text[:80] + "..."
