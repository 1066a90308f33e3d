"""ReferenceBlockAllocator: the allocator in plain Python: the specification that the C++ one is held to.

Knows no more than its interface says. The free and the cached blocks are each a ``dict`` used as an ordered
set: it gives its newest or oldest entry, and drops any entry, in O(1).
"""

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from minivllm.block_allocator.arguments import shown, to_integer, to_list, to_namespace, to_tokens
from minivllm.block_allocator.interface import (
    AllocatorSnapshot,
    AllocatorStats,
    BlockState,
    PrefixMatch,
    PublishedBlocks,
)
from minivllm.block_allocator.prefix_tree import PrefixTree
from minivllm.errors import BlockError

MAX_BLOCKS = 2**31 - 2
MAX_BLOCK_SIZE = 2**31 - 1
MAX_REFERENCES = 2**31 - 1


class ReferenceBlockAllocator:
    """See ``interface.BlockAllocator``."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        num_blocks = to_integer(num_blocks, "num_blocks")
        block_size = to_integer(block_size, "block_size")
        if not 1 <= num_blocks <= MAX_BLOCKS:
            raise BlockError(
                f"cannot manage {shown(num_blocks)} blocks: the number must be from 1 to {MAX_BLOCKS}"
            )
        if not 1 <= block_size <= MAX_BLOCK_SIZE:
            raise BlockError(
                f"cannot manage blocks of {shown(block_size)} tokens: "
                f"the number must be from 1 to {MAX_BLOCK_SIZE}"
            )
        self._ref_counts = [0] * num_blocks
        self._states = [BlockState.FREE] * num_blocks
        self._continued = [0] * num_blocks  # how many blocks in use continue each one
        self._free = dict.fromkeys(range(num_blocks - 1, -1, -1))  # next to be allocated: the newest entry
        self._cached: dict[int, None] = {}  # next to be evicted: the oldest entry
        self._tree = PrefixTree(block_size)
        self._num_shared = 0
        self._num_references = 0
        self._peak_in_use = 0
        self._total_allocated = 0
        self._total_evicted = 0

    @property
    def num_blocks(self) -> int:
        """Physical blocks."""
        return len(self._ref_counts)

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._tree.block_size

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int, /) -> list[int] | None:
        """Take ``count`` blocks, or ``None``."""
        count = to_integer(count, "the number of blocks")
        if count < 0:
            raise BlockError(f"cannot allocate {shown(count)} blocks: the number must be 0 or more")
        if count > self.num_free_blocks:
            return None
        block_ids = [self._free.popitem()[0] if self._free else self._evict() for _ in range(count)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
            self._states[block_id] = BlockState.IN_USE
        self._num_references += count
        self._total_allocated += count
        self._peak_in_use = max(self._peak_in_use, self._num_in_use())
        return block_ids

    def free(self, block_ids: Iterable[int], /) -> None:
        """Drop one reference for each entry."""
        known_ids = self._known_ids(block_ids)
        wanted: Counter[int] = Counter()
        for block_id in known_ids:
            wanted[block_id] += 1
            held = self._ref_counts[block_id]
            if held == 0:
                why = "it is free already" if block_id in self._free else "nobody holds it"
                raise BlockError(f"block {block_id} cannot be freed: {why}")
            if wanted[block_id] > held:
                times = known_ids.count(block_id)
                raise BlockError(
                    f"block {block_id} cannot be freed {times} times in one call: "
                    f"its reference count is {held}"
                )
        for block_id in known_ids:
            self._drop_reference(block_id)

    def fork(self, block_ids: Iterable[int], /) -> None:
        """Add one reference for each entry."""
        known_ids = self._known_ids(block_ids)
        wanted: Counter[int] = Counter()
        for block_id in known_ids:
            wanted[block_id] += 1
            if block_id in self._free:
                raise BlockError(f"block {block_id} cannot be forked: it is free")
            if self._ref_counts[block_id] + wanted[block_id] > MAX_REFERENCES:
                raise BlockError(
                    f"block {block_id} cannot be forked: its reference count would pass {MAX_REFERENCES}"
                )
        for block_id in known_ids:
            self._add_reference(block_id)
        self._peak_in_use = max(self._peak_in_use, self._num_in_use())

    def match_prefix(self, namespace: bytes, token_ids: Iterable[int], /) -> PrefixMatch:
        """Find the blocks of the leading tokens."""
        return self._tree.match(to_namespace(namespace), to_tokens(token_ids))

    def publish(
        self, namespace: bytes, parent: int | None, token_ids: Iterable[int], block_ids: Iterable[int], /
    ) -> list[int]:
        """Publish blocks of a table; the blocks that it has from now on."""
        namespace = to_namespace(namespace)
        parent = None if parent is None else self._known_id(parent)
        tokens = to_tokens(token_ids)
        known_ids = self._known_ids(block_ids)
        size = self.block_size
        if len(tokens) != len(known_ids) * size:
            raise BlockError(
                f"{len(known_ids)} blocks of {size} tokens hold {len(known_ids) * size} tokens, "
                f"not {len(tokens)}"
            )
        node = self._tree.roots.get(namespace)
        if parent is not None:
            if self._ref_counts[parent] == 0:
                raise BlockError(f"block {parent} cannot be continued: nobody holds it")
            if parent not in self._tree.nodes:
                raise BlockError(f"block {parent} cannot be continued: it is not published")
            node = self._tree.nodes[parent]
            if node.namespace != namespace:
                raise BlockError(f"block {parent} cannot be continued: it is published in another namespace")

        keys = [tuple(tokens[i : i + size]) for i in range(0, len(tokens), size)]
        table = list(known_ids)
        num_old = 0  # leading blocks whose tokens are published already
        while num_old < len(keys) and node and (child := node.child(keys[num_old])):
            table[num_old] = child.block_id
            node = child
            num_old += 1
        self._check_publishable(known_ids, table, num_old)

        moved = [at for at in range(num_old) if table[at] != known_ids[at]]
        for at in moved:
            self._add_reference(table[at])
        # Behind the last published one; if there is none, the first block goes below the namespace's root.
        above = node if num_old > 0 or parent is not None else None
        for block_id, key in zip(known_ids[num_old:], keys[num_old:], strict=True):
            above = self._tree.insert(block_id, namespace, above, key)
            continued = self._tree.parent_block(block_id)
            if continued is not None:
                self._continued[continued] += 1
        for at in reversed(moved):
            self._drop_reference(known_ids[at])
        self._peak_in_use = max(self._peak_in_use, self._num_in_use())
        return table

    def _check_publishable(self, block_ids: list[int], table: list[int], num_old: int) -> None:
        """``table``: what becomes of ``block_ids``, the same block where the tokens are not published yet."""
        left: Counter[int] = Counter()  # references that moved away from a block, up to here
        new: set[int] = set()
        for at, (block_id, now) in enumerate(zip(block_ids, table, strict=True)):
            why = None
            if self._ref_counts[block_id] == 0:
                why = "nobody holds it"
            elif self._ref_counts[block_id] == left[block_id]:
                why = "it occurs more often than its reference count"
            elif block_id in new or (block_id in self._tree.nodes and (now != block_id or at >= num_old)):
                why = "it is published for other tokens"
            elif now != block_id and self._ref_counts[now] == MAX_REFERENCES:
                why = (
                    f"the reference count of block {now}, published for the same tokens, "
                    f"would pass {MAX_REFERENCES}"
                )
            if why:
                raise BlockError(f"block {block_id} cannot be published: {why}")
            if now != block_id:
                left[block_id] += 1
            if at >= num_old:
                new.add(block_id)

    def reset_prefix_cache(self) -> None:
        """Forget all published blocks."""
        for block_id in self._cached:
            self._states[block_id] = BlockState.FREE
            self._free[block_id] = None
        self._cached.clear()
        self._tree = PrefixTree(self.block_size)
        self._continued = [0] * self.num_blocks
        for block_id, state in enumerate(self._states):
            if state == BlockState.IN_USE:
                self._leave_use(block_id)  # if only a block that continued it kept it

    def published(self) -> PublishedBlocks:
        """The prefix index."""
        nodes = self._tree.by_level()
        namespaces = sorted(self._tree.roots)
        place = {namespace: at for at, namespace in enumerate(namespaces)}
        index_of = {node.block_id: at for at, node in enumerate(nodes)}
        index_of[-1] = -1  # a root
        arrays = [
            np.array([place[node.namespace] for node in nodes], np.int32),
            np.array([index_of[node.parent.block_id] for node in nodes if node.parent], np.int32),
            np.array([node.tokens for node in nodes], np.int32).reshape(-1, self.block_size),
            np.array([node.block_id for node in nodes], np.int32),
        ]
        for array in arrays:
            array.flags.writeable = False
        return PublishedBlocks(namespaces, *arrays)

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
            num_cached=len(self._cached),
            num_in_use=self._num_in_use(),
            num_shared=self._num_shared,
            num_published=len(self._tree.nodes),
            peak_in_use=self._peak_in_use,
            num_references=self._num_references,
            total_allocated=self._total_allocated,
            total_evicted=self._total_evicted,
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
        for name, blocks in (("free list", self._free), ("list of cached blocks", self._cached)):
            for block_id in blocks:
                if not 0 <= block_id < self.num_blocks:
                    yield f"the {name} holds the unknown block {block_id}"
        if defect := self._tree.defect():
            yield f"the prefix index is broken: {defect}"
        parents = {block_id: self._tree.parent_block(block_id) for block_id in self._tree.nodes}
        continued = Counter(parents[i] for i in parents if self._states[i] == BlockState.IN_USE)
        for block_id, (count, state) in enumerate(zip(self._ref_counts, self._states, strict=True)):
            if count < 0:
                yield f"block {block_id} has the reference count {count}"
            if continued[block_id] != self._continued[block_id]:
                yield (
                    f"block {block_id} is continued by {continued[block_id]} blocks in use, "
                    f"but {self._continued[block_id]} are counted"
                )
            in_use = count > 0 or continued[block_id] > 0
            idle = BlockState.CACHED if block_id in self._tree.nodes else BlockState.FREE
            if state != (BlockState.IN_USE if in_use else idle):
                yield f"block {block_id} has the reference count {count} but the state {state}"
            if (block_id in self._free) != (state == BlockState.FREE):
                where = "is on" if block_id in self._free else "is not on"
                yield f"block {block_id} has the reference count {count} but {where} the free list"
            if (block_id in self._cached) != (state == BlockState.CACHED):
                where = "is on" if block_id in self._cached else "is not on"
                yield (
                    f"block {block_id} has the reference count {count} but {where} the list of cached blocks"
                )
        place = {block_id: at for at, block_id in enumerate(self._cached)}
        for block_id, parent in parents.items():
            if parent in place and block_id in place and place[parent] < place[block_id]:
                yield f"block {parent} would be evicted before block {block_id}, which continues it"
        shared = sum(count > 1 for count in self._ref_counts)
        if shared != self._num_shared:
            yield f"{shared} blocks are shared, but {self._num_shared} are counted"
        references = sum(self._ref_counts)
        if references != self._num_references:
            yield f"the reference counts add up to {references}, but {self._num_references} are counted"
        if self._peak_in_use < self._num_in_use():
            yield f"{self._num_in_use()} blocks are in use, but the peak is {self._peak_in_use}"

    def _num_in_use(self) -> int:
        return self.num_blocks - self.num_free_blocks

    def _evict(self) -> int:
        block_id = next(iter(self._cached))
        del self._cached[block_id]
        self._tree.remove(block_id)
        self._total_evicted += 1
        return block_id

    def _add_reference(self, block_id: int) -> None:
        self._num_references += 1
        self._ref_counts[block_id] += 1
        if self._ref_counts[block_id] == 2:
            self._num_shared += 1
        at: int | None = block_id  # it returns to use, and so do the blocks that it continues
        while at is not None and self._states[at] == BlockState.CACHED:
            del self._cached[at]
            self._states[at] = BlockState.IN_USE
            at = self._tree.parent_block(at)
            if at is not None:
                self._continued[at] += 1

    def _drop_reference(self, block_id: int) -> None:
        self._num_references -= 1
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id] == 1:
            self._num_shared -= 1
        elif self._ref_counts[block_id] == 0:
            self._leave_use(block_id)

    def _leave_use(self, block_id: int) -> None:
        """If nothing keeps the block in use: to its list, and so on with the one that it continues."""
        at: int | None = block_id
        while at is not None and self._ref_counts[at] == 0 and self._continued[at] == 0:
            is_published = at in self._tree.nodes
            self._states[at] = BlockState.CACHED if is_published else BlockState.FREE
            (self._cached if is_published else self._free)[at] = None
            at = self._tree.parent_block(at)
            if at is not None:
                self._continued[at] -= 1

    def _known_ids(self, block_ids: Iterable[int]) -> list[int]:
        return [self._known_id(block_id) for block_id in to_list(block_ids, "block ids")]

    def _known_id(self, block_id: int) -> int:
        block_id = to_integer(block_id, "a block id")
        if not 0 <= block_id < self.num_blocks:
            raise BlockError(f"block {shown(block_id)} is unknown: the ids are 0 to {self.num_blocks - 1}")
        return block_id
