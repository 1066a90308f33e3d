"""The scheduler over a real KVCache, stepped by a fake executor that notices every wrong table."""

import random
from collections.abc import Iterator

import pytest
from fakes import EOS, FakeExecutor, fake_continuation, fake_kv_cache
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minivllm.sampler import sampling_batch
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler import Scheduler
from minivllm.sequence import ScheduledSequence, Sequence, SequenceGroup, SequenceStatus

LENGTH = 48  # prompt + output of the longest request; the smallest pools here hold just that


class Loop:
    """Scheduler, KVCache and fake executor, checked after every step."""

    def __init__(self, num_blocks: int = 16, block_size: int = 4, budget: int = 32, max_num_seqs: int = 8):
        # Without a prefix cache: equal prompts may let others pass, which is test_prefix_cache's concern.
        self.kv_cache = fake_kv_cache(num_blocks, block_size, prefix_caching=False)
        self.scheduler = Scheduler(self.kv_cache, budget, max_num_seqs)
        self.executor = FakeExecutor(self.kv_cache.geometry)
        self.sequences: list[Sequence] = []

    def add(self, prompt_length: int, max_tokens: int, **params: object) -> Sequence:
        seq_id = len(self.sequences)
        rng = random.Random(seq_id)
        sequence = Sequence(
            seq_id=seq_id,
            request_id=str(seq_id),
            token_ids=[rng.randrange(1, 256) for _ in range(prompt_length)],
            num_prompt_tokens=prompt_length,
            params=SamplingParams(max_tokens=max_tokens, **params),
            seed=0,
            max_num_tokens=prompt_length + max_tokens,
            end_token_ids=frozenset({EOS, *params.get("stop_token_ids", ())}),
        )
        self.sequences.append(sequence)
        self.scheduler.add(SequenceGroup([sequence]))
        return sequence

    def step(self) -> list[ScheduledSequence]:
        oldest = next((s for s in self.sequences if s.status is not SequenceStatus.FINISHED), None)
        plan = self.scheduler.schedule()
        if oldest is not None:
            assert plan and plan[0].sequence is oldest, "the oldest always advances"
        self.check_plan(plan)
        batch = self.kv_cache.batch(plan)
        rows = [sequence for s in plan for sequence in s.draws]
        result = self.executor.execute(batch, sampling_batch(rows))
        self.scheduler.commit(plan, zip(rows, result.token_ids.tolist(), strict=True))
        self.check()
        return plan

    def check_plan(self, plan: list[ScheduledSequence]) -> None:
        scheduler = self.scheduler
        assert sum(s.num_tokens for s in plan) <= scheduler.max_num_batched_tokens
        assert len(plan) <= scheduler.max_num_seqs
        ids = [s.sequence.seq_id for s in plan]
        assert ids == sorted(ids), "first come, first served"
        running = [s for s in self.sequences if s.status is SequenceStatus.RUNNING]
        assert [s.sequence for s in plan] == running, "every running sequence advances in every step"
        for sequence, num_tokens, _, draws, _ in plan:
            end = sequence.num_computed_tokens + num_tokens
            assert num_tokens >= 1 and end <= sequence.num_tokens
            assert draws == ((sequence,) if end == sequence.num_tokens else ())
            assert len(self.kv_cache.table(sequence)) >= self.kv_cache.blocks_for(end)

    def check(self) -> None:
        self.kv_cache.check_integrity()
        by_status = {status: [] for status in SequenceStatus}
        for s in self.sequences:
            by_status[s.status].append(s)
            if s.status is not SequenceStatus.RUNNING:
                assert self.kv_cache.table(s) == [], "only running sequences hold blocks"
            if s.status is SequenceStatus.WAITING:
                assert s.num_computed_tokens == 0
            assert (s.finish_reason is not None) == (s.status is SequenceStatus.FINISHED)
        assert self.scheduler.num_running == len(by_status[SequenceStatus.RUNNING])
        assert self.scheduler.num_waiting == len(by_status[SequenceStatus.WAITING])
        if by_status[SequenceStatus.RUNNING] and by_status[SequenceStatus.WAITING]:
            youngest = max(s.seq_id for s in by_status[SequenceStatus.RUNNING])
            assert youngest < min(s.seq_id for s in by_status[SequenceStatus.WAITING])

    def run(self) -> Iterator[list[ScheduledSequence]]:
        while self.scheduler.num_running or self.scheduler.num_waiting:
            yield self.step()
        assert self.kv_cache.num_free_blocks == self.kv_cache.geometry.num_blocks

    def check_answer(self, sequence: Sequence) -> None:
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        max_tokens = sequence.max_num_tokens - sequence.num_prompt_tokens
        expected = fake_continuation(prompt, max_tokens, sequence.end_token_ids)
        answer = sequence.token_ids[sequence.num_prompt_tokens :]
        if sequence.finish_reason == "abort":
            assert answer == expected[: len(answer)]
        else:
            assert answer == expected
            assert sequence.finish_reason == ("stop" if answer[-1] in sequence.end_token_ids else "length")


def shape(plan: list[ScheduledSequence]) -> list[tuple[int, int, bool]]:
    return [(s.sequence.seq_id, s.num_tokens, bool(s.draws)) for s in plan]


def test_prompts_and_decodes_share_a_step_within_the_budget() -> None:
    loop = Loop(num_blocks=64, budget=10)
    loop.add(4, 3)
    loop.add(13, 2)
    loop.add(2, 3)
    assert shape(loop.step()) == [(0, 4, True), (1, 6, False)]
    assert shape(loop.step()) == [(0, 1, True), (1, 7, True), (2, 2, True)]
    assert shape(loop.step()) == [(0, 1, True), (1, 1, True), (2, 1, True)]
    assert shape(loop.step()) == [(2, 1, True)]
    for sequence in loop.sequences:
        loop.check_answer(sequence)


def test_long_prompt_does_not_hold_up_the_answers_of_others() -> None:
    loop = Loop(num_blocks=64, budget=8)
    answering = [loop.add(2, 30, ignore_eos=True) for _ in range(3)]
    loop.step()
    loop.add(100, 2)
    while loop.sequences[-1].num_output_tokens == 0:
        before = [s.num_output_tokens for s in answering]
        loop.step()
        assert [s.num_output_tokens - n for s, n in zip(answering, before, strict=True)] == [1, 1, 1]


def test_younger_running_sequences_keep_a_token_of_the_budget_each() -> None:
    # An older sequence that still has much to compute, beside younger ones that already answer: made by
    # hand, since admission in order of arrival does not lead there.
    loop = Loop(num_blocks=64, budget=8)
    old, *young = loop.add(50, 2), loop.add(2, 30), loop.add(2, 30)
    for s in (old, *young):
        loop.kv_cache.allocate(s, 1)
        s.status = SequenceStatus.RUNNING
    loop.scheduler._running, loop.scheduler._waiting = loop.scheduler._waiting, []
    for s in young:
        s.num_computed_tokens = 1
    assert shape(loop.scheduler.schedule()) == [(0, 6, False), (1, 1, True), (2, 1, True)]


def test_max_num_seqs_limits_what_runs_at_once() -> None:
    loop = Loop(num_blocks=64, max_num_seqs=2)
    for _ in range(5):
        loop.add(3, 4)
    assert max(len(plan) for plan in loop.run()) == 2


def test_budget_of_one_token_runs_one_sequence_after_the_other() -> None:
    loop = Loop(budget=1)
    for _ in range(3):
        loop.add(3, 4)
    assert all(sum(s.num_tokens for s in plan) == 1 for plan in loop.run())
    for sequence in loop.sequences:
        loop.check_answer(sequence)


def test_youngest_is_preempted_and_recomputes_prompt_and_output() -> None:
    loop = Loop(num_blocks=16, block_size=4, budget=64)  # 64 tokens
    a, b = loop.add(24, 40, ignore_eos=True), loop.add(24, 40, ignore_eos=True)
    a.end_token_ids = b.end_token_ids = frozenset()
    preempted_at = recomputed = None
    for plan in loop.run():
        if loop.scheduler.num_preemptions and preempted_at is None:
            preempted_at = b.num_output_tokens
            assert b.status is SequenceStatus.WAITING and a.status is SequenceStatus.RUNNING
        if preempted_at is not None and recomputed is None and any(s.sequence is b for s in plan):
            recomputed = next(s.num_tokens for s in plan if s.sequence is b)
    assert preempted_at is not None and preempted_at > 0
    assert recomputed == 24 + preempted_at
    assert loop.scheduler.num_preemptions == 1
    loop.check_answer(a)
    loop.check_answer(b)


def test_waiting_sequence_is_admitted_only_with_room_to_stay() -> None:
    loop = Loop(num_blocks=16, block_size=4, budget=64)
    loop.add(16, 40)  # 4 of 16 blocks
    loop.add(48, 16)  # 12: would fit, and be preempted as soon as the first one grows
    loop.step()
    assert (loop.scheduler.num_running, loop.scheduler.num_waiting) == (1, 1)


def test_sequence_that_takes_the_whole_pool_runs_alone() -> None:
    loop = Loop(num_blocks=12, block_size=4)
    for _ in range(3):
        loop.add(LENGTH - 1, 1)
        loop.add(1, LENGTH - 1)
    for _ in loop.run():
        pass
    for sequence in loop.sequences:
        loop.check_answer(sequence)


def test_plan_that_is_not_carried_out_is_made_anew() -> None:
    loop = Loop(num_blocks=16)
    loop.add(10, 5)
    loop.add(10, 5)
    first = shape(loop.scheduler.schedule())
    free = loop.kv_cache.num_free_blocks
    assert shape(loop.scheduler.schedule()) == first
    assert loop.kv_cache.num_free_blocks == free
    for _ in loop.run():
        pass
    for sequence in loop.sequences:
        loop.check_answer(sequence)


@pytest.mark.parametrize("min_tokens", [0, 4])
def test_end_and_stop_tokens_end_it_after_min_tokens(min_tokens: int) -> None:
    loop = Loop(num_blocks=64)
    probe = loop.add(8, 8, ignore_eos=True)
    probe.end_token_ids = frozenset()
    for _ in loop.run():
        pass
    answer = probe.token_ids[8:]
    loop.sequences.clear()  # so that the next one has the same prompt
    stopped = loop.add(8, 8, stop_token_ids=[answer[2], answer[6]], min_tokens=min_tokens)
    for _ in loop.run():
        pass
    length = 7 if min_tokens else 3
    assert stopped.token_ids[8:] == answer[:length]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", answer[length - 1])


def test_end_token_of_the_model_gives_no_stop_reason() -> None:
    loop = Loop(num_blocks=64)
    sequence = loop.add(8, 8)
    loop.scheduler.commit(loop.scheduler.schedule(), [(sequence, EOS)])
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", None)
    assert sequence.num_output_tokens == 1


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of arrivals, steps and aborts through a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.loop: Loop | None = None

    @precondition(lambda self: self.loop is None)
    @rule(
        block_size=st.sampled_from([1, 3, 16, 64]),
        spare=st.integers(0, 6),
        budget=st.sampled_from([1, 2, 7, 16, 100]),
        max_num_seqs=st.integers(1, 6),
    )
    def start(self, block_size: int, spare: int, budget: int, max_num_seqs: int) -> None:
        self.loop = Loop(-(-LENGTH // block_size) + spare, block_size, budget, max_num_seqs)

    @precondition(lambda self: self.loop is not None)
    @rule(prompt=st.integers(1, LENGTH - 1), output=st.integers(1, LENGTH - 1))
    def add(self, prompt: int, output: int) -> None:
        self.loop.add(prompt, min(output, LENGTH - prompt))

    @precondition(lambda self: self.loop is not None)
    @rule(count=st.integers(1, 10))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.loop.step() if self.loop.scheduler.num_running + self.loop.scheduler.num_waiting else None

    @precondition(lambda self: self.loop is not None and self.loop.sequences)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.loop.sequences))
        if sequence.status is not SequenceStatus.FINISHED:
            self.loop.scheduler.finish(sequence, "abort")

    @precondition(lambda self: self.loop is not None)
    @rule()
    def plan_in_vain(self) -> None:
        self.loop.scheduler.schedule()

    @invariant()
    def consistent(self) -> None:
        if self.loop is not None:
            self.loop.check()

    def teardown(self) -> None:
        if self.loop is not None:
            for _ in self.loop.run():
                pass
            for sequence in self.loop.sequences:
                self.loop.check_answer(sequence)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
