"""n samples of one prompt: each is what it would be alone, and together they hold the prompt once."""

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from fakes import fake_continuation
from helpers_engine import Setup, answer, assert_idle, run
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.batch import Batch, SamplingBatch, StepResult
from minivllm.engine.inference_engine import InferenceEngine
from minivllm.engine.outputs import CompletionOutput
from minivllm.errors import ModelError, RequestError
from minivllm.sampling_params import SamplingParams

PROMPT = [random.Random(1).randrange(1, 256) for _ in range(40)]


@dataclass
class AsChoice:
    """An executor that draws for a single answer what it would for one of several."""

    executor: Any
    choice: int

    def execute(self, batch: Batch, sampling: SamplingBatch, *rest: Any) -> StepResult:
        return self.executor.execute(
            batch, replace(sampling, choice=np.full_like(sampling.choice, self.choice)), *rest
        )


def alone(setup: Setup, prompt: list[int], params: SamplingParams, choice: int) -> CompletionOutput:
    """That choice of the prompt's answers, made by an engine that makes no other, and shares nothing."""
    engine = replace(setup, prefix_caching=False, num_blocks=600 // setup.block_size).engine()
    engine.executor = AsChoice(engine.executor, choice)
    return answer(engine, prompt, replace(params, n=1)).outputs[0]


def assert_same(got: CompletionOutput, want: CompletionOutput) -> None:
    """Bit for bit, but for the index."""
    assert replace(got, index=0, logprobs=None) == replace(want, index=0, logprobs=None)
    assert (got.logprobs is None) == (want.logprobs is None)
    for a, b in zip(got.logprobs or (), want.logprobs or (), strict=True):
        assert a == b


# --- what is answered ---


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_each_choice_is_what_it_would_be_alone(prefix_caching: bool) -> None:
    setup = Setup(model="native", prefix_caching=prefix_caching)
    params = SamplingParams(n=5, max_tokens=20, temperature=0.9, seed=7, logprobs=2, ignore_eos=True)
    output = answer(setup.engine(), PROMPT, params)
    assert [choice.index for choice in output.outputs] == [0, 1, 2, 3, 4] and output.finished
    assert len({tuple(choice.token_ids) for choice in output.outputs}) == 5
    for i, choice in enumerate(output.outputs):
        assert_same(choice, alone(setup, PROMPT, params, i))


def test_choices_end_each_at_its_own_time() -> None:
    # The fake model's end token comes sooner or later.
    engine = Setup(num_blocks=256).engine()
    output = answer(engine, PROMPT, SamplingParams(n=16, max_tokens=200))
    lengths = set()
    for i, choice in enumerate(output.outputs):
        expected = fake_continuation(PROMPT, 200, choice=i)
        assert choice.token_ids == expected
        assert choice.finish_reason == ("stop" if expected[-1] == 0 else "length")
        lengths.add(len(expected))
    assert len(lengths) > 5


def test_stop_strings_end_only_the_choice_that_has_them() -> None:
    engine = Setup().engine()
    plain = answer(engine, PROMPT, SamplingParams(n=4, max_tokens=12, ignore_eos=True)).outputs
    stop = chr(plain[2].token_ids[5] % 128)
    got = answer(engine, PROMPT, SamplingParams(n=4, max_tokens=12, ignore_eos=True, stop=stop)).outputs
    for a, b in zip(plain, got, strict=True):
        assert b.text == a.text.split(stop)[0]
        assert (b.finish_reason, b.stop_reason) == (("stop", stop) if stop in a.text else ("length", None))


def test_a_stream_gives_each_choice_in_pieces() -> None:
    engine = Setup().engine()
    params = SamplingParams(n=3, max_tokens=200, temperature=1)
    whole = answer(engine, PROMPT, params)
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    reasons: dict[int, str] = {}
    for output in engine.stream(PROMPT, params):
        assert output.outputs, "never an output with nothing in it"
        for piece in output.outputs:
            assert piece.index not in reasons, "nothing comes after the end"
            assert piece.token_ids or piece.finished
            tokens[piece.index] += piece.token_ids
            if piece.finish_reason is not None:
                reasons[piece.index] = piece.finish_reason
        assert output.finished == (len(reasons) == 3)
    for choice in whole.outputs:
        assert tokens[choice.index] == choice.token_ids and reasons[choice.index] == choice.finish_reason
    assert_idle(engine)


def test_abort_ends_all_choices() -> None:
    engine = Setup().engine()
    request_id = engine.add_request(PROMPT, SamplingParams(n=3, max_tokens=50, ignore_eos=True))
    for steps in (0, 1, 5):
        for _ in range(steps):
            engine.step()
    output = engine.abort(request_id)
    assert output is not None and output.finished
    assert [choice.finish_reason for choice in output.outputs] == ["abort"] * 3
    assert all(len(choice.token_ids) == 6 for choice in output.outputs)
    run(engine)
    request_id = engine.add_request(PROMPT, SamplingParams(n=3))
    output = engine.abort(request_id)  # before it has begun
    assert output is not None and [choice.token_ids for choice in output.outputs] == [[], [], []]
    assert_idle(engine)


def test_damaged_logits_end_all_choices_that_begin_with_them() -> None:
    engine = Setup().engine()
    engine.executor.damaged = 9
    request_id = engine.add_request([9, 1, 2], SamplingParams(n=3))
    other = engine.add_request(PROMPT, SamplingParams(n=2, max_tokens=3, ignore_eos=True))
    with pytest.raises(ModelError, match=f"request '{request_id}'"):
        engine.step()
    outputs = run(engine)
    assert [choice.finish_reason for choice in outputs[request_id].outputs] == ["error"] * 3
    for i, choice in enumerate(outputs[other].outputs):
        assert choice.token_ids == fake_continuation(PROMPT, 3, frozenset(), choice=i)


def test_a_step_that_fails_ends_all_choices() -> None:
    engine = Setup(budget=16).engine()
    request_id = engine.add_request(PROMPT, SamplingParams(n=3))
    engine.executor.fail_at = 2
    engine.step()
    with pytest.raises(RuntimeError, match="the fake model broke"):
        engine.step()
    (output,) = engine.step()
    assert output.request_id == request_id and output.finished
    assert [choice.finish_reason for choice in output.outputs] == ["error"] * 3
    assert_idle(engine)


# --- what is held, and what is computed ---


def held_blocks(engine: InferenceEngine) -> int:
    return engine.metrics().num_blocks - engine.metrics().num_free_blocks


def test_eight_samples_hold_their_prompt_once() -> None:
    engine = Setup(num_blocks=256, budget=600).engine()
    prompt = [random.Random(2).randrange(1, 256) for _ in range(512)]
    engine.add_request(prompt, SamplingParams(n=8, max_tokens=64, ignore_eos=True))
    most = computed = 0
    while engine.has_unfinished_requests():
        engine.step()
        engine.kv_cache.check_integrity()
        most = max(most, held_blocks(engine))
        computed = engine.metrics().computed_tokens
    assert most == 512 // 16 + 8 * 64 // 16
    assert computed == 512 + 8 * 63
    assert engine.metrics().generated_tokens == 8 * 64


@pytest.mark.parametrize(("n", "length", "copies"), [(4, 40, 3), (4, 48, 0), (2, 33, 1), (1, 40, 0)])
def test_sharers_of_a_partly_filled_block_copy_it_but_for_the_last(n: int, length: int, copies: int) -> None:
    engine = Setup().engine()
    engine.add_request((PROMPT * 2)[:length], SamplingParams(n=n, max_tokens=30, ignore_eos=True))
    engine.step()
    shared = engine.kv_cache.geometry.num_blocks - engine.kv_cache.num_free_blocks
    assert shared == -(-length // 16)
    plan = engine.scheduler.schedule()
    batch = engine.kv_cache.batch(plan)
    assert len(batch.block_copies) == copies
    assert len(set(batch.block_copies[:, 1].tolist())) == copies, "each has a copy of its own"
    assert set(batch.block_copies[:, 2].tolist()) <= {length % 16}
    assert len(set(batch.slot_mapping.tolist())) == n
    again = engine.kv_cache.batch(engine.scheduler.schedule())
    assert again.block_copies.tolist() == batch.block_copies.tolist()
    engine.step()
    assert not len(engine.kv_cache.batch(engine.scheduler.schedule()).block_copies)
    run(engine)


def test_a_copy_whose_sharers_are_gone_still_finds_its_source() -> None:
    # All but one of the forks end before they write; the planned copies are made in vain, and nothing leaks.
    engine = Setup().engine()
    request_id = engine.add_request(PROMPT, SamplingParams(n=4, max_tokens=30, ignore_eos=True))
    engine.step()
    engine.scheduler.schedule()
    group = engine._requests[request_id].group
    for sequence in group.sequences[:2] + group.sequences[3:]:
        engine.scheduler.finish(sequence, "abort")
        engine.kv_cache.check_integrity()
    output = run(engine)[request_id]
    assert output.outputs[2].token_ids == fake_continuation(PROMPT, 30, frozenset(), choice=2)


def test_samples_are_sequences_for_max_num_seqs() -> None:
    engine = Setup(max_num_seqs=8, num_blocks=256).engine()
    for _ in range(3):
        engine.add_request(PROMPT, SamplingParams(n=4, max_tokens=20, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
        assert engine.metrics().num_running <= 8
    assert max(sequences for sequences, _ in engine.executor.steps) == 8


# --- preemption ---


def test_samples_are_preempted_together_and_the_first_group_advances() -> None:
    engine = Setup(num_blocks=20, block_size=4, budget=32).engine()
    ids = [
        engine.add_request([i] * 10, SamplingParams(n=3, max_tokens=14, ignore_eos=True)) for i in range(1, 5)
    ]
    while engine.has_unfinished_requests():
        engine.step()
        engine.kv_cache.check_integrity()
        for request in engine._requests.values():
            lengths = {sequence.num_tokens for sequence in request.group.sequences}
            assert len(lengths) == 1, "they draw together"
            if request.group not in engine.scheduler._running:
                assert all(engine.kv_cache.table(s) == [] for s in request.group.sequences)
    assert engine.metrics().preemptions > 0
    assert_idle(engine)
    assert ids


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_choice_is_the_models_through_preemptions(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([1, 2, 4, 7, 16]), "block_size")
    caching = data.draw(st.booleans(), "prefix_caching")
    requests = data.draw(
        st.lists(
            st.tuples(
                st.lists(st.integers(1, 2), min_size=1, max_size=20), st.integers(1, 5), st.integers(0, 2)
            ),
            min_size=1,
            max_size=8,
        ),
        "requests",
    )
    most = max(
        len(prompt) // block_size + n * (-(-(len(prompt) + 9) // block_size) - len(prompt) // block_size)
        for prompt, n, _ in requests
    )
    num_blocks = most + data.draw(st.integers(0, 12), "spare")
    budget = data.draw(st.sampled_from([5, 8, 64]), "budget")
    engine = Setup(
        num_blocks=num_blocks, block_size=block_size, budget=budget, prefix_caching=caching, max_num_seqs=8
    ).engine()
    engine.max_model_len = 100
    ids = []
    for prompt, n, priority in requests:
        params = SamplingParams(n=n, max_tokens=9, ignore_eos=True)
        ids.append(engine.add_request(prompt, params, priority=priority))
        for _ in range(data.draw(st.integers(0, 2), "steps")):
            engine.step() if len(ids) < len(requests) else None
            engine.kv_cache.check_integrity()
    outputs = {}
    steps = 0
    while engine.has_unfinished_requests():
        if data.draw(st.integers(0, 9), "reset") == 0 and steps < 50:
            engine.reset_prefix_cache()
        outputs |= {output.request_id: output for output in engine.step()}
        engine.kv_cache.check_integrity()
        steps += 1
        assert steps < 5000, "somebody always advances"
    assert_idle(engine)
    for request_id, (prompt, n, _) in zip(ids, requests, strict=True):
        output = outputs.get(request_id)
        if output is None:
            continue  # given by a step above
        for choice in range(n):
            expected = fake_continuation(prompt, 9, frozenset(), choice=choice)
            assert output.outputs[choice].token_ids == expected


@pytest.mark.parametrize(
    ("block_size", "num_blocks", "kv_dtype"),
    [(16, 17, "float32"), (1, 190, "float32"), (5, 40, "bfloat16"), (5, 40, "int8")],
)
def test_nothing_changes_a_bit(block_size: int, num_blocks: int, kv_dtype: str) -> None:
    rng = random.Random(block_size)
    stem = [rng.randrange(1, 256) for _ in range(50)]
    prompts = [stem[: rng.randrange(1, 50)] + [rng.randrange(1, 256)] * rng.randrange(4) for _ in range(6)]
    prompts += [stem[:32], stem[:32]]
    params = SamplingParams(n=3, max_tokens=40, temperature=0.9, seed=5, logprobs=3, ignore_eos=True)
    setup = Setup(model="native", kv_dtype=kv_dtype)
    expected = [[alone(setup, prompt, params, i) for i in range(3)] for prompt in prompts]
    for budget, caching in ((64, True), (7, True), (20, False)):
        tight = replace(
            setup, block_size=block_size, num_blocks=num_blocks, budget=budget, prefix_caching=caching
        )
        engine = tight.engine()
        for _ in range(2):
            ids = [engine.add_request(prompt, params) for prompt in prompts]
            outputs = run(engine)
            for request_id, wanted in zip(ids, expected, strict=True):
                for got, want in zip(outputs[request_id].outputs, wanted, strict=True):
                    assert_same(got, want)
        assert engine.metrics().preemptions > 0


# --- refusals ---


@pytest.mark.parametrize("n", [0, 65, 1.0, True, "2", None])
def test_n_is_checked(n: Any) -> None:
    with pytest.raises(RequestError, match="n must be an integer from 1 to 64"):
        SamplingParams(n=n)


def test_n_beyond_what_runs_at_once_is_refused() -> None:
    with pytest.raises(RequestError, match="n is 9, but they all run at once, and max_num_seqs is 8"):
        Setup(max_num_seqs=8).engine().add_request(PROMPT, SamplingParams(n=9))
    with pytest.raises(
        RequestError, match="n is 9, but they all run at once, and max_num_batched_tokens is 8"
    ):
        Setup(budget=8).engine().add_request(PROMPT, SamplingParams(n=9))


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    engine = Setup(num_blocks=10, block_size=4).engine()
    # 2 whole blocks of the prompt, and for each choice those of tokens 8 … 19.
    with pytest.raises(RequestError) as caught:
        engine.add_request([1] * 10, SamplingParams(n=3, max_tokens=10))
    assert caught.value.param == "n"
    assert str(caught.value) == (
        "3 times 10 tokens after a prompt of 10 take 11 blocks of the KV cache, 2 that they share and 3 for "
        "each, but there are 10; use a smaller n or max_tokens"
    )
    output = answer(engine, [1] * 10, SamplingParams(n=2, max_tokens=10, ignore_eos=True))
    assert len(output.outputs) == 2


def test_without_max_tokens_samples_go_on_while_all_of_them_fit() -> None:
    engine = Setup(num_blocks=10, block_size=4).engine()
    output = answer(engine, [1] * 10, SamplingParams(n=3, max_tokens=None, ignore_eos=True))
    assert [len(choice.token_ids) for choice in output.outputs] == [6] * 3  # 2 + 3 · 2 blocks, of 10
    assert {choice.finish_reason for choice in output.outputs} == {"length"}


# --- salts and priorities ---


def test_only_requests_with_the_same_salt_share() -> None:
    engine = Setup().engine()

    def cached(salt: str | None) -> int:
        engine.add_request(PROMPT, SamplingParams(max_tokens=1), request_id="r", cache_salt=salt)
        return run(engine)["r"].num_cached_tokens

    assert [cached(salt) for salt in (None, "a", "b", "a", None, "b", "\0", "é\ud800")] == [
        *(0, 0, 0, 32, 32, 32, 0, 0)
    ]


def test_equal_prompts_of_different_salts_do_not_wait_for_each_other() -> None:
    engine = Setup(budget=200).engine()
    for salt in ("a", "b", None):
        engine.add_request(PROMPT, SamplingParams(max_tokens=1), cache_salt=salt)
    engine.step()
    assert engine.metrics().computed_tokens == 3 * 40


@pytest.mark.parametrize("salt", ["", 1, b"a", "x" * 1025])
def test_salts_are_checked(salt: Any) -> None:
    with pytest.raises(RequestError, match=r"cache_salt is .*; it must be a string of 1 to 1,024 characters"):
        Setup().engine().add_request(PROMPT, cache_salt=salt)


@pytest.mark.parametrize("priority", [1.5, True, "1", None, 2**63])
def test_priorities_are_checked(priority: Any) -> None:
    with pytest.raises(RequestError, match=r"priority is .*; it must be an integer of 64 bits"):
        Setup().engine().add_request(PROMPT, priority=priority)


def test_a_lower_priority_goes_first() -> None:
    engine = Setup(max_num_seqs=1).engine()
    wanted = {
        engine.add_request([i + 1], SamplingParams(max_tokens=2), priority=p): p
        for i, p in enumerate((3, 1, 2, 1))
    }
    order = []
    while engine.has_unfinished_requests():
        order += [output.request_id for output in engine.step()]
    assert order == sorted(wanted, key=lambda request_id: (wanted[request_id], int(request_id)))


def test_the_highest_priority_is_preempted_last() -> None:
    engine = Setup(num_blocks=12, block_size=4).engine()
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    first = engine.add_request([1] * 10, params)
    engine.step()
    urgent = engine.add_request([2] * 10, params, priority=-1)
    order = []
    while engine.has_unfinished_requests():
        order += [output.request_id for output in engine.step()]
    assert engine.metrics().preemptions > 0 and order == [urgent, first]
