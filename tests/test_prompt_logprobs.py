"""prompt_logprobs: complete, and the same whatever is cached, however the prompt is computed."""

import random
from dataclasses import replace
from typing import Any

import pytest
from helpers_engine import TINY, Setup, answer, run, tiny_checkpoint

from minivllm.engine.inference_engine import InferenceEngine
from minivllm.engine.outputs import Logprob
from minivllm.errors import RequestError
from minivllm.kv_cache.kv_pool import KVGeometry, KVPool
from minivllm.sampling_params import BeamSearchParams, SamplingParams

PROMPT = [random.Random(1).randrange(1, 256) for _ in range(40)]
PARAMS = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=4, ignore_eos=True)
Scores = list[dict[int, Logprob] | None]


def drawn_instead(engine: InferenceEngine, prompt: list[int], likeliest: int) -> Scores:
    """The same by another way: each token of the prompt drawn after those before it, under a bias."""
    scores: Scores = [None]
    for i in range(1, len(prompt)):
        params = SamplingParams(max_tokens=1, temperature=0, logprobs=likeliest, logit_bias={prompt[i]: 100})
        (choice,) = answer(engine, prompt[:i], params).outputs
        assert choice.token_ids == [prompt[i]] and choice.logprobs is not None
        scores += choice.logprobs
    return scores


@pytest.fixture(scope="module")
def expected() -> Scores:
    return drawn_instead(Setup(model="native", prefix_caching=False, eos=()).engine(), PROMPT, 4)


@pytest.mark.parametrize("budget", [1, 7, 64])
@pytest.mark.parametrize("block_size", [1, 16])
def test_are_complete_and_the_same_whatever_is_cached(expected: Scores, budget: int, block_size: int) -> None:
    engine = Setup(model="native", budget=budget, block_size=block_size, num_blocks=200).engine()
    plain = answer(engine, PROMPT, replace(PARAMS, prompt_logprobs=None))
    assert plain.prompt_logprobs is None
    for _ in range(2):
        output = answer(engine, PROMPT, PARAMS)
        assert output.prompt_logprobs == expected
        assert output.num_cached_tokens == 0
        assert output.outputs == plain.outputs
        entry = output.prompt_logprobs[7]
        assert entry is not None and next(iter(entry)) == PROMPT[7] and len(entry) in (4, 5)


def test_what_they_computed_is_there_for_others() -> None:
    engine = Setup().engine()
    answer(engine, PROMPT, PARAMS)
    assert answer(engine, PROMPT, SamplingParams()).num_cached_tokens == 32


def test_a_prompt_of_one_token_has_none() -> None:
    assert answer(Setup().engine(), [5], PARAMS).prompt_logprobs == [None]


@pytest.mark.parametrize("count", [0, 20])
def test_as_many_as_asked(count: int) -> None:
    output = answer(
        Setup(model="native").engine(), PROMPT, replace(PARAMS, prompt_logprobs=count, logprobs=1)
    )
    assert output.prompt_logprobs is not None
    for token_id, entry in zip(PROMPT[1:], output.prompt_logprobs[1:], strict=True):
        assert entry is not None and len(entry) - count in (0, 1) and token_id in entry
        assert entry[token_id].decoded_token is not None
    assert output.outputs[0].logprobs is not None
    assert all(len(entry) in (1, 2) for entry in output.outputs[0].logprobs)


def test_penalties_and_biases_do_not_touch_them(expected: Scores) -> None:
    params = replace(
        PARAMS, repetition_penalty=3, frequency_penalty=2, logit_bias={PROMPT[3]: -100}, temperature=5
    )
    assert answer(Setup(model="native").engine(), PROMPT, params).prompt_logprobs == expected


def test_samples_have_them_once(expected: Scores) -> None:
    engine = Setup(model="native", num_blocks=17).engine()
    params = replace(PARAMS, n=3, temperature=1, max_tokens=60)
    ids = [engine.add_request(PROMPT, params) for _ in range(3)]
    outputs = run(engine)
    assert [outputs[i].prompt_logprobs for i in ids] == [expected] * 3


def test_a_stream_has_them_in_its_first_piece(expected: Scores) -> None:
    engine = Setup(model="native", budget=16).engine()
    first, *others = list(engine.stream(PROMPT, PARAMS))
    assert first.prompt_logprobs == expected
    assert [output.prompt_logprobs for output in others] == [None] * 2


def test_preempted_within_the_prompt_they_are_still_complete(expected: Scores) -> None:
    engine = Setup(model="native", num_blocks=12, block_size=4, budget=5).engine()
    first = engine.add_request([9] * 10, SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in range(3):
        engine.step()
    engine.scheduler._has_room_to_stay = lambda *_: True  # type: ignore[method-assign]
    scored = engine.add_request(PROMPT, replace(PARAMS, max_tokens=1))
    outputs = run(engine)
    assert engine.metrics().preemptions > 0 and first in outputs
    assert outputs[scored].prompt_logprobs == expected


def test_an_aborted_request_has_none() -> None:
    engine = Setup(budget=16).engine()
    request_id = engine.add_request(PROMPT, PARAMS)
    engine.step()
    output = engine.abort(request_id)
    assert output is not None and output.prompt_logprobs is None


def test_the_torch_executor_gives_them_too(expected: Scores) -> None:
    torch_ = pytest.importorskip("minivllm.executors.torch_")
    engine = Setup(model="native").engine()
    geometry = KVGeometry(TINY.num_layers, 64, TINY.num_kv_heads, 16, TINY.head_dim, "float32")
    engine.executor = torch_.TorchExecutor(tiny_checkpoint(), KVPool.reserve(geometry), "float32")
    got = answer(engine, PROMPT, PARAMS).prompt_logprobs
    assert got is not None
    for a, b in zip(got[1:], expected[1:], strict=True):
        assert a is not None and b is not None and list(a) == list(b)
        for token_id in a:
            assert a[token_id].rank == b[token_id].rank
            assert a[token_id].logprob == pytest.approx(b[token_id].logprob, abs=1e-4)


@pytest.mark.parametrize("count", [-1, 21, 1.5, True, "1"])
def test_their_number_is_checked(count: Any) -> None:
    with pytest.raises(RequestError, match="prompt_logprobs must be an integer from 0 to 20"):
        SamplingParams(prompt_logprobs=count)


def test_a_beam_search_has_none() -> None:
    engine = Setup(model="native").engine()
    (request_id,) = engine.add_requests([PROMPT], [BeamSearchParams(2, 2)])
    assert run(engine)[request_id].prompt_logprobs is None
