"""Scheduler: which sequences compute how many tokens in the next step. One rule, no phases.

Every sequence has tokens, of which the leading ones are computed. A step computes some of the difference:

    token        0          num_computed_tokens               num_tokens
                 |---- in the cache ----|---- still to compute ----|
    prefill      |·····················································>|   all at once,
    chunked      |#################|·········>                          |   or as much as the budget leaves
    decode       |#####################################################|>|   the token just drawn
    cached       |#########################|···························>|   a prefix that others have computed
    recompute    |###|·················································>|   preempted: what is not cached

Whenever the last token is computed, the step yields the next one; a prompt that is only to be embedded is
finished then.

What waits, runs and is preempted is a SequenceGroup: all samples or beams of a request, or its only answer.
Running groups are served in order of rank, that is of priority, then of arrival. Each sequence gets what it
still has to compute, as far as the budget goes when every other one is left one token, so that a long prompt
cannot hold up the answers of others. Then waiting groups are admitted in order of rank, passing over those
whose prompt another one is just computing. When blocks run out, the running group of the last rank is
preempted: it gives back its blocks and waits again. So the first one always advances, and every group becomes
the first.

Knows nothing of tensors, text or models, and of memory only what KVCache tells.
"""

import time
from bisect import insort
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from operator import attrgetter

from minivllm.kv_cache.kv_cache import CachedPrefix, KVCache
from minivllm.sequence import FinishReason, ScheduledSequence, Sequence, SequenceGroup, SequenceStatus

GROWTH_TOKENS = 8
"""Tokens that each running sequence must be able to grow by before another one is admitted. On requests like
ShareGPT's through a full pool, 8 halve the preemptions and save a fifth of the rows computed, for 0.5 % of
the pool; 16 save another 8 % of the rows, for 1 % more of the pool."""

_rank = attrgetter("rank")


class Scheduler:
    """Owner of the waiting and the running queue. No waiting group holds blocks."""

    def __init__(self, kv_cache: KVCache, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.num_preemptions = 0  # of groups
        self._kv_cache = kv_cache
        self.num_queried_tokens = 0  # prompt tokens of the groups admitted for the first time
        self.num_cached_tokens = 0  # of these, found in the prefix cache
        # Both in order of rank.
        self._running: list[SequenceGroup] = []
        self._waiting: list[SequenceGroup] = []
        self._groups: dict[str, SequenceGroup] = {}  # by request_id

    @property
    def num_running(self) -> int:
        """Sequences that advance, siblings whose common prompt is still to be computed included."""
        return sum(group.width for group in self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait to be admitted, or admitted again."""
        return sum(group.width for group in self._waiting)

    def add(self, group: SequenceGroup) -> None:
        """Queue a new group. Its width must be within both limits, and all of it must fit the pool alone."""
        self._groups[group.sequences[0].request_id] = group
        insort(self._waiting, group, key=_rank)

    def schedule(self) -> list[ScheduledSequence]:
        """Plan a step, in order of rank: at most the budget's tokens, with blocks reserved for each.

        Sequences change only through ``commit``; a plan that is not carried out is simply made anew.
        """
        plan: list[ScheduledSequence] = []
        num_seqs = self.num_running
        # Tokens beyond one for each running sequence. Admission sees to it that there are so many. A group
        # that is preempted below stays counted in both: in that step fewer are admitted than could be.
        spare = self.max_num_batched_tokens - num_seqs
        at = 0
        while at < len(self._running):  # preemption shortens it from the end
            group = self._running[at]
            spare += group.width
            for entry in self._advance(group, spare):
                plan.append(entry)
                spare -= entry.num_tokens
            at += 1
        for group in self._waiting[: self.max_num_seqs]:
            num_seqs += group.width
            if num_seqs > min(self.max_num_seqs, self.max_num_batched_tokens) or group.width > spare:
                break
            first = group.sequences[0]
            prefix = self._kv_cache.match_prefix(group)
            if self._is_being_computed(first, prefix):
                num_seqs -= group.width
                continue  # it will find more in the cache than now
            if not self._has_room_to_stay(group, prefix):
                break
            self._admit(group, prefix)
            for entry in self._advance(group, spare):
                plan.append(entry)
                spare -= entry.num_tokens
        return plan

    def _advance(self, group: SequenceGroup, budget: int) -> list[ScheduledSequence]:
        """A running group's part of the step. The budget has a token for each of its sequences, or more.

        It is empty if there was too little room, and the group was itself the last one: it is preempted.
        """
        begun = group.begun
        sequences = group.sequences if begun else group.sequences[:1]
        plan = []
        others = len(sequences)  # that are still to get their part
        together = True
        for sequence in sequences:
            others -= 1
            if sequence.status is SequenceStatus.WAITING and not self._rejoin(sequence):
                together = False
                continue
            start = sequence.num_computed_tokens
            missing = len(sequence.token_ids) - start
            num_tokens = min(missing, budget - others)
            if not self._make_room(group, sequence, start + num_tokens):
                return []
            budget -= num_tokens
            if num_tokens < missing:
                together = False
            plan.append(ScheduledSequence(sequence, num_tokens, 0, (sequence,)))
        if not begun:
            return [_beginning(group, plan[0].num_tokens)]
        return plan if together else _without_draws(plan)

    def _admit(self, group: SequenceGroup, prefix: CachedPrefix) -> None:
        """From waiting to running, with what the cache has of the first sequence's tokens."""
        self._waiting.remove(group)
        insort(self._running, group, key=_rank)
        first = group.sequences[0]
        self._attach(first, prefix)
        if group.num_cached_tokens is None:  # not if it was preempted: then part of it is its own work
            group.num_cached_tokens = prefix.num_tokens
            group.admitted_at = time.monotonic()
            self.num_queried_tokens += first.num_tokens
            self.num_cached_tokens += prefix.num_tokens

    def _rejoin(self, sequence: Sequence) -> bool:
        """Let a sibling of a resumed group run too, unless another one is computing what they share."""
        prefix = self._kv_cache.match_blocks(sequence)
        if self._is_being_computed(sequence, prefix):
            return False
        self._attach(sequence, prefix)
        return True

    def _attach(self, sequence: Sequence, prefix: CachedPrefix) -> None:
        self._kv_cache.attach(sequence, prefix)
        sequence.status = SequenceStatus.RUNNING
        sequence.num_computed_tokens = prefix.num_tokens

    def _is_being_computed(self, sequence: Sequence, prefix: CachedPrefix) -> bool:
        """Whether a running sequence has the next block that this one misses, and is about to complete it.

        Two equal prompts that arrive together are so computed once. The running one advances in every step,
        or is preempted: then this one no longer waits for it.
        """
        size = self._kv_cache.block_size
        end = len(prefix.block_ids) * size + size  # of the block that is missing
        namespace = self._kv_cache.namespace(sequence)
        if namespace is None or sequence.needs_every_row or end > sequence.num_tokens:
            return False
        return any(
            other.num_computed_tokens < end <= group.num_sure_tokens
            and other.token_ids[end - size : end] == sequence.token_ids[end - size : end]
            and other.token_ids[: end - size] == sequence.token_ids[: end - size]
            and self._kv_cache.namespace(other) == namespace
            and other.status is SequenceStatus.RUNNING
            for group in self._running
            for other in group.sequences
        )

    def _has_room_to_stay(self, group: SequenceGroup, prefix: CachedPrefix) -> bool:
        """Whether the free blocks hold the whole group, and let those that run already grow a little.

        Asking only for its first chunk would admit it to be preempted soon, its work lost.
        """
        headroom = self.num_running * GROWTH_TOKENS // self._kv_cache.block_size
        # Siblings that have no blocks yet, as their prompt is still to be computed.
        headroom += sum(
            self._kv_cache.own_blocks(other) * (other.width - other.num_running)
            for other in self._running
            if other.width > 1
        )
        return self._kv_cache.blocks_missing(group, prefix) + headroom <= self._kv_cache.num_free_blocks

    def _make_room(self, group: SequenceGroup, sequence: Sequence, num_tokens: int) -> bool:
        """Reserve blocks for a sequence's leading tokens, preempting from the last group on.

        False: its group was itself the last, and has been preempted.
        """
        while not self._kv_cache.allocate(sequence, num_tokens):
            victim = self._running.pop()
            for member in victim.sequences:
                self._kv_cache.free(member)
                member.num_computed_tokens = 0
                member.status = SequenceStatus.WAITING
            insort(self._waiting, victim, key=_rank)
            self.num_preemptions += 1
            if victim is group:
                return False
        return True

    def commit(self, plan: Seq[ScheduledSequence], drawn: Iterable[tuple[Sequence, int]]) -> None:
        """Record a step that was carried out: progress, the tokens drawn, and what they finish.

        Args:
            plan: as ``schedule`` gave it.
            drawn: the samples that draw in the plan, and their tokens. Beams go on by ``branch``.
        """
        for sequence, num_tokens, *_ in plan:
            sequence.num_computed_tokens += num_tokens
        self._kv_cache.commit(plan)
        for parent, _, _, draws, _ in plan:
            for child in draws[1:]:  # those that begin with the parent's row
                self._fork(parent, child)
            if parent.pooling is not None and parent.num_computed_tokens == parent.num_tokens:
                self.finish(parent, "stop")
        for sequence, token_id in drawn:
            sequence.append(token_id)
            params = sequence.params
            if token_id in sequence.end_token_ids and sequence.num_output_tokens >= params.min_tokens:
                self.finish(sequence, "stop", token_id if token_id in params.stop_token_ids else None)
            elif sequence.num_tokens >= sequence.max_num_tokens:
                self.finish(sequence, "length")

    def branch(self, group: SequenceGroup, children: Seq[tuple[Sequence, int]]) -> None:
        """Replace the beams of a running group, which have drawn in the step just committed.

        Args:
            children: the parent and the next token of each new beam. Who is nobody's parent is let go.
        """
        beams: dict[Sequence, None] = {}
        for parent, _ in children:
            beam = parent
            if parent in beams:  # it goes on as its first child itself
                beam = parent.fork()
                self._fork(parent, beam)
            beams[beam] = None
        for sequence in group.sequences:
            if sequence not in beams:
                self._kv_cache.free(sequence)
                sequence.status = SequenceStatus.FINISHED
        group.sequences = list(beams)
        for beam, (_, token_id) in zip(group.sequences, children, strict=True):
            beam.append(token_id)

    def _fork(self, parent: Sequence, child: Sequence) -> None:
        self._kv_cache.fork(parent, child)
        child.num_computed_tokens = parent.num_computed_tokens
        child.status = SequenceStatus.RUNNING

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a sequence, waiting or running, and release its blocks.

        A finished one only gets the new reason: the last token allowed may also complete a stop string.
        """
        if sequence.status is not SequenceStatus.FINISHED:
            group = self._groups[sequence.request_id]
            group.sequences.remove(sequence)
            group.width = len(group.sequences)
            if not group.sequences:
                (self._running if group in self._running else self._waiting).remove(group)
                del self._groups[sequence.request_id]
            self._kv_cache.free(sequence)
            sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason


def _beginning(group: SequenceGroup, num_tokens: int) -> ScheduledSequence:
    """The part of a group's first sequence, in its prompt."""
    first = group.sequences[0]
    start, end = first.num_computed_tokens, first.num_computed_tokens + num_tokens
    num_scored = min(end, first.num_prompt_tokens - 1) - start if first.scores_prompt else 0
    complete = end == first.num_tokens
    if first.pooling is not None:
        return ScheduledSequence(
            first, num_tokens, num_pooled=num_tokens if first.pooling == "mean" else int(complete)
        )
    return ScheduledSequence(first, num_tokens, num_scored, tuple(group.sequences) if complete else ())


def _without_draws(plan: Seq[ScheduledSequence]) -> list[ScheduledSequence]:
    """For a group of which some have more to compute: the others leave their last token for later."""
    parts = []
    for sequence, num_tokens, *_ in plan:
        num_tokens -= sequence.num_computed_tokens + num_tokens == sequence.num_tokens
        if num_tokens:
            parts.append(ScheduledSequence(sequence, num_tokens))
    return parts
