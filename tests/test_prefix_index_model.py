"""Both allocators with a prefix index against each other and a brute-force model of whole prefixes."""

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from helpers_prefix import KINDS, Prefix, outcome, prefixes_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minivllm.block_allocator import (
    AllocatorStats,
    BlockAllocator,
    BlockState,
    PrefixMatch,
    create_block_allocator,
)


class Model:
    """No tree: a published block is known by its namespace and all tokens up to its end."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.counts: Counter[int] = Counter()
        self.stack = list(reversed(range(num_blocks)))  # free blocks; the last one is allocated next
        self.cached: list[int] = []  # the first one is evicted next
        self.prefixes: dict[int, Prefix] = {}
        self.peak = self.allocated = self.evicted = 0

    def in_use(self, block: int) -> bool:
        if self.counts[block] or block not in self.prefixes:
            return self.counts[block] > 0
        space, tokens = self.prefixes[block]
        return any(
            self.counts[other] and other_space == space and other_tokens[: len(tokens)] == tokens
            for other, (other_space, other_tokens) in self.prefixes.items()
        )

    def block_of(self, prefix: Prefix) -> int | None:
        return next((block for block, known in self.prefixes.items() if known == prefix), None)

    def allocate(self, count: int) -> list[int] | None:
        if count > len(self.stack) + len(self.cached):
            return None
        ids = []
        for _ in range(count):
            if self.stack:
                ids.append(self.stack.pop())
            else:
                ids.append(self.cached.pop(0))
                del self.prefixes[ids[-1]]
                self.evicted += 1
        self.allocated += count
        self.add(ids)
        return ids

    def add(self, ids: list[int]) -> None:
        self.counts.update(ids)
        self.cached = [block for block in self.cached if not self.in_use(block)]
        self.peak = max(self.peak, self.num_in_use())

    def num_in_use(self) -> int:
        return sum(map(self.in_use, range(self.num_blocks)))

    def drop(self, ids: list[int]) -> None:
        for block in ids:
            self.counts[block] -= 1
            self.settle()

    def settle(self) -> None:
        """Blocks that left use go to their list: the free ones by number, the others the deepest first."""
        idle = set(range(self.num_blocks)) - {*self.stack, *self.cached}
        idle = {block for block in idle if not self.in_use(block)}
        self.stack += sorted(idle - self.prefixes.keys())
        self.cached += sorted(idle & self.prefixes.keys(), key=lambda block: -len(self.prefixes[block][1]))

    def match(self, space: bytes, tokens: list[int]) -> PrefixMatch:
        whole: list[int] = []
        end = self.block_size
        while end <= len(tokens) and (block := self.block_of((space, tuple(tokens[:end])))) is not None:
            whole.append(block)
            end += self.block_size
        begin = end - self.block_size
        rest = tokens[begin:end]
        best: tuple[int, tuple[int, ...], int] | None = None
        for block, (other_space, other) in self.prefixes.items():
            if other_space == space and len(other) == end and other[:begin] == tuple(tokens[:begin]):
                run = max(n for n in range(len(rest) + 1) if tuple(rest[:n]) == other[begin : begin + n])
                if run > 0:
                    best = min(best or (-run, other, block), (-run, other, block))
        return PrefixMatch(whole, best and best[2], -best[0] if best else 0)

    def publish(
        self, space: bytes, parent: int | None, tokens: list[int], ids: list[int]
    ) -> list[int] | None:
        """The table, or None if this is an error."""
        known = range(self.num_blocks)
        if len(tokens) != len(ids) * self.block_size or any(block not in known for block in ids):
            return None
        begin: tuple[int, ...] = ()
        if parent is not None:
            if parent not in self.prefixes or not self.counts[parent] or self.prefixes[parent][0] != space:
                return None
            begin = self.prefixes[parent][1]
        prefixes = dict(self.prefixes)
        counts = Counter(self.counts)
        table = []
        for at, block in enumerate(ids):
            prefix = (space, begin + tuple(tokens[: (at + 1) * self.block_size]))
            old = self.block_of(prefix)
            if not counts[block] or (block in prefixes and (block != old or prefixes[block] != prefix)):
                return None
            if old is None:
                prefixes[block] = prefix
            elif old != block:
                counts[block] -= 1
            table.append(block if old is None else old)
        self.prefixes = prefixes
        self.counts.update(now for now, block in zip(table, ids, strict=True) if now != block)
        self.cached = [block for block in self.cached if not self.in_use(block)]
        self.drop([block for now, block in zip(table, ids, strict=True) if now != block][::-1])
        self.peak = max(self.peak, self.num_in_use())
        return table

    def reset(self) -> None:
        self.stack += self.cached
        self.cached = []
        self.prefixes = {}
        self.settle()


@dataclass(eq=False)
class Table:
    """What a sequence would hold: ``tokens`` fill ``ids``, the last of which may be partly filled."""

    space: bytes
    tokens: list[int]
    ids: list[int]
    num_published: int  # leading blocks


DOCUMENTS = [[0] * 10, [0, 0, -1, -1, 0, -1, 0, 0, 1, 0]]
spaces = st.sampled_from([b"", b"\x00\xff"])
queries = st.lists(st.sampled_from([0, -1, 1]), max_size=8)


class TwinPrefixCaches(RuleBasedStateMachine):
    """Sequences that come, share, publish and go; loose blocks and misuse between them.

    What the sequences do comes in bursts from a seeded generator: hypothesis alone, which prefers what is
    small and few, hardly ever fills a cache.
    """

    @initialize(num_blocks=st.integers(3, 20), block_size=st.integers(1, 3))
    def create(self, num_blocks: int, block_size: int) -> None:
        self.twins: list[BlockAllocator] = [
            create_block_allocator(num_blocks, block_size, kind) for kind in KINDS
        ]
        self.model = Model(num_blocks, block_size)
        self.tables: list[Table] = []
        self.loose: list[int] = []  # references that no table accounts for

    def ask(self, method: str, *args: Any) -> tuple[str, Any]:
        """The same call to both; they must agree."""
        native, other = (outcome(lambda twin=twin: getattr(twin, method)(*args)) for twin in self.twins)
        assert native == other
        assert type(native[1]) is type(other[1])
        return native

    def allocate(self, count: int) -> list[int] | None:
        expected = self.model.allocate(count)
        assert self.ask("allocate", count) == ("answer", expected)
        return expected

    def fork(self, ids: list[int]) -> None:
        assert self.ask("fork", ids) == ("answer", None)
        self.model.add(ids)

    def free(self, ids: list[int]) -> None:
        assert self.ask("free", ids) == ("answer", None)
        self.model.drop(ids)

    def publish(
        self, space: bytes, parent: int | None, tokens: list[int], ids: list[int]
    ) -> list[int] | None:
        expected = self.model.publish(space, parent, tokens, ids)
        kind, answer = self.ask("publish", space, parent, tokens, ids)
        assert kind == ("error" if expected is None else "answer")
        assert expected is None or answer == expected
        return expected

    @rule(seed=st.integers(0, 2**32 - 1), steps=st.sampled_from([30, 10, 1]))
    def play(self, seed: int, steps: int) -> None:
        rng = random.Random(seed)
        for _ in range(steps):
            action = rng.choice(
                ["begin", "begin", "publish", "publish", "publish", "fork", "grow", "release"]
            )
            if action == "begin" or not self.tables:
                space = rng.choice([b"", b"", b"", b"\x00\xff"])
                self.begin_table(rng, space, self.some_text(rng))
                continue
            table = rng.choice(self.tables)
            full = len(table.tokens) // self.model.block_size
            if action == "publish":
                first = rng.choice([table.num_published, table.num_published, rng.randint(0, full)])
                self.publish_part(table, first, rng.choice([full, rng.randint(first, full)]))
            elif action == "fork":
                self.fork(table.ids)
                self.tables.append(Table(table.space, table.tokens, list(table.ids), table.num_published))
            elif action == "grow":
                self.grow_table(table, [rng.choice([0, -1]) for _ in range(rng.randint(1, 3))])
            else:
                self.tables.remove(table)
                self.free(rng.choice([table.ids[::-1], rng.sample(table.ids, len(table.ids))]))
            self.everything_is_as_the_model_says()

    def some_text(self, rng: random.Random) -> list[int]:
        """The beginning of a document and a few other tokens, so that texts meet again and again.

        -1 is less than 0 only if it is compared as a signed number.
        """
        return rng.choice(DOCUMENTS)[: rng.randint(0, 10)] + [
            rng.choice([0, -1]) for _ in range(rng.randint(0, 2))
        ]

    def begin_table(self, rng: random.Random, space: bytes, tokens: list[int]) -> None:
        kind, match = self.ask("match_prefix", space, tokens)
        assert (kind, match) == ("answer", self.model.match(space, tokens))
        shared = match.block_ids[: rng.choice([10, 10, rng.randint(0, 5)])]  # the rest becomes duplicates
        source = [match.partial_block] if match.partial_block is not None and rng.randint(0, 1) else []
        self.fork(shared + source)
        own = self.allocate(-(-len(tokens) // self.model.block_size) - len(shared))
        if own is None:
            self.free([*source, *shared[::-1]])
            self.make_room()
        else:
            self.free(source)
            self.tables.append(Table(space, tokens, shared + own, len(shared)))

    def grow_table(self, table: Table, tokens: list[int]) -> None:
        grown = table.tokens + tokens
        own = self.allocate(max(-(-len(grown) // self.model.block_size) - len(table.ids), 0))
        if own is None:
            self.make_room()
        else:
            table.tokens = grown
            table.ids += own

    def publish_part(self, table: Table, first: int, last: int) -> None:
        size = self.model.block_size
        parent = table.ids[first - 1] if first else None
        now = self.publish(
            table.space, parent, table.tokens[first * size : last * size], table.ids[first:last]
        )
        if now is not None:
            table.ids[first:last] = now
            table.num_published = max(table.num_published, last)

    def make_room(self) -> None:
        """A full pool would see no more than refusals."""
        self.free(self.loose)
        self.loose = []
        while self.tables and len(self.model.stack) + len(self.model.cached) < self.model.num_blocks / 2:
            self.free(self.tables.pop(0).ids[::-1])

    @rule(data=st.data(), count=st.integers(0, 8))
    def free_and_take_loose(self, data: st.DataObject, count: int) -> None:
        self.loose = data.draw(st.permutations(self.loose))
        self.free([self.loose.pop() for _ in range(data.draw(st.integers(0, len(self.loose))))])
        taken = self.allocate(count)
        if taken is None:
            self.make_room()
        self.loose += taken or []

    @rule(ids=st.lists(st.integers(-1, 12), max_size=3))
    def free_or_fork_any(self, ids: list[int]) -> None:
        if any(ids.count(block) > self.model.counts[block] for block in ids):
            assert self.ask("free", ids)[0] == "error"
        unknown = [block for block in ids if not 0 <= block < self.model.num_blocks]
        free = [block for block in ids if block in self.model.stack]
        if unknown or free:
            kind, message = self.ask("fork", ids)
            assert kind == "error"
            assert message.startswith(f"block {(unknown or free)[0]} ")
        else:
            self.fork(ids)
            self.loose += ids

    @rule(
        space=spaces,
        parent=st.none() | st.integers(-1, 12),
        tokens=queries,
        ids=st.lists(st.integers(-1, 12), max_size=4),
    )
    def publish_any(self, space: bytes, parent: int | None, tokens: list[int], ids: list[int]) -> None:
        if ids and tokens:  # mostly of the right number
            tokens = (tokens * 12)[: len(ids) * self.model.block_size] + tokens[7:]
        now = self.publish(space, parent, tokens, ids)
        for block, instead in zip(ids, now or ids, strict=True):
            if block == instead:
                continue
            holders = [ids for ids in (self.loose, *(table.ids for table in self.tables)) if block in ids]
            holders[0][holders[0].index(block)] = instead

    @rule(space=spaces, tokens=queries)
    def match_any(self, space: bytes, tokens: list[int]) -> None:
        expected = self.model.match(space, tokens)
        assert self.ask("match_prefix", space, np.array(tokens, np.int32)) == ("answer", expected)

    @rule(really=st.integers(0, 20))
    def reset(self, really: int) -> None:
        if really == 13:  # rarely
            assert self.ask("reset_prefix_cache") == ("answer", None)
            self.model.reset()
            for table in self.tables:
                table.num_published = 0

    @invariant()
    def everything_is_as_the_model_says(self) -> None:
        if not hasattr(self, "twins"):
            return
        model = self.model
        counts = [model.counts[block] for block in range(model.num_blocks)]
        states = [BlockState.IN_USE] * model.num_blocks
        for block in model.stack:
            states[block] = BlockState.FREE
        for block in model.cached:
            states[block] = BlockState.CACHED
        expected = AllocatorStats(
            num_blocks=model.num_blocks,
            num_free=len(model.stack),
            num_cached=len(model.cached),
            num_in_use=model.num_in_use(),
            num_shared=sum(count > 1 for count in counts),
            num_published=len(model.prefixes),
            peak_in_use=model.peak,
            num_references=sum(counts),
            total_allocated=model.allocated,
            total_evicted=model.evicted,
        )
        assert [state == BlockState.IN_USE for state in states] == list(map(model.in_use, range(len(states))))
        for twin in self.twins:
            twin.check_integrity()
            snapshot = twin.snapshot()
            assert snapshot.ref_counts.tolist() == counts
            assert snapshot.states.tolist() == states
            assert twin.stats() == expected
            assert twin.num_free_blocks == expected.num_free + expected.num_cached
            assert prefixes_of(twin.published()) == sorted(
                ((space, tokens), block) for block, (space, tokens) in model.prefixes.items()
            )

    def teardown(self) -> None:
        if not hasattr(self, "twins"):
            return
        for table in self.tables:
            self.free(table.ids[::-1])
        self.free(self.loose)
        assert not +self.model.counts
        for _ in range(self.model.num_blocks):  # the order in which they are evicted
            self.allocate(1)


TestTwinPrefixCaches = TwinPrefixCaches.TestCase
TestTwinPrefixCaches.settings = settings(max_examples=120, stateful_step_count=20, deadline=None)
