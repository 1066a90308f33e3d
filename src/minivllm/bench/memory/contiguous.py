"""The other way: each request gets one contiguous piece of the KV memory when it is admitted, and keeps it.

As the paper's baselines do (arXiv 2309.06180, section 6.1), with Orca's scheduling of single steps and a
buddy allocator. How much is reserved differs:

    max       the longest sequence that the model allows
    pow2      the prompt, and the output's length rounded up to a power of two
    oracle    the prompt and the output, whose length nobody knows in advance

The schedule follows the same rule as ``minivllm.scheduler``: the running first, each leaving a token of the
budget for every younger one, then those that wait, in order. Nothing is ever preempted, as everything that a
request can need is there. Knows nothing of blocks.
"""

from collections import deque
from dataclasses import dataclass
from typing import Literal

from minivllm.bench.memory.cost import CostModel
from minivllm.bench.memory.trace import Step, Trace
from minivllm.bench.memory.workload import Arrival

Scheme = Literal["max", "pow2", "oracle"]
SCHEMES: tuple[Scheme, ...] = ("max", "pow2", "oracle")


class BuddyAllocator:
    """Contiguous pieces of ``size`` slots: powers of two, each at a multiple of its own length.

    Knuth, The Art of Computer Programming, volume 1, section 2.5. A pool of another size than a power of two
    is the largest pieces that it consists of.
    """

    def __init__(self, size: int) -> None:
        self._free: dict[int, set[int]] = {}  # length → first slots of free pieces
        self._held: dict[int, int] = {}  # first slot → length
        first = 0
        for bit in range(size.bit_length() - 1, -1, -1):
            if size >> bit & 1:
                self._free[1 << bit] = {first}
                first += 1 << bit

    def allocate(self, count: int) -> int | None:
        """The first slot of a piece of at least ``count`` (1 or more) slots; None: there is none.

        It is cut from the smallest free piece that holds it, of these the first.
        """
        length = 1 << (count - 1).bit_length()
        fitting = [free for free, firsts in self._free.items() if free >= length and firsts]
        if not fitting:
            return None
        piece = min(fitting)
        first = min(self._free[piece])
        self._free[piece].remove(first)
        while piece > length:
            piece //= 2
            self._free.setdefault(piece, set()).add(first + piece)
        self._held[first] = length
        return first

    def free(self, first: int) -> None:
        """Give back a piece. It joins its buddy, the other half of what it was cut from, if that is free."""
        length = self._held.pop(first)
        while (buddy := first ^ length) in self._free.get(length, ()):
            self._free[length].remove(buddy)
            first, length = min(first, buddy), 2 * length
        self._free.setdefault(length, set()).add(first)


def reservation(scheme: Scheme, request: Arrival, max_model_len: int) -> int:
    """Slots that a sequence of this request is given."""
    if scheme == "max":
        return max_model_len
    output = request.output_len
    if scheme == "pow2":
        output = 1 << (output - 1).bit_length()
    return min(request.prompt_len + output, max_model_len)


@dataclass
class _Running:
    """A request in the pool: ``width`` sequences, which all have the prompt and their own piece of memory."""

    index: int
    request: Arrival
    pieces: list[int]  #: first slots
    reserved: int  #: slots asked for, of each sequence
    width: int
    computed: int = 0  #: tokens of each sequence in the cache
    drawn: int = 0  #: output tokens of each sequence

    def rows(self, budget: int) -> int:
        """Tokens to compute in a step; the prompt is computed once, and copied for free."""
        if self.drawn:
            return self.width
        return min(self.request.prompt_len - self.computed, budget)

    @property
    def num_sequences(self) -> int:
        """That compute: one, as long as there is the prompt only."""
        return self.width if self.drawn else 1


def run_contiguous(
    scheme: Scheme,
    requests: list[Arrival],
    *,
    slots: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    cost: CostModel,
    width: int = 1,
) -> Trace:
    """Play the requests; ``width``: sequences of each."""
    trace = Trace(slots, max_num_batched_tokens)
    buddy = BuddyAllocator(slots)
    waiting: deque[tuple[int, Arrival]] = deque()
    running: list[_Running] = []
    coming = deque(enumerate(requests))
    clock = 0.0
    while coming or waiting or running:
        if not (waiting or running):
            clock = max(clock, coming[0][1].time)
        while coming and coming[0][1].time <= clock:
            waiting.append(coming.popleft())

        budget = max_num_batched_tokens
        younger = sum(r.width for r in running)
        plan: list[tuple[_Running, int]] = []
        for one in running:
            younger -= one.width
            plan.append((one, one.rows(budget - younger)))
            budget -= plan[-1][1]
        while waiting and budget > 0 and sum(r.width for r in running) + width <= max_num_seqs:
            index, request = waiting[0]
            reserved = reservation(scheme, request, max_model_len)
            pieces = _allocate(buddy, reserved, width)
            if pieces is None:
                break
            waiting.popleft()
            running.append(_Running(index, request, pieces, reserved, width))
            plan.append((running[-1], running[-1].rows(budget)))
            budget -= plan[-1][1]
        if not plan:
            raise RuntimeError(f"a request of {reservation(scheme, waiting[0][1], max_model_len)} never fits")

        rows = sum(count for _, count in plan)
        for one, count in plan:
            one.computed += 1 if one.drawn else count
        context = sum(one.computed * one.num_sequences for one in running)
        seconds = cost.seconds(rows, context)
        trace.starts.append(clock)
        trace.steps.append(_step(seconds, rows, context, running, len(waiting)))
        clock += seconds
        for one in running:
            one.drawn += one.drawn > 0 or one.computed == one.request.prompt_len
        for one in [one for one in running if one.drawn == one.request.output_len]:
            running.remove(one)
            trace.ends[one.index] = clock
            for first in one.pieces:
                buddy.free(first)
    return trace


def _allocate(buddy: BuddyAllocator, count: int, width: int) -> list[int] | None:
    pieces: list[int] = []
    for _ in range(width):
        first = buddy.allocate(count)
        if first is None:
            for piece in pieces:
                buddy.free(piece)
            return None
        pieces.append(first)
    return pieces


def _step(seconds: float, rows: int, context: int, running: list[_Running], waiting: int) -> Step:
    tokens = sum(one.computed * one.width for one in running)
    final = sum((one.request.prompt_len + one.request.output_len) * one.width for one in running)
    reserved = sum(one.reserved * one.width for one in running)
    return Step(seconds, rows, context, len(running), waiting, tokens, final - tokens, reserved - final, 1, 1)
