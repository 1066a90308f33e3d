"""What a block allocator does; two classes do it: ``native`` (C++, the one that is used) and ``reference``.

An allocator owns the ids of a fixed number of physical KV blocks, their reference counts and the list of free
ones. It does not know tensors, models, requests, block sizes, or who holds the references.

Every method that can be misused raises ``BlockError`` with a sentence that names the offending id or number,
and has then changed nothing: ids are checked in the order given, first whether all are known. Ids and counts
are ``int`` or numpy integers; ``bool`` and ``float`` are refused.
Not thread-safe beyond single calls: one owner drives it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt


class BlockState(IntEnum):
    """Each block is always in exactly one of these."""

    FREE = 0  #: holds nothing
    CACHED = 1  #: no references, contents kept for the prefix index; can be allocated like a free one
    IN_USE = 2  #: one reference or more


@dataclass(frozen=True)
class AllocatorStats:
    """Counts at one moment. ``num_free + num_cached + num_in_use == num_blocks``."""

    num_blocks: int
    num_free: int  #: blocks that hold nothing
    num_cached: int  #: unreferenced blocks with contents worth keeping; 0 as long as there is no prefix index
    num_in_use: int  #: blocks with one reference or more
    num_shared: int  #: of these, blocks with two or more
    peak_in_use: int  #: most blocks ever in use at once
    num_references: int  #: sum of all reference counts
    total_allocated: int  #: blocks handed out so far, a block counted each time


@dataclass(frozen=True)
class AllocatorSnapshot:
    """Every block at one moment. The arrays are copies, and read-only."""

    ref_counts: npt.NDArray[np.int32]  #: [num_blocks]
    states: npt.NDArray[np.uint8]  #: [num_blocks] of BlockState


class BlockAllocator(Protocol):
    """Reference-counted allocation of physical block ids 0 … num_blocks - 1.

    Created with ``num_blocks``, an integer from 1 to 2**31 - 2 (else ``BlockError``), all of them free.

    Which ids are handed out is part of the contract, so that runs can be repeated: the free list is last in,
    first out, and a new one yields 0, 1, 2, … The block freed last is the likeliest to be still in the
    processor's caches; and a pool that is never full keeps to few blocks, so most of its memory is never
    touched. A table released tail first is handed out again in its own order.
    """

    @property
    def num_blocks(self) -> int:
        """Physical blocks, whatever their state."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """How many blocks ``allocate`` can give: those free or cached."""
        ...

    def allocate(self, count: int, /) -> list[int] | None:
        """Take ``count`` blocks, each with one reference; their ids in the order taken.

        ``None``, with nothing changed, if fewer can be given. A negative count is a ``BlockError``.
        """
        ...

    def free(self, block_ids: Iterable[int], /) -> None:
        """Drop one reference for each entry, in the order given.

        A block whose last reference goes is then the first to be allocated. Raises ``BlockError``, with
        nothing changed, if an id is unknown or occurs more often than the block is held.
        """
        ...

    def fork(self, block_ids: Iterable[int], /) -> None:
        """Add one reference for each entry.

        Raises ``BlockError``, with nothing changed, if an id is unknown or its block not in use, or if its
        count would pass 2**31 - 1.
        """
        ...

    def ref_count(self, block_id: int, /) -> int:
        """References to the block; 0 if it is not in use."""
        ...

    def is_shared(self, block_id: int, /) -> bool:
        """Whether the block has more than one reference, so that writing into it needs a copy first."""
        ...

    def stats(self) -> AllocatorStats:
        """Counts; O(1)."""
        ...

    def snapshot(self) -> AllocatorSnapshot:
        """State and reference count of every block; one copy of 5 bytes a block."""
        ...

    def check_integrity(self) -> None:
        """Raise ``BlockError`` with the first invariant found broken: our bug. O(num_blocks)."""
        ...
