"""What a block allocator does; two classes do it: ``native`` (C++, the one that is used) and ``reference``.

An allocator owns the ids of a fixed number of physical KV blocks, their reference counts, the list of free
ones, and the prefix index: which published block holds the keys and values of which tokens, behind which
others. It does not know tensors, models, requests, or who holds the references.

    namespace b"" ── [17 4 9 2] ─┬─ [5 5 1 8]            block_size 4: each node is one full block,
                      block 7    │   block 3             its key (the block it continues, its own tokens),
                                 └─ [6 0 0 1] ── …       all compared exactly
                                     block 12

A block is published when its keys and values are computed. One that is in use keeps the block that it
continues in use as well. When nothing does any more, a published block is cached: ``allocate`` may take it,
but until then ``match_prefix`` finds it and ``fork`` brings it back.

Every method that can be misused raises ``BlockError`` with a sentence that names the offending id or number,
and has then changed nothing: ids are checked in the order given, first whether all are known. Ids, tokens and
counts are ``int`` or numpy integers; ``bool`` and ``float`` are refused. Token ids are any iterable of
numbers that fit an int32; a contiguous int32 array (numpy's, ``array("i")``) is read where it lies, without
conversion. Not thread-safe beyond single calls: one owner drives it.
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
    CACHED = 1  #: published, not in use: its contents are kept until ``allocate`` needs the block
    IN_USE = 2  #: has one reference or more, or a published block that continues it is in use


@dataclass(frozen=True)
class AllocatorStats:
    """Counts at one moment. ``num_free + num_cached + num_in_use == num_blocks``."""

    num_blocks: int
    num_free: int  #: blocks that hold nothing
    num_cached: int  #: published blocks that are not in use
    num_in_use: int  #: blocks with one reference or more, and those that they continue
    num_shared: int  #: blocks with two references or more
    num_published: int  #: blocks in the prefix index, cached or in use
    peak_in_use: int  #: most blocks ever in use at once
    num_references: int  #: sum of all reference counts
    total_allocated: int  #: blocks handed out by ``allocate`` so far, a block counted each time
    total_evicted: int  #: of these, cached blocks, which the prefix index forgot


@dataclass(frozen=True)
class AllocatorSnapshot:
    """Every block at one moment. The arrays are copies, and read-only."""

    ref_counts: npt.NDArray[np.int32]  #: [num_blocks]
    states: npt.NDArray[np.uint8]  #: [num_blocks] of BlockState


@dataclass(frozen=True)
class PrefixMatch:
    """The published blocks that hold the leading tokens of a query. Nothing holds them for the asker yet."""

    block_ids: list[int]  #: whole blocks, in order
    partial_block: int | None
    """The child of the last of these (of the namespace, if there are none) that shares the longest run of
    leading tokens with what follows; of several, the one whose tokens come first; None: none does."""
    partial_tokens: int  #: the length of that run, less than ``block_size``


@dataclass(frozen=True)
class PublishedBlocks:
    """The prefix index at one moment, level by level: parents before their children. Read-only copies."""

    namespaces: list[bytes]  #: ascending
    namespace_index: npt.NDArray[np.int32]  #: [n] into ``namespaces``
    parents: npt.NDArray[np.int32]  #: [n] into these arrays; -1 at the beginning of a prefix
    token_ids: npt.NDArray[np.int32]  #: [n, block_size]
    block_ids: npt.NDArray[np.int32]  #: [n]


class BlockAllocator(Protocol):
    """Reference-counted allocation of physical block ids 0 … num_blocks - 1.

    Created with ``num_blocks``, an integer from 1 to 2**31 - 2, all of them free, and ``block_size``, the
    tokens in a block, from 1 to 2**31 - 1 (else ``BlockError``).

    Which ids are handed out is part of the contract, so that runs can be repeated: the free list is last in,
    first out, and a new one yields 0, 1, 2, … The block freed last is the likeliest to be still in the
    processor's caches; and a pool that is never full keeps to few blocks, so most of its memory is never
    touched. A table released tail first is handed out again in its own order. Cached blocks are taken when no
    block is free, the one that has been out of use for longest first; a block always leaves use after those
    that continue it, so it is evicted after them.
    """

    @property
    def num_blocks(self) -> int:
        """Physical blocks, whatever their state."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
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

        A block that thereby leaves use is the first to be allocated, or, if it is published, the last to be
        evicted. Raises ``BlockError``, with nothing changed, if an id is unknown or occurs more often than
        the block is held.
        """
        ...

    def fork(self, block_ids: Iterable[int], /) -> None:
        """Add one reference for each entry: to share a table, or to take what ``match_prefix`` found.

        Raises ``BlockError``, with nothing changed, if an id is unknown or its block free, or if its count
        would pass 2**31 - 1.
        """
        ...

    def match_prefix(self, namespace: bytes, token_ids: Iterable[int], /) -> PrefixMatch:
        """Find the published blocks that hold the leading tokens.

        A pure query: it does not even change what is evicted next. O(block_size · log n) for each block, n
        its siblings.
        """
        ...

    def publish(
        self, namespace: bytes, parent: int | None, token_ids: Iterable[int], block_ids: Iterable[int], /
    ) -> list[int]:
        """Publish consecutive full blocks of one table whose keys and values are computed.

        ``token_ids`` are the blocks' own, ``len(block_ids) * block_size`` of them. ``parent`` is the block
        before them in the table, published by an earlier call, or None if they begin it:

            table[first:last] = publish(namespace, table[first - 1] if first else None,
                                        tokens[first * block_size : last * block_size], table[first:last])

        Answers the blocks that the table has from now on: where the same tokens are published already behind
        the same blocks, the caller's reference moves to that block and leaves its own one, the last one
        first. Blocks published for just these tokens stay, so a call may be repeated.

        Raises ``BlockError``, with nothing changed, if a block is not held, or is published for other tokens;
        if the parent is not held, not published, or in another namespace; if the number of tokens does not
        fit; or if a count would pass 2**31 - 1.
        """
        ...

    def reset_prefix_cache(self) -> None:
        """Forget all published blocks: cached ones become free, those in use are as if never published.

        A table in use can be published again from its beginning; its later blocks alone have no parent any
        more.
        """
        ...

    def published(self) -> PublishedBlocks:
        """The whole prefix index, for saving it.

        To restore one: allocate a block for each node, publish each alone behind its parent in this order,
        and free them in the reverse order.
        """
        ...

    def ref_count(self, block_id: int, /) -> int:
        """References to the block. 0 also if it is in use only because another one continues it."""
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
