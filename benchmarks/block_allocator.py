"""How much faster the C++ block allocator is than its Python twin, called from Python.

    python benchmarks/block_allocator.py

Measured in processor time, the best of several runs: matching and publishing a prefix of 2,048 blocks; a
trace of calls, recorded from sequences that come, share, grow, publish and go in a pool too small for them;
a match under one system prompt with ever more continuations.
"""

import random
import time
from array import array
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from minivllm.block_allocator import BlockAllocator, create_block_allocator

BLOCK_SIZE = 16
CHAIN = 2048  # blocks: 32k tokens
Kind = Literal["native", "reference"]
Trace = list[tuple[str, tuple[Any, ...]]]


def best_time(run: Callable[[Any], Any], prepare: Callable[[], Any] = lambda: None, repeat: int = 7) -> float:
    """Seconds of the fastest ``run(prepare())``, without the preparation."""
    times = []
    for _ in range(repeat):
        argument = prepare()
        start = time.process_time()
        run(argument)
        times.append(time.process_time() - start)
    return min(times)


def chain(kind: Kind) -> tuple[float, float]:
    """Seconds to publish 2,048 blocks, and to match them."""
    tokens = np.random.default_rng(1).integers(0, 50_000, CHAIN * BLOCK_SIZE, np.int32)

    def empty() -> tuple[BlockAllocator, list[int]]:
        allocator = create_block_allocator(2 * CHAIN, BLOCK_SIZE, kind)
        return allocator, allocator.allocate(CHAIN) or []

    publish = best_time(lambda fresh: fresh[0].publish(b"", None, tokens, fresh[1]), empty)
    allocator, block_ids = empty()
    allocator.publish(b"", None, tokens, block_ids)
    assert allocator.match_prefix(b"", tokens).block_ids == block_ids
    return publish, best_time(lambda _: allocator.match_prefix(b"", tokens))


def recorded_trace() -> Trace:
    """The calls of 400 sequences, 12 at a time, with four system prompts, in 512 blocks.

    Each is matched, takes what is there, allocates the rest of its prompt, publishes it, then grows by block
    after block, publishing each; some are preempted on the way.
    """
    rng = random.Random(2)
    allocator = create_block_allocator(512, BLOCK_SIZE)
    trace: Trace = []

    def call(method: str, *args: Any) -> Any:
        trace.append((method, args))
        return getattr(allocator, method)(*args)

    def text(num_blocks: int) -> "array[int]":
        return array("i", [rng.randrange(50_000) for _ in range(num_blocks * BLOCK_SIZE)])

    systems = [text(rng.randrange(5, 22)) for _ in range(4)]
    running: list[tuple[array[int], list[int], int]] = []
    for _ in range(400):
        while len(running) >= 12:
            tokens, table, wanted = running.pop(rng.randrange(len(running)))
            new = call("allocate", 1) if len(table) < wanted else None
            if new is None or rng.random() < 0.02:  # finished, or preempted
                call("free", table[::-1] + (new or []))
                continue
            grown = text(1)
            table += call("publish", b"", table[-1], grown, new)
            running.append((tokens + grown, table, wanted))
        tokens = rng.choice(systems) + text(rng.randrange(1, 20))
        found = call("match_prefix", b"", tokens).block_ids
        call("fork", found)
        own = call("allocate", len(tokens) // BLOCK_SIZE - len(found))
        if own is None:
            call("free", found[::-1])
            continue
        rest = tokens[len(found) * BLOCK_SIZE :]
        table = found + call("publish", b"", found[-1] if found else None, rest, own)
        running.append((tokens, table, len(table) + rng.randrange(1, 22)))
    stats = allocator.stats()
    print(
        f"trace: {len(trace)} calls, {stats.total_allocated} blocks allocated, "
        f"{stats.total_evicted} evicted, {len(trace) / 400:.0f} calls a sequence"
    )
    return trace


def replay(kind: Kind, trace: Trace) -> float:
    """Seconds for all calls of the trace."""

    def run(allocator: BlockAllocator) -> None:
        for method, args in trace:
            getattr(allocator, method)(*args)

    return best_time(run, lambda: create_block_allocator(512, BLOCK_SIZE, kind), repeat=5)


def continuations(counts: list[int]) -> list[float]:
    """Seconds for a match of a system prompt of 21 blocks and one of so many continuations (native)."""
    rng = np.random.default_rng(3)
    allocator = create_block_allocator(max(counts) + 21, BLOCK_SIZE)
    system = rng.integers(0, 50_000, 21 * BLOCK_SIZE, np.int32)
    parent = allocator.publish(b"", None, system, allocator.allocate(21) or [])[-1]
    endings: list[Any] = []
    seconds = []
    for count in counts:
        while len(endings) < count:
            endings.append(rng.integers(0, 50_000, BLOCK_SIZE, np.int32))
            allocator.publish(b"", parent, endings[-1], allocator.allocate(1) or [])
        picks = rng.integers(0, count, 2000)
        queries = [np.concatenate([system, endings[pick]]) for pick in picks]

        def run(queries: list[Any]) -> None:
            for query in queries:
                allocator.match_prefix(b"", query)

        seconds.append(best_time(run, lambda queries=queries: queries) / len(queries))
    return seconds


def main() -> None:
    """Measure and print."""
    for name, native, twin in zip(("publish", "match"), chain("native"), chain("reference"), strict=True):
        print(
            f"{name:7} 2,048 blocks, 32k tokens: "
            f"{native * 1e6:6.0f} us, the twin {twin * 1e6:6.0f} us: {twin / native:.0f} x"
        )
    trace = recorded_trace()
    native, twin = replay("native", trace), replay("reference", trace)
    print(f"the trace: {native * 1e3:.1f} ms, the twin {twin * 1e3:.1f} ms: {twin / native:.1f} x")
    counts = [1, 1000, 100_000]
    times = continuations(counts)
    for count, seconds in zip(counts, times, strict=True):
        print(
            f"match of 336 tokens and one of {count:6} continuations: {seconds * 1e6:.1f} us, "
            f"{seconds / times[0]:.1f} x"
        )


if __name__ == "__main__":
    main()
