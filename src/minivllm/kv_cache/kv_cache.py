"""KVCache: which physical blocks hold each sequence's keys and values, and the Batch that says so.

    token of the sequence    0 ........ 15 | 16 ....... 31 | 32 .. 36
    block table              [     7       ,      2        ,    9     ]      block_size 16
    slot of token 33         9 * 16 + 33 % 16 = 145

Blocks whose tokens are all computed are published: a later sequence that begins with the same tokens takes
them into its own table instead of computing them, and nobody writes to them any more. Where a published block
agrees only in its leading tokens, these are copied into a fresh block (``Batch.block_copies``).

    published                [ t0 ... t15 ] [ t16 ... t31 ]
    a new prompt             [ same       ] [ 9 the same | others
    its table                [ shared     ] [ 9 copied   | computed

Owns the block tables. Holds no tensors (the pool's memory is the executor's to touch), and knows nothing of
queues, budgets or who goes first.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from minivllm.batch import NO_SLOT, Batch, IntArray
from minivllm.block_allocator import BlockAllocator, PublishedBlocks
from minivllm.errors import BlockError
from minivllm.kv_cache.kv_pool import KVGeometry
from minivllm.sequence import ScheduledSequence, Sequence

_NO_COPIES = np.empty((0, 3), np.int32)
_NAMESPACE = b""  # all sequences share one prefix index


@dataclass(frozen=True)
class CachedPrefix:
    """Leading tokens of a sequence whose keys and values are in the cache already."""

    num_tokens: (
        int  #: in whole blocks and in the partial one; less than the sequence's, as its last is computed
    )
    block_ids: list[int]  #: published blocks to share
    partial_block: int | None  #: a published block whose first ``partial_tokens`` are copied
    partial_tokens: int


_NOTHING_CACHED = CachedPrefix(0, [], None, 0)


@dataclass(eq=False)
class _Table:
    """The blocks that one sequence holds."""

    block_ids: "array[int]"  # int32, in order
    num_published: int = 0  # leading blocks in the prefix index: complete, perhaps shared, never written to
    # A published block that the next step copies from (so it is held), to which block, and how many slots.
    copy: tuple[int, int, int] | None = None


class KVCache:
    """Block tables of the running sequences, over one pool of ``geometry.num_blocks`` blocks.

    Args:
        geometry: of the pool.
        allocator: of as many blocks, and of the same block size.
        prefix_caching: publish blocks and look for published ones.
    """

    def __init__(self, geometry: KVGeometry, allocator: BlockAllocator, prefix_caching: bool = True) -> None:
        self.geometry = geometry
        self.block_size = geometry.block_size
        self.prefix_caching = prefix_caching
        self._allocator = allocator
        self._tables: dict[int, _Table] = {}  # by seq_id

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds; some may be cached."""
        return self._allocator.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Of the free blocks, those that still hold a published prefix."""
        return self._allocator.stats().num_cached

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def table(self, sequence: Sequence) -> list[int]:
        """The sequence's block ids in order; empty when it holds none."""
        table = self._tables.get(sequence.seq_id)
        return [] if table is None else table.block_ids.tolist()

    def match_prefix(self, sequence: Sequence) -> CachedPrefix:
        """What the cache has of a waiting sequence's tokens. Changes nothing.

        Its last token is always left to compute, since its row yields the next one. If that token's block is
        found too, the row finds its own keys and values there and writes nothing.
        """
        if not self.prefix_caching:
            return _NOTHING_CACHED
        last = sequence.num_tokens - 1
        match = self._allocator.match_prefix(_NAMESPACE, sequence.token_ids)
        whole = len(match.block_ids) * self.block_size
        prefix = CachedPrefix(min(whole, last), match.block_ids, None, 0)
        partial = min(match.partial_tokens, last - whole)
        # The partial block stays held until it is copied. A sequence that fits alone must fit without it.
        if partial <= 0 or self.num_free_blocks <= self.blocks_missing(sequence, prefix):
            return prefix
        return CachedPrefix(whole + partial, match.block_ids, match.partial_block, partial)

    def blocks_missing(self, sequence: Sequence, prefix: CachedPrefix) -> int:
        """Free blocks that it takes to hold all of a waiting sequence's tokens, given what is cached."""
        held_already = sum(self._allocator.ref_count(block) > 0 for block in prefix.block_ids)
        return self.blocks_for(sequence.num_tokens) - held_already

    def attach(self, sequence: Sequence, prefix: CachedPrefix) -> None:
        """Give a waiting sequence its first table: what ``match_prefix`` has just found for it.

        There must be ``blocks_missing`` free blocks.
        """
        self._allocator.fork(prefix.block_ids)
        table = _Table(array("i", prefix.block_ids), len(prefix.block_ids))
        self._tables[sequence.seq_id] = table
        if prefix.partial_block is not None:
            self._allocator.fork(
                (prefix.partial_block,)
            )  # first: else it might itself be evicted and handed out
            own = self._allocator.allocate(1)
            assert own is not None, "blocks_missing says that there is one"
            table.block_ids.extend(own)
            table.copy = (prefix.partial_block, own[0], prefix.partial_tokens)

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Grow the sequence's table so that its leading ``num_tokens`` tokens have slots.

        All or nothing: False, and nothing has changed, when there are too few free blocks. Asking again for
        what is there already changes nothing, so a plan that was not carried out can simply be made anew.
        """
        table = self._tables.get(sequence.seq_id)
        missing = self.blocks_for(num_tokens) - (0 if table is None else len(table.block_ids))
        if missing <= 0:
            return True
        blocks = self._allocator.allocate(missing)
        if blocks is None:
            return False
        if table is None:
            table = self._tables[sequence.seq_id] = _Table(array("i"))
        table.block_ids.extend(blocks)
        return True

    def free(self, sequence: Sequence) -> None:
        """Release the sequence's blocks, the last one first. Nothing happens when it holds none.

        Those that are published stay in the cache until the memory is needed.
        """
        table = self._tables.pop(sequence.seq_id, None)
        if table is not None:
            self._finish_copy(table)
            self._allocator.free(table.block_ids[::-1])

    def commit(self, plan: Iterable[ScheduledSequence]) -> None:
        """After a step was carried out and progress recorded: publish the blocks that it completed."""
        for sequence, _, _ in plan:
            table = self._tables[sequence.seq_id]
            if table.copy is not None:
                self._finish_copy(table)
            first, last = table.num_published, sequence.num_computed_tokens // self.block_size
            if last > first and self.prefix_caching:
                parent = table.block_ids[first - 1] if first else None
                tokens = sequence.token_ids[first * self.block_size : last * self.block_size]
                blocks = self._allocator.publish(_NAMESPACE, parent, tokens, table.block_ids[first:last])
                table.block_ids[first:last] = array("i", blocks)
                table.num_published = last

    def reset_prefix_cache(self) -> None:
        """Forget every published block. Sequences that run keep theirs, and publish them again."""
        self._allocator.reset_prefix_cache()
        for table in self._tables.values():
            table.num_published = 0

    def published(self) -> PublishedBlocks:
        """The prefixes that all requests share, for saving them: the index of the empty namespace."""
        index = self._allocator.published()
        shared = np.array([namespace == _NAMESPACE for namespace in index.namespaces], bool)
        rows = np.flatnonzero(shared[index.namespace_index]).astype(np.int32)
        place = np.full(len(index.parents) + 1, -1, np.int32)  # the last entry is that of parent -1
        place[rows] = np.arange(len(rows))
        return PublishedBlocks(
            [_NAMESPACE] if len(rows) else [],
            np.zeros(len(rows), np.int32),
            place[index.parents[rows]],
            index.token_ids[rows],
            index.block_ids[rows],
        )

    def restore(self, parents: IntArray, token_ids: IntArray, write: Callable[[IntArray], None]) -> int:
        """Publish blocks as ``published`` told them, as many of the first as there are empty ones.

        A block in use stays as it is, and so does a cached one.

        Args:
            parents: [n] index of the block that each one continues, before it; -1: none.
            token_ids: [n, block_size].
            write: puts K and V of the first so many into these blocks. What it raises is passed on, and
                nothing is published.

        Returns: how many.
        """
        count = min(len(parents), self._allocator.stats().num_free)
        block_ids = self._allocator.allocate(count)
        assert block_ids is not None, "so many are free"
        try:
            write(np.array(block_ids, np.int32))
            for i, parent in enumerate(parents[:count].tolist()):
                before = block_ids[parent] if parent >= 0 else None
                block_ids[i : i + 1] = self._allocator.publish(
                    _NAMESPACE, before, token_ids[i], block_ids[i : i + 1]
                )
        finally:
            self._allocator.free(block_ids[::-1])
        return count

    def _finish_copy(self, table: _Table) -> None:
        if table.copy is not None:
            self._allocator.free((table.copy[0],))
            table.copy = None

    def batch(self, plan: Seq[ScheduledSequence]) -> Batch:
        """The arrays of one step, for a plan whose tokens all have slots."""
        tokens: list[int] = []
        starts: list[int] = []  # of each sequence: position of its first row
        ends: list[int] = []  # of each sequence: tokens in the cache after this step
        query_start = [0]
        logit_rows: list[int] = []
        stored_rows: list[int] = []  # rows whose K and V are in a published block already
        copies: list[tuple[int, int, int]] = []
        for sequence, num_tokens, yields_token in plan:
            start = sequence.num_computed_tokens
            table = self._tables[sequence.seq_id]
            if table.copy is not None:
                copies.append(table.copy)
            if start < table.num_published * self.block_size:
                stored_rows.append(query_start[-1])
            end = start + num_tokens
            tokens += sequence.token_ids[start:end]
            starts.append(start)
            ends.append(end)
            query_start.append(query_start[-1] + num_tokens)
            if yields_token:
                logit_rows.append(query_start[-1] - 1)
        block_tables = self._block_tables(plan, ends)

        # Few and simple numpy calls: for one sequence their number, not their size, is what a step costs.
        first_rows = np.array(query_start, np.int32)
        counts = first_rows[1:] - first_rows[:-1]
        offsets = np.array(starts, np.int32) - first_rows[:-1]  # of each sequence: position minus row
        positions = np.arange(len(tokens), dtype=np.int32) + offsets.repeat(counts)
        index = positions // self.block_size  # of the row's block in its table
        num_seqs, width = block_tables.shape
        row_tables = np.arange(0, num_seqs * width, width, dtype=np.int32).repeat(counts)  # starts, flat
        blocks = block_tables.ravel().take(row_tables + index)
        # block * block_size + position % block_size, which is position - index * block_size
        slots = (blocks - index) * self.block_size + positions
        if stored_rows:
            slots[stored_rows] = NO_SLOT
        return Batch(
            token_ids=np.array(tokens, np.int32),
            positions=positions,
            slot_mapping=slots,
            query_start=first_rows,
            context_lens=np.array(ends, np.int32),
            block_tables=block_tables,
            logit_rows=np.array(logit_rows, np.int32),
            block_copies=np.array(copies, np.int32) if copies else _NO_COPIES,
        )

    def _block_tables(self, plan: Seq[ScheduledSequence], context_lens: Seq[int]) -> IntArray:
        """[S, W] int32, each row the blocks of that sequence's context, then zeros."""
        widths = [-(-length // self.block_size) for length in context_lens]
        tables = np.zeros((len(plan), max(widths, default=0)), np.int32)
        for row, width, scheduled in zip(tables, widths, plan, strict=True):
            row[:width] = self._tables[scheduled.sequence.seq_id].block_ids[:width]
        return tables

    def check_integrity(self) -> None:
        """Compare the tables with the allocator's counts.

        Raises:
            BlockError: a block is held more or less often than the allocator believes.
        """
        self._allocator.check_integrity()
        held = Counter(block for table in self._tables.values() for block in table.block_ids)
        held.update(table.copy[0] for table in self._tables.values() if table.copy is not None)
        for block, count in held.items():
            if self._allocator.ref_count(block) != count:
                raise BlockError(
                    f"tables hold block {block} {count} times, but its count is "
                    f"{self._allocator.ref_count(block)}"
                )
        in_use = self.geometry.num_blocks - self._allocator.num_free_blocks
        if in_use != len(held):
            raise BlockError(f"{in_use} blocks are in use, but the tables hold {len(held)}")
