"""KVCache: which physical blocks hold each sequence's keys and values, and the Batch that says so.

    token of the sequence    0 ........ 15 | 16 ....... 31 | 32 .. 36
    block table              [     7       ,      2        ,    9     ]      block_size 16
    slot of token 33         9 * 16 + 33 % 16 = 145

Owns the block tables. Holds no tensors (the pool's memory is the executor's to touch), and knows nothing of
queues, budgets or who goes first.
"""

from array import array
from collections import Counter
from collections.abc import Sequence as Seq

import numpy as np

from minivllm.batch import Batch, IntArray
from minivllm.block_allocator import BlockAllocator
from minivllm.errors import BlockError
from minivllm.kv_cache.kv_pool import KVGeometry
from minivllm.sequence import ScheduledSequence, Sequence

_NO_COPIES = np.empty((0, 3), np.int32)


class KVCache:
    """Block tables of the running sequences, over one pool of ``geometry.num_blocks`` blocks."""

    def __init__(self, geometry: KVGeometry, allocator: BlockAllocator) -> None:
        self.geometry = geometry
        self.block_size = geometry.block_size
        self._allocator = allocator
        self._tables: dict[int, array[int]] = {}  # seq_id → int32 block ids in order; the keys hold blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self._allocator.num_free_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def table(self, sequence: Sequence) -> list[int]:
        """The sequence's block ids in order; empty when it holds none."""
        return list(self._tables.get(sequence.seq_id, ()))

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Grow the sequence's table so that its leading ``num_tokens`` tokens have slots.

        All or nothing: False, and nothing has changed, when there are too few free blocks. Asking again for
        what is there already changes nothing, so a plan that was not carried out can simply be made anew.
        """
        table = self._tables.get(sequence.seq_id)
        missing = -(-num_tokens // self.block_size) - (len(table) if table is not None else 0)
        if missing <= 0:
            return True
        blocks = self._allocator.allocate(missing)
        if blocks is None:
            return False
        if table is None:
            self._tables[sequence.seq_id] = array("i", blocks)
        else:
            table.extend(blocks)
        return True

    def free(self, sequence: Sequence) -> None:
        """Release the sequence's blocks, the last one first. Nothing happens when it holds none."""
        table = self._tables.pop(sequence.seq_id, None)
        if table is not None:
            self._allocator.free(table[::-1].tolist())

    def batch(self, plan: Seq[ScheduledSequence]) -> Batch:
        """The arrays of one step, for a plan whose tokens all have slots."""
        tokens: list[int] = []
        starts: list[int] = []  # of each sequence: position of its first row
        ends: list[int] = []  # of each sequence: tokens in the cache after this step
        query_start = [0]
        logit_rows: list[int] = []
        for sequence, num_tokens, yields_token in plan:
            start = sequence.num_computed_tokens
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
        return Batch(
            token_ids=np.array(tokens, np.int32),
            positions=positions,
            slot_mapping=slots,
            query_start=first_rows,
            context_lens=np.array(ends, np.int32),
            block_tables=block_tables,
            logit_rows=np.array(logit_rows, np.int32),
            block_copies=_NO_COPIES,
        )

    def _block_tables(self, plan: Seq[ScheduledSequence], context_lens: Seq[int]) -> IntArray:
        """[S, W] int32, each row the blocks of that sequence's context, then zeros."""
        widths = [-(-length // self.block_size) for length in context_lens]
        tables = np.zeros((len(plan), max(widths, default=0)), np.int32)
        for row, width, scheduled in zip(tables, widths, plan, strict=True):
            row[:width] = self._tables[scheduled.sequence.seq_id][:width]
        return tables

    def check_integrity(self) -> None:
        """Compare the tables with the allocator's counts.

        Raises:
            BlockError: a block is held more or less often than the allocator believes.
        """
        self._allocator.check_integrity()
        held = Counter(block for table in self._tables.values() for block in table)
        for block, count in held.items():
            if self._allocator.ref_count(block) != count:
                raise BlockError(
                    f"block {block} is in {count} tables, but its count is {self._allocator.ref_count(block)}"
                )
        in_use = self.geometry.num_blocks - self._allocator.num_free_blocks
        if in_use != len(held):
            raise BlockError(f"{in_use} blocks are in use, but the tables hold {len(held)}")
