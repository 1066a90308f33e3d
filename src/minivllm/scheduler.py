"""Scheduler: which sequences compute how many tokens in the next step. One rule, no phases.

Every sequence has tokens, of which the leading ones are computed. A step computes some of the difference:

    token        0          num_computed_tokens               num_tokens
                 |---- in the cache ----|---- still to compute ----|
    prefill      |·····················································>|   all at once,
    chunked      |#################|·········>                          |   or as much as the budget leaves
    decode       |#####################################################|>|   the token just drawn
    cached       |#########################|···························>|   a prefix that others have computed
    recompute    |###|·················································>|   preempted: what is not cached

Whenever the last token is computed, the step yields the next one.

Running sequences are served in order of arrival. Each gets what it still has to compute, as far as the
budget goes when every younger one is left one token, so that a long prompt cannot hold up the answers of
others. Then waiting sequences are admitted in order of arrival, passing over those whose prompt another one
is just computing. When blocks run out, the youngest running sequence is preempted: it gives back its blocks
and waits again. So the oldest one always advances, and every sequence becomes the oldest.

Knows nothing of tensors, text or models, and of memory only what KVCache tells.
"""

import time
from bisect import insort
from collections import deque
from collections.abc import Sequence as Seq
from itertools import islice
from operator import attrgetter

from minivllm.kv_cache.kv_cache import CachedPrefix, KVCache
from minivllm.sequence import FinishReason, ScheduledSequence, Sequence, SequenceStatus

GROWTH_TOKENS = 8
"""Tokens that each running sequence must be able to grow by before another one is admitted. On requests like
ShareGPT's through a full pool, 8 halve the preemptions and save a fifth of the rows computed, for 0.5 % of
the pool; 16 save another 8 % of the rows, for 1 % more of the pool."""

_age = attrgetter("seq_id")


class Scheduler:
    """Owner of the waiting and the running queue. No waiting sequence holds blocks."""

    def __init__(self, kv_cache: KVCache, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.num_preemptions = 0
        self._kv_cache = kv_cache
        self.num_queried_tokens = 0  # tokens of the sequences admitted for the first time
        self.num_cached_tokens = 0  # of these, found in the prefix cache
        # Both oldest first.
        self._running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks and advance in every step."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait to be admitted, or admitted again."""
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. It must fit the pool alone: ``max_num_tokens`` at most the pool's tokens."""
        self._waiting.append(sequence)

    def schedule(self) -> list[ScheduledSequence]:
        """Plan a step, oldest sequence first: at most the budget's tokens, with blocks reserved for each.

        Sequences change only through ``commit``; a plan that is not carried out is simply made anew.
        """
        plan: list[ScheduledSequence] = []
        budget = self.max_num_batched_tokens
        while len(plan) < len(self._running):
            sequence = self._running[len(plan)]
            younger = len(self._running) - len(plan) - 1
            # At least 1: admission gave each running sequence a token of the budget, and so does this rule.
            num_tokens = min(sequence.num_tokens - sequence.num_computed_tokens, budget - younger)
            if not self._make_room(sequence, num_tokens):
                break  # it was the youngest left, and is preempted
            plan.append(_scheduled(sequence, num_tokens))
            budget -= num_tokens
        for sequence in list(islice(self._waiting, self.max_num_seqs)):
            if budget == 0 or len(self._running) == self.max_num_seqs:
                break
            prefix = self._kv_cache.match_prefix(sequence)
            if self._is_being_computed(sequence, prefix):
                continue  # it will find more in the cache than now
            if not self._has_room_to_stay(sequence, prefix):
                break
            self._admit(sequence, prefix)
            num_tokens = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
            self._kv_cache.allocate(sequence, sequence.num_computed_tokens + num_tokens)
            plan.append(_scheduled(sequence, num_tokens))
            budget -= num_tokens
        return plan

    def _admit(self, sequence: Sequence, prefix: CachedPrefix) -> None:
        """From waiting to running, with what the cache has of its tokens."""
        self._kv_cache.attach(sequence, prefix)
        self._waiting.remove(sequence)
        insort(self._running, sequence, key=_age)
        sequence.status = SequenceStatus.RUNNING
        sequence.num_computed_tokens = prefix.num_tokens
        if sequence.num_cached_tokens is None:  # not if it was preempted: then part of it is its own work
            sequence.num_cached_tokens = prefix.num_tokens
            sequence.admitted_at = time.monotonic()
            self.num_queried_tokens += sequence.num_tokens
            self.num_cached_tokens += prefix.num_tokens

    def _is_being_computed(self, sequence: Sequence, prefix: CachedPrefix) -> bool:
        """Whether a running sequence has the next block that this one misses, and is about to complete it.

        Two equal prompts that arrive together are so computed once. The running one advances in every step,
        or is preempted: then this one no longer waits for it.
        """
        size = self._kv_cache.block_size
        end = len(prefix.block_ids) * size + size  # of the block that is missing
        if not self._kv_cache.prefix_caching or end > sequence.num_tokens:
            return False
        return any(
            other.num_computed_tokens < end <= other.num_tokens
            and other.token_ids[end - size : end] == sequence.token_ids[end - size : end]
            and other.token_ids[: end - size] == sequence.token_ids[: end - size]
            for other in self._running
        )

    def _has_room_to_stay(self, sequence: Sequence, prefix: CachedPrefix) -> bool:
        """Whether the free blocks hold the whole sequence, and let those that run already grow a little.

        Asking only for its first chunk would admit it to be preempted soon, its work lost.
        """
        headroom = self.num_running * GROWTH_TOKENS // self._kv_cache.block_size
        return self._kv_cache.blocks_missing(sequence, prefix) + headroom <= self._kv_cache.num_free_blocks

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Reserve blocks for the sequence's next tokens, preempting from the youngest on.

        False: the sequence was itself the youngest, and has been preempted.
        """
        while not self._kv_cache.allocate(sequence, sequence.num_computed_tokens + num_tokens):
            victim = self._running.pop()
            self._kv_cache.free(victim)
            victim.num_computed_tokens = 0
            victim.status = SequenceStatus.WAITING
            insort(self._waiting, victim, key=_age)
            self.num_preemptions += 1
            if victim is sequence:
                return False
        return True

    def commit(self, plan: Seq[ScheduledSequence], token_ids: Seq[int]) -> None:
        """Record a step that was carried out: progress, the tokens drawn, and what they finish.

        Args:
            plan: as ``schedule`` gave it.
            token_ids: one for each entry of the plan that yields a token, in order.
        """
        for sequence, num_tokens, _ in plan:
            sequence.num_computed_tokens += num_tokens
        self._kv_cache.commit(plan)
        drawing = (entry.sequence for entry in plan if entry.yields_token)
        for sequence, token_id in zip(drawing, token_ids, strict=True):
            sequence.append(token_id)
            params = sequence.params
            if token_id in sequence.end_token_ids and sequence.num_output_tokens >= params.min_tokens:
                self.finish(sequence, "stop", token_id if token_id in params.stop_token_ids else None)
            elif sequence.num_tokens >= sequence.max_num_tokens:
                self.finish(sequence, "length")

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a sequence, waiting or running, and release its blocks.

        A finished one only gets the new reason: the last token allowed may also complete a stop string.
        """
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self._waiting.remove(sequence)
        self._kv_cache.free(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason


def _scheduled(sequence: Sequence, num_tokens: int) -> ScheduledSequence:
    return ScheduledSequence(
        sequence, num_tokens, sequence.num_computed_tokens + num_tokens == sequence.num_tokens
    )
