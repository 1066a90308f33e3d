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

The samples and beams of a request are forks: they hold the same blocks, until one of them writes to a block
that others hold too, and gets a copy of its own first. The last one to write keeps the block.

    three forks, 20 tokens   [ shared by all 3 ] [ t16 .. t19 | ·
    each writes token 20     [ shared by all 3 ] [ copied     | a   [ copied     | b   [ t16 .. t19 | c

Owns the block tables. Holds no tensors (the pool's memory is the executor's to touch), and knows nothing of
queues, budgets or who goes first.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from minivllm.batch import NO_ROWS, NO_SLOT, Batch, IntArray
from minivllm.block_allocator import BlockAllocator, PrefixMatch, PublishedBlocks
from minivllm.errors import BlockError
from minivllm.kv_cache.kv_pool import KVGeometry
from minivllm.sequence import ScheduledSequence, Sequence, SequenceGroup

_NO_COPIES = np.empty((0, 3), np.int32)
_EVERYBODYS = b""  # namespace of the sequences without a cache_salt


@dataclass(frozen=True)
class CachedPrefix:
    """Leading tokens of a sequence whose keys and values are in the cache already."""

    num_tokens: int
    """In whole blocks and in the partial one; less than the sequence's, as its last is computed."""
    block_ids: list[int]  #: published blocks to share
    partial_block: int | None  #: a published block whose first ``partial_tokens`` are copied
    partial_tokens: int


_NO_MATCH = PrefixMatch([], None, 0)
_NOTHING_CACHED = CachedPrefix(0, [], None, 0)


@dataclass(eq=False)
class _Table:
    """The blocks that one sequence holds."""

    block_ids: "array[int]"  # int32, in order
    num_published: int = 0  # leading blocks in the prefix index: complete, perhaps shared, never written to
    # What the next step copies: from which block (which is held until then), to which, and how many slots.
    copy: tuple[int, int, int] | None = None


class KVCache:
    """Block tables of the running sequences, over one pool of ``geometry.num_blocks`` blocks.

    Args:
        geometry: of the pool.
        allocator: of as many blocks, and of the same block size.
        prefix_caching: share blocks among requests; else only among the sequences of each.
    """

    def __init__(self, geometry: KVGeometry, allocator: BlockAllocator, prefix_caching: bool = True) -> None:
        self.geometry = geometry
        self.block_size = geometry.block_size
        self.prefix_caching = prefix_caching
        self._allocator = allocator
        self._tables: dict[Sequence, _Table] = {}
        self._copied_from: dict[int, int] = {}  # block → tables that hold it only to copy from it

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
        table = self._tables.get(sequence)
        return [] if table is None else table.block_ids.tolist()

    def own_blocks(self, group: SequenceGroup) -> int:
        """Blocks that each sequence of a group holds besides the whole blocks of their prompt."""
        first = group.sequences[0]
        return self.blocks_for(first.num_tokens) - first.num_prompt_tokens // self.block_size

    def match_prefix(self, group: SequenceGroup) -> CachedPrefix:
        """What the cache has of the first sequence's tokens, of a waiting group. Changes nothing.

        Its last token is always left to compute, since its row yields the next one. If that token's block is
        found too, the row finds its own keys and values there and writes nothing.
        """
        sequence = group.sequences[0]
        if sequence.needs_every_row:
            return _NOTHING_CACHED
        match = self._match(sequence)
        prefix = self._whole_blocks(sequence, match)
        partial = min(match.partial_tokens, sequence.num_tokens - 1 - prefix.num_tokens)
        # The partial block stays held until it is copied. A group that fits alone must fit without it.
        if partial <= 0 or self.num_free_blocks <= self.blocks_missing(group, prefix):
            return prefix
        return CachedPrefix(prefix.num_tokens + partial, match.block_ids, match.partial_block, partial)

    def match_blocks(self, sequence: Sequence) -> CachedPrefix:
        """The whole blocks that the cache has of a sequence's tokens. Changes nothing."""
        return self._whole_blocks(sequence, self._match(sequence))

    def _match(self, sequence: Sequence) -> PrefixMatch:
        namespace = self.namespace(sequence)
        if namespace is None:
            return _NO_MATCH
        return self._allocator.match_prefix(namespace, sequence.token_ids)

    def _whole_blocks(self, sequence: Sequence, match: PrefixMatch) -> CachedPrefix:
        num_tokens = min(len(match.block_ids) * self.block_size, sequence.num_tokens - 1)
        return CachedPrefix(num_tokens, match.block_ids, None, 0)

    def namespace(self, sequence: Sequence) -> bytes | None:
        """Of the prefix index, where the sequence finds and publishes blocks. None: nowhere."""
        if self.prefix_caching:
            return sequence.namespace
        return b"request %d" % sequence.seq_id if sequence.params.n > 1 else None

    def blocks_missing(self, group: SequenceGroup, prefix: CachedPrefix) -> int:
        """Free blocks that it takes to hold all tokens of a waiting group, given what is cached."""
        first = group.sequences[0]
        held_already = sum(self._allocator.ref_count(block) > 0 for block in prefix.block_ids)
        return self.blocks_for(first.num_tokens) - held_already + (group.width - 1) * self.own_blocks(group)

    def attach(self, sequence: Sequence, prefix: CachedPrefix) -> None:
        """Give a waiting sequence its first table: what has just been found for it.

        For what ``match_prefix`` found there must be ``blocks_missing`` free blocks.
        """
        self._allocator.fork(prefix.block_ids)
        table = _Table(array("i", prefix.block_ids), len(prefix.block_ids))
        self._tables[sequence] = table
        if prefix.partial_block is not None:
            # First: else it might itself be evicted and handed out.
            self._allocator.fork((prefix.partial_block,))
            own = self._allocator.allocate(1)
            assert own is not None, "blocks_missing says that there is one"
            table.block_ids.extend(own)
            self._plan_copy(table, prefix.partial_block, own[0], prefix.partial_tokens)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a sequence without blocks share those of another that has the same computed tokens."""
        table = self._tables[parent]
        self._allocator.fork(table.block_ids)
        self._tables[child] = _Table(table.block_ids[:], table.num_published)

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Grow the sequence's table so that its leading ``num_tokens`` tokens have slots of its own to go to.

        All or nothing: False, and nothing has changed, when there are too few free blocks. Asking again for
        what is there already changes nothing, so a plan that was not carried out can simply be made anew.
        """
        table = self._tables.get(sequence)
        if table is None:
            table = _Table(array("i"))
        held = len(table.block_ids)
        missing = max(0, self.blocks_for(num_tokens) - held)
        index = sequence.num_computed_tokens // self.block_size  # of the first block that is written to
        # Nobody writes to published blocks; they may be shared.
        copied = table.num_published <= index < held and self._is_shared(table.block_ids[index])
        if not missing and not copied:
            return True
        blocks = self._allocator.allocate(missing + copied)
        if blocks is None:
            return False
        if copied:
            source, table.block_ids[index] = table.block_ids[index], blocks.pop()
            self._plan_copy(
                table, source, table.block_ids[index], sequence.num_computed_tokens % self.block_size
            )
        table.block_ids.extend(blocks)
        self._tables[sequence] = table
        return True

    def _is_shared(self, block: int) -> bool:
        """Whether a block is in several tables, those that hold it only to copy from it left out."""
        return self._allocator.ref_count(block) - self._copied_from.get(block, 0) > 1

    def free(self, sequence: Sequence) -> None:
        """Release the sequence's blocks, the last one first. Nothing happens when it holds none.

        Those that are published stay in the cache until the memory is needed.
        """
        table = self._tables.pop(sequence, None)
        if table is not None:
            self._finish_copy(table)
            self._allocator.free(table.block_ids[::-1])

    def commit(self, plan: Iterable[ScheduledSequence]) -> None:
        """After a step was carried out and progress recorded: publish the blocks that it completed."""
        for sequence, *_ in plan:
            table = self._tables[sequence]
            if table.copy is not None:
                self._finish_copy(table)
            if sequence.num_computed_tokens >= (table.num_published + 1) * self.block_size:
                self._publish(sequence, table)

    def _publish(self, sequence: Sequence, table: _Table) -> None:
        namespace = self.namespace(sequence)
        if namespace is None:
            return
        first, last = table.num_published, sequence.num_computed_tokens // self.block_size
        parent = table.block_ids[first - 1] if first else None
        tokens = sequence.token_ids[first * self.block_size : last * self.block_size]
        blocks = self._allocator.publish(namespace, parent, tokens, table.block_ids[first:last])
        table.block_ids[first:last] = array("i", blocks)
        table.num_published = last

    def reset_prefix_cache(self) -> None:
        """Forget every published block, except for those of sequences that run."""
        self._allocator.reset_prefix_cache()
        for sequence, table in self._tables.items():
            table.num_published = 0
            self._publish(sequence, table)

    def published(self) -> PublishedBlocks:
        """The prefixes that all requests share, for saving them: the index of the empty namespace."""
        index = self._allocator.published()
        shared = np.array([namespace == _EVERYBODYS for namespace in index.namespaces], bool)
        rows = np.flatnonzero(shared[index.namespace_index]).astype(np.int32)
        place = np.full(len(index.parents) + 1, -1, np.int32)  # the last entry is that of parent -1
        place[rows] = np.arange(len(rows))
        return PublishedBlocks(
            [_EVERYBODYS] if len(rows) else [],
            np.zeros(len(rows), np.int32),
            place[index.parents[rows]],
            index.token_ids[rows],
            index.block_ids[rows],
        )

    def restore(
        self, parents: IntArray, token_ids: IntArray, write: Callable[[IntArray, IntArray], None]
    ) -> int:
        """Publish blocks as ``published`` told them: of those that are not yet, the first, as many as fit.

        They go to empty blocks. A block in use stays as it is, and so does a cached one.

        Args:
            parents: [n] index of the block that each one continues, before it; -1: none.
            token_ids: [n, block_size].
            write: puts K and V of those with these indices into these blocks. What it raises is passed on,
                and nothing is published.

        Returns: how many of them are published now.
        """
        places = self._places(parents, token_ids)
        missing = np.flatnonzero(places < 0)[: self._allocator.stats().num_free].astype(np.int32)
        fresh = self._allocator.allocate(len(missing))
        assert fresh is not None, "so many are free"
        held = places[places >= 0].tolist()
        self._allocator.fork(held)
        held += fresh
        try:
            write(missing, np.array(fresh, np.int32))
            for at, index in enumerate(missing.tolist(), len(held) - len(fresh)):
                parent = int(parents[index])
                before = int(places[parent]) if parent >= 0 else None
                held[at : at + 1] = self._allocator.publish(
                    _EVERYBODYS, before, token_ids[index], held[at : at + 1]
                )
                places[index] = held[at]
        finally:
            self._allocator.free(held[::-1])
        return len(held)

    def _places(self, parents: IntArray, token_ids: IntArray) -> IntArray:
        """[n] the blocks where these are published already; -1: nowhere."""
        known = self.published()
        blocks = known.block_ids.tolist()
        before = [blocks[parent] if parent >= 0 else -1 for parent in known.parents.tolist()]
        index = {
            (block, tokens.tobytes()): own
            for block, tokens, own in zip(before, known.token_ids, blocks, strict=True)
        }
        places = np.full(len(parents), -1, np.int32)
        for i, parent in enumerate(parents.tolist()):
            if parent < 0 or places[parent] >= 0:
                block = places[parent] if parent >= 0 else -1
                places[i] = index.get((int(block), token_ids[i].tobytes()), -1)
        return places

    def _plan_copy(self, table: _Table, source: int, destination: int, num_slots: int) -> None:
        table.copy = (source, destination, num_slots)
        self._copied_from[source] = self._copied_from.get(source, 0) + 1

    def _finish_copy(self, table: _Table) -> None:
        if table.copy is not None:
            source = table.copy[0]
            table.copy = None
            self._allocator.free((source,))
            self._copied_from[source] -= 1
            if not self._copied_from[source]:
                del self._copied_from[source]

    def batch(self, plan: Seq[ScheduledSequence]) -> Batch:
        """The arrays of one step, for a plan whose tokens all have slots."""
        tokens: list[int] = []
        starts: list[int] = []  # of each sequence: position of its first row
        ends: list[int] = []  # of each sequence: tokens in the cache after this step
        query_start = [0]
        logit_rows: list[int] = []
        hidden_rows: list[int] = []
        stored_rows: list[int] = []  # rows whose K and V are in a published block already
        copies: list[tuple[int, int, int]] = []
        for sequence, num_tokens, num_scored, draws, num_pooled in plan:
            start = sequence.num_computed_tokens
            table = self._tables[sequence]
            if table.copy is not None:
                copies.append(table.copy)
            if start < table.num_published * self.block_size:
                stored_rows.append(query_start[-1])
            end = start + num_tokens
            tokens += sequence.token_ids[start:end]
            starts.append(start)
            ends.append(end)
            query_start.append(query_start[-1] + num_tokens)
            if num_scored:
                logit_rows += range(query_start[-2], query_start[-2] + num_scored)
            if draws:
                logit_rows += [query_start[-1] - 1] * len(draws)
            if num_pooled:
                hidden_rows += range(query_start[-1] - num_pooled, query_start[-1])
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
            hidden_rows=np.array(hidden_rows, np.int32) if hidden_rows else NO_ROWS,
        )

    def _block_tables(self, plan: Seq[ScheduledSequence], context_lens: Seq[int]) -> IntArray:
        """[S, W] int32, each row the blocks of that sequence's context, then zeros."""
        widths = [self.blocks_for(length) for length in context_lens]
        tables = np.zeros((len(plan), max(widths, default=0)), np.int32)
        for row, width, scheduled in zip(tables, widths, plan, strict=True):
            row[:width] = self._tables[scheduled.sequence].block_ids[:width]
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
