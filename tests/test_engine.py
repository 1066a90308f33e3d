"""The engine: every request gets its own answer, whatever runs beside it, and bad ones harm nobody."""

import random
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes import EOS, fake_continuation, fake_next
from helpers_engine import TINY, Setup, answer, assert_idle, run
from helpers_step import make_checkpoint, random_tensors
from helpers_text import answer_text
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.engine.admission import derived_seed
from minivllm.engine.inference_engine import InferenceEngine
from minivllm.engine.outputs import RequestOutput
from minivllm.errors import ModelError, RequestError
from minivllm.sampling_params import SamplingParams

MODELS = ["fake", "native"]


def joined(pieces: list[RequestOutput]) -> tuple[str, list[int], list[Any]]:
    outputs = [piece.outputs[0] for piece in pieces]
    return (
        "".join(output.text for output in outputs),
        [token_id for output in outputs for token_id in output.token_ids],
        [logprob for output in outputs for logprob in output.logprobs or []],
    )


# --- one request ---


def test_answer_is_the_models_and_is_given_once_whole() -> None:
    engine = Setup().engine()
    request_id = engine.add_request("hello", SamplingParams(max_tokens=20, ignore_eos=True))
    output = run(engine)[request_id]
    expected = fake_continuation(list(b"hello"), 20, frozenset())
    completion = output.outputs[0]
    assert completion.token_ids == expected
    assert completion.text == answer_text(bytes(expected))
    assert (completion.finish_reason, completion.stop_reason, completion.finished) == ("length", None, True)
    assert (completion.logprobs, completion.cumulative_logprob) == (None, None)
    assert (output.prompt, output.prompt_token_ids, output.finished) == ("hello", list(b"hello"), True)
    assert output.num_cached_tokens == 0


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_exactly_max_tokens_are_generated_and_the_last_is_not_computed(max_tokens: int) -> None:
    engine = Setup().engine()
    request_id = engine.add_request([5, 6, 7], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    assert len(run(engine)[request_id].outputs[0].token_ids) == max_tokens
    assert engine.metrics().computed_tokens == 3 + max_tokens - 1


def test_max_tokens_none_goes_up_to_max_model_len() -> None:
    engine = Setup(num_blocks=4, block_size=4).engine()
    request_id = engine.add_request([5, 6, 7], SamplingParams(max_tokens=None, ignore_eos=True))
    completion = run(engine)[request_id].outputs[0]
    assert (len(completion.token_ids), completion.finish_reason) == (13, "length")


def test_logprobs_of_chosen_and_likeliest_tokens() -> None:
    engine = Setup().engine()
    request_id = engine.add_request("ab", SamplingParams(max_tokens=3, logprobs=2, ignore_eos=True))
    completion = run(engine)[request_id].outputs[0]
    context, total = list(b"ab"), 0.0
    for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        expected_id, expected_logprob = fake_next(context)
        assert list(entry) == [token_id, (token_id + 1) % 256] and token_id == expected_id
        assert (entry[token_id].logprob, entry[token_id].rank) == (expected_logprob, 1)
        assert entry[token_id].decoded_token == bytes([token_id]).decode(errors="replace")
        total += expected_logprob
        context.append(token_id)
    assert completion.cumulative_logprob == total


def test_end_token_ends_it_and_stays_out_of_the_text() -> None:
    first = fake_continuation(list(b"xy"), 3, frozenset())
    engine = Setup(eos=(first[1],)).engine()
    request_id = engine.add_request("xy")
    completion = run(engine)[request_id].outputs[0]
    assert completion.token_ids == first[:2]
    assert completion.text == answer_text(bytes(first[:1]))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


@pytest.mark.parametrize("include", [False, True])
def test_stop_token_ends_it_and_is_named(include: bool) -> None:
    first = fake_continuation(list(b"hello"), 3, frozenset())
    engine = Setup().engine()
    params = SamplingParams(stop_token_ids=[first[2]], include_stop_str_in_output=include)
    completion = answer(engine, "hello", params).outputs[0]
    assert completion.token_ids == first
    assert completion.text == answer_text(bytes(first[: 3 if include else 2]))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", first[2])


def test_stop_string_over_several_tokens_ends_it_even_with_the_last_token_allowed() -> None:
    def letters(prompt: list[int]) -> int | None:
        """Where the answer has three letters in a row: the fake model says arbitrary bytes."""
        tokens = fake_continuation(prompt, 40, frozenset())
        return next((i for i in range(38) if all(32 < t < 127 for t in tokens[i : i + 3])), None)

    prompt = next([i] for i in range(256) if letters([i]) is not None)
    start, expected = letters(prompt), fake_continuation(prompt, 40, frozenset())
    stop = bytes(expected[start : start + 3]).decode()
    engine = Setup(num_blocks=200).engine()
    for max_tokens in (40, start + 3):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, stop=stop)
        completion = answer(engine, prompt, params).outputs[0]
        assert completion.token_ids == expected[: start + 3]
        assert completion.text == bytes(expected[:start]).decode(errors="replace")
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_without_tokenizer_ids_go_in_and_out() -> None:
    engine = Setup(tokenizer=False).engine()
    request_id = engine.add_request([1, 2], SamplingParams(max_tokens=4, ignore_eos=True, logprobs=0))
    completion = run(engine)[request_id].outputs[0]
    assert (completion.text, len(completion.token_ids)) == ("", 4)
    logprobs = zip(completion.token_ids, completion.logprobs, strict=True)
    assert all(entry[token_id].decoded_token is None for token_id, entry in logprobs)
    with pytest.raises(RequestError, match="no tokenizer; give the prompt as token ids"):
        engine.add_request("text")


@pytest.mark.parametrize(
    "prompt", [(1, 2, 3), np.array([1, 2, 3]), [np.int64(1), np.uint8(2), 3], range(1, 4)]
)
def test_prompts_of_token_ids_in_other_clothes(prompt: Any) -> None:
    engine = Setup().engine()
    output = answer(engine, prompt, SamplingParams(max_tokens=2))
    assert output.prompt_token_ids == [1, 2, 3] and {type(t) for t in output.prompt_token_ids} == {int}


# --- streaming ---


def test_streamed_pieces_joined_are_the_whole_answer() -> None:
    engine = Setup().engine()
    params = SamplingParams(max_tokens=50, ignore_eos=True, logprobs=1)
    whole = answer(engine, "abc", params).outputs[0]
    pieces = list(engine.stream("abc", params))
    assert joined(pieces) == (whole.text, whole.token_ids, whole.logprobs)
    assert all(len(piece.outputs[0].token_ids) == 1 for piece in pieces)
    assert [piece.finished for piece in pieces] == [False] * 49 + [True]
    assert pieces[-1].outputs[0].cumulative_logprob == whole.cumulative_logprob
    assert_idle(engine)


def test_streams_and_whole_requests_run_together() -> None:
    engine = Setup().engine()
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    first, second = engine.stream("one", params), engine.stream("two", params)
    other = engine.add_request("three", params)
    pieces = list(zip(first, second, strict=True))
    assert joined([a for a, _ in pieces])[1] == fake_continuation(list(b"one"), 20, frozenset())
    assert joined([b for _, b in pieces])[1] == fake_continuation(list(b"two"), 20, frozenset())
    assert engine.metrics().steps < 25, "they shared their steps"
    assert run(engine)[other].outputs[0].token_ids == fake_continuation(list(b"three"), 20, frozenset())
    assert engine.step() == [], "the streams' own outputs were for them alone"


def test_character_that_max_tokens_cuts_is_left_out_of_streams_and_whole_texts() -> None:
    cut = 0
    for first in range(40):
        for max_tokens in range(1, 8):
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            data = bytes(fake_continuation([first], max_tokens, frozenset()))
            engine = Setup().engine()
            whole = answer(engine, [first], params).outputs[0]
            assert whole.text == answer_text(data)
            assert joined(list(engine.stream([first], params)))[0] == whole.text
            cut += whole.text != data.decode(errors="replace")
    assert cut > 10


def test_closing_a_stream_aborts_its_request() -> None:
    engine = Setup().engine()
    stream = engine.stream("abc", SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    assert engine.metrics().num_running == 1
    stream.close()
    assert_idle(engine)


def test_aborting_a_streaming_request_ends_its_stream() -> None:
    engine = Setup().engine()
    stream = engine.stream("abc", SamplingParams(max_tokens=50, ignore_eos=True), "mine")
    next(stream)
    aborted = engine.abort("mine")
    assert list(stream) == [aborted] and aborted.outputs[0].finish_reason == "abort"
    assert_idle(engine)


@pytest.mark.parametrize("streamed", [False, True])
def test_old_stream_leaves_the_new_request_of_its_name_alone(streamed: bool) -> None:
    engine = Setup().engine()
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    old = engine.stream("abc", params, "me")
    next(old)
    engine.abort("me")
    new = engine.stream("def", params, "me") if streamed else None
    first = [next(new)] if new else engine.add_request("def", params, "me") and []
    assert [piece.outputs[0].finish_reason for piece in old] == ["abort"]
    pieces = [*first, *new] if new else [run(engine)["me"]]
    assert joined(pieces)[1] == fake_continuation(list(b"def"), 30, frozenset())
    assert_idle(engine)


def test_stream_collected_in_the_middle_of_a_step_ends_after_it() -> None:
    engine = Setup().engine()
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    streams = [engine.stream(text, params) for text in ("abc", "def")]
    next(streams[0]), next(streams[1])
    other = engine.add_request("ghi", params)
    execute = engine.executor.execute

    def collecting(*arguments: Any) -> Any:
        if len(streams) == 2:
            streams.pop().close()  # as the garbage collector may do at any time
        return execute(*arguments)

    engine.executor.execute = collecting
    assert joined(list(streams[0]))[1] == fake_continuation(list(b"abc"), 30, frozenset())[1:]
    assert run(engine)[other].outputs[0].token_ids == fake_continuation(list(b"ghi"), 30, frozenset())


def test_outputs_of_steps_that_others_made_wait_for_the_next_step() -> None:
    engine = Setup().engine()
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    whole, pieces = engine.add_request("one", params), engine.add_request("two", params, stream=True)
    list(engine.stream("three", replace(params, max_tokens=9)))
    outputs = engine.step()
    assert [output.request_id for output in outputs] == [pieces, pieces, whole, pieces]
    assert joined([o for o in outputs if o.request_id == pieces])[1] == fake_continuation(
        list(b"two"), 3, frozenset()
    )
    assert_idle(engine)


# --- threads ---


def test_threads_share_an_engine() -> None:
    engine = Setup().engine()
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    got: dict[int, list[int]] = {}

    def serve(thread: int) -> None:
        for _ in range(5):
            engine.abort(engine.add_request([thread, 2], params))
            stream = engine.stream([thread, 3], params)
            next(stream)
            stream.close()
            got[thread] = joined(list(engine.stream([thread, 1], params)))[1]

    threads = [threading.Thread(target=serve, args=[i]) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert got == {i: fake_continuation([i, 1], 40, frozenset()) for i in range(6)}
    run(engine)  # what was finished before it was aborted


def test_thread_that_steps_all_the_time_lets_others_in() -> None:
    engine = Setup(num_blocks=200).engine()
    params = SamplingParams(max_tokens=900, ignore_eos=True)
    execute = engine.executor.execute
    asked = threading.Event()
    waited: list[int] = []  # steps

    def executing(*arguments: Any) -> Any:
        if len(engine.executor.steps) == 100:
            asked.set()
        time.sleep(0.001)  # long enough for the other to wait
        return execute(*arguments)

    def other() -> None:
        asked.wait(timeout=60)
        for _ in range(20):
            time.sleep(0.0005)  # so that the next step has begun
            before = len(engine.executor.steps)
            engine.abort("nobody")
            waited.append(len(engine.executor.steps) - before)

    engine.executor.execute = executing
    thread = threading.Thread(target=other)
    thread.start()
    list(engine.stream("long", params))
    thread.join(timeout=60)
    assert len(waited) == 20 and sum(waited) <= 30, "each call waits for the step that is under way"


# --- seeds ---


def test_seeds_follow_from_the_engines_and_the_ordinal_and_are_reported() -> None:
    # The first numbers that the published SplitMix64 gives from the seeds 0 and 1234567.
    assert derived_seed(0, 0) == 16294208416658607535
    assert [derived_seed(1234567, i) for i in range(3)] == [
        6457827717110365317, 3203168211198807973, 9817491932198370423,
    ]  # fmt: skip
    engine = Setup(seed=1234567).engine()
    given, derived = SamplingParams(max_tokens=1, seed=42), SamplingParams(max_tokens=1)
    ids = engine.add_requests(["a", "b", "c"], [derived, given, derived])
    outputs = run(engine)
    assert [outputs[i].seed for i in ids] == [6457827717110365317, 42, 9817491932198370423]


def test_reported_seed_repeats_a_sampled_answer() -> None:
    engine = Setup(model="native").engine()
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    first, second = (answer(engine, "abc", params) for _ in range(2))
    assert first.outputs[0].token_ids != second.outputs[0].token_ids
    again = answer(engine, "abc", replace(params, seed=first.seed))
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


# --- bad input ---

BAD_REQUESTS: list[tuple[Any, dict[str, Any], str]] = [
    ("", {}, "the prompt is empty"),
    ([], {}, "the prompt is empty"),
    ([1, 256], {}, "token id 256; the vocabulary is 0 to 255"),
    ([-1, 2], {}, "token id -1; the vocabulary"),
    ([2**70], {}, "token id 1180591620717411303424; the vocabulary"),
    ([1.0], {}, "has 1.0 among its token ids; they must be integers"),
    ([True], {}, "has True among its token ids"),
    (["a"], {}, "has 'a' among its token ids"),
    ([None], {}, "has None among its token ids"),
    (None, {}, "the prompt is a NoneType; it must be a string or a list of token ids"),
    (b"abc", {}, "the prompt is a bytes"),
    ({1: 2}, {}, "the prompt is a dict"),
    (np.array(3), {}, "the prompt is a int"),
    (np.array([0.5]), {}, "has 0.5 among its token ids"),
    ("\ud800", {}, "lone surrogate"),
    ([1] * 64, {"max_tokens": None}, "the prompt has 64 tokens, which leaves no room .* max_model_len is 64"),
    ([1] * 50, {"max_tokens": 15}, "50 tokens and max_tokens is 15, together 65, but max_model_len is 64"),
    ([1], {"max_tokens": 2**31 - 1}, "max_tokens is 2,147,483,647, together 2,147,483,648"),
    ([1], {"max_tokens": None, "min_tokens": 64}, "min_tokens is 64, together 65"),
    ([1], {"stop_token_ids": [300]}, "token id 300"),
    ([1], {"logit_bias": {300: 1.0}}, "token id 300"),
    ("x" * 65, {}, "the prompt's text of 65 bytes is longer than max_model_len, 64 tokens, can be"),
    ("é" * 33, {}, "text of 66 bytes"),
    (range(10**12), {}, "the prompt has 1,000,000,000,000 tokens, which leaves no room"),
    (np.broadcast_to(np.int32(1), 2**40), {}, "the prompt has 1,099,511,627,776 tokens"),
]


@pytest.mark.parametrize(("prompt", "params", "message"), BAD_REQUESTS)
def test_bad_request_is_refused_in_a_sentence_and_harms_nobody(
    prompt: Any, params: dict[str, Any], message: str
) -> None:
    engine = Setup(num_blocks=16, block_size=4).engine()
    good = engine.add_request([1, 2, 3], SamplingParams(max_tokens=10, ignore_eos=True))
    engine.step()
    before = engine.metrics()
    with pytest.raises(RequestError, match=message) as error:
        engine.add_request(prompt, SamplingParams(**{"max_tokens": 4, **params}))
    assert error.value.param and "\n" not in str(error.value) and len(str(error.value)) < 300
    assert engine.metrics() == before
    next_id = engine.add_request([9], SamplingParams(max_tokens=1))
    outputs = run(engine)
    assert outputs[good].outputs[0].token_ids == fake_continuation([1, 2, 3], 10, frozenset())
    assert outputs[next_id].seed == derived_seed(0, 1), "a refused request takes no ordinal"


def test_request_ids_are_checked() -> None:
    engine = Setup().engine()
    assert engine.add_request("a", request_id="mine") == "mine"
    with pytest.raises(RequestError, match="unfinished request 'mine' already"):
        engine.add_request("b", request_id="mine")
    for wrong in ("", 3):
        with pytest.raises(RequestError, match="it must be a string, and not empty"):
            engine.add_request("b", request_id=wrong)
    with pytest.raises(RequestError, match="sampling_params is a dict; it must be a SamplingParams"):
        engine.add_request("b", {"max_tokens": 3})
    run(engine)
    assert engine.add_request("a", request_id="mine") == "mine", "free again"
    assert engine.add_request("a", request_id="2") == "2"
    assert engine.add_request("a") != "2", "made-up ids avoid those in use"


def test_several_requests_are_added_together_or_not_at_all() -> None:
    engine = Setup().engine()
    before = engine.metrics()
    with pytest.raises(RequestError, match="empty"):
        engine.add_requests(["a", "b", ""], [SamplingParams()] * 3)
    with pytest.raises(RequestError, match="'x' already"):
        engine.add_requests(["a", "b"], [SamplingParams()] * 2, ["x", "x"])
    assert engine.metrics() == before and not engine.has_unfinished_requests()


def test_refusal_says_which_of_several_is_meant() -> None:
    engine = Setup(num_blocks=16, block_size=4).engine()
    fine, wrong = SamplingParams(), SamplingParams(stop_token_ids=[300])
    for prompts, params, ids, message in [
        (["a", "b", ""], [fine] * 3, None, "prompt 3 of 3: the prompt is empty"),
        (["a", [1] * 99, ""], [fine] * 3, None, "prompt 2 of 3: the prompt has 99 tokens"),
        (["a", "b"], [fine, wrong], None, "prompt 2 of 2: stop_token_ids has token id 300"),
        (["a", "b"], [fine, {}], None, "prompt 2 of 2: sampling_params is a dict"),
        (["a", "b"], [fine] * 2, ["x", "x"], "prompt 2 of 2: there is an unfinished request 'x' already"),
        ([""], [fine], None, "^the prompt is empty"),
    ]:
        with pytest.raises(RequestError, match=message) as error:
            engine.add_requests(prompts, params, ids)
        assert error.value.param
    assert not engine.has_unfinished_requests()


def test_lists_that_do_not_fit_each_other_are_refused() -> None:
    engine = Setup().engine()
    fine = SamplingParams()
    for prompts, params, ids, message in [
        (["a"], [fine, fine], None, "there are 1 prompts, 2 sampling_params; give as many of each"),
        (["a", "b"], [fine], None, "there are 2 prompts, 1 sampling_params"),
        (["a"], [fine], ["x", "y"], "1 prompts, 1 sampling_params, 2 request_ids"),
        ("ab", [fine, fine], None, "prompts is 'ab'; it must be a list"),
        (["a", "b"], [fine, fine], "xy", "request_ids is 'xy'; it must be a list"),
        (["a"], fine, None, "sampling_params is a minivllm.*SamplingParams; it must be a list"),
        (5, [fine], None, "prompts is 5; it must be a list"),
    ]:
        with pytest.raises(RequestError, match=message):
            engine.add_requests(prompts, params, ids)
    for wrong in (0, False, "", {}):
        with pytest.raises(RequestError, match="it must be a SamplingParams"):
            engine.add_request("a", wrong)
        with pytest.raises(RequestError, match="it must be a SamplingParams"):
            next(engine.stream("a", wrong))
    for wrong in ([5], 5, None):
        with pytest.raises(RequestError, match=r"request_id is .*; it must be a string"):
            engine.abort(wrong)
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("name", ["stop", "include_stop_str_in_output"])
def test_what_is_about_text_is_refused_without_a_tokenizer(name: str) -> None:
    engine = Setup(tokenizer=False).engine()
    value = {"stop": ["x"], "include_stop_str_in_output": True}[name]
    with pytest.raises(RequestError, match=f"{name} is about text, but this model has no tokenizer") as error:
        engine.add_request([1], SamplingParams(**{name: value}))
    assert error.value.param == name


@pytest.mark.parametrize("size", [64, 65])
def test_long_texts_are_refused_before_they_are_tokenised(size: int) -> None:
    engine = Setup(num_blocks=16, block_size=4).engine()
    calls = []
    engine.tokenizer._encode = lambda text, special: calls.append(text) or list(text.encode())
    with pytest.raises(RequestError, match="max_model_len"):
        engine.add_request("x" * size)
    assert len(calls) == (size == 64), "64 letters could be few tokens; more could not"


# --- aborts and failures ---


def test_abort_gives_what_there_is_and_frees_the_blocks() -> None:
    engine = Setup(max_num_seqs=1).engine()
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    running, waiting = engine.add_request("abc", params), engine.add_request("def", params)
    for _ in range(5):
        engine.step()
    output = engine.abort(running)
    assert output.finished and output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].token_ids == fake_continuation(list(b"abc"), 5, frozenset())
    assert engine.abort(waiting).outputs[0].token_ids == []
    assert engine.abort(running) is None and engine.abort("unknown") is None
    assert_idle(engine)


def test_step_that_fails_ends_its_requests_and_only_those() -> None:
    engine = Setup(max_num_seqs=2).engine()
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    ids = [engine.add_request([i + 1, 2, 3], params) for i in range(3)]
    engine.step()
    engine.executor.fail_at = 2
    with pytest.raises(RuntimeError, match="the fake model broke"):
        engine.step()
    engine.kv_cache.check_integrity()
    assert engine.metrics().num_free_blocks == engine.metrics().num_blocks
    engine.executor.fail_at = None
    outputs = run(engine)
    assert [outputs[i].outputs[0].finish_reason for i in ids] == ["error", "error", "length"]
    assert outputs[ids[0]].outputs[0].token_ids == fake_continuation([1, 2, 3], 1, frozenset())
    assert outputs[ids[2]].outputs[0].token_ids == fake_continuation([3, 2, 3], 10, frozenset())


def test_logits_that_are_no_numbers_end_their_own_request_only() -> None:
    engine = Setup().engine()
    engine.executor.damaged = 2
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    ids = [engine.add_request([first, 7], params) for first in (1, 2, 3)]
    with pytest.raises(
        ModelError, match=f"logits are no numbers for request '{ids[1]}': its weights are dam"
    ):
        engine.step()
    outputs = run(engine)
    assert [outputs[i].outputs[0].finish_reason for i in ids] == ["length", "error", "length"]
    for i, first in ((ids[0], 1), (ids[2], 3)):
        assert outputs[i].outputs[0].token_ids == fake_continuation([first, 7], 10, frozenset())


def test_stream_raises_what_ended_its_own_request_only() -> None:
    engine = Setup(max_num_seqs=2).engine()
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    engine.executor.damaged = 2
    fine, damaged = engine.stream([1], params), engine.stream([2], params)
    next(fine)
    with pytest.raises(ModelError, match="no numbers"):
        next(damaged)
    assert joined(list(fine))[1] == fake_continuation([1], 10, frozenset())[1:]
    waiting = engine.add_request([2], params)  # it fails in a step of the stream's
    assert joined(list(engine.stream([1], params)))[1] == fake_continuation([1], 10, frozenset())
    assert run(engine)[waiting].outputs[0].finish_reason == "error"


def test_native_model_with_damaged_weights_says_so() -> None:
    tensors = {name: np.full_like(value, np.nan) for name, value in random_tensors(TINY).items()}
    engine = Setup("native", checkpoint=make_checkpoint(TINY, tensors)).engine()
    ids = [engine.add_request([i, 7], SamplingParams(max_tokens=5)) for i in range(3)]
    for _ in ids:
        with pytest.raises(ModelError, match="logits are no numbers for request"):
            engine.step()
    assert {output.outputs[0].finish_reason for output in run(engine).values()} == {"error"}


# --- how it is judged: many requests, and always the same answer ---


@pytest.mark.parametrize("model", MODELS)
def test_a_thousand_requests_through_64_blocks(model: str) -> None:
    rng = random.Random(0)
    engine = Setup(model, num_blocks=64, block_size=4, budget=128, max_num_seqs=32).engine()
    requests: dict[str, tuple[list[int], int]] = {}
    outputs: dict[str, RequestOutput] = {}
    aborted = 0
    while len(requests) < 1000 or engine.has_unfinished_requests():
        for _ in range(min(rng.randrange(20), 1000 - len(requests))):
            length = rng.choice([1, 3, 10, 40, 150])
            prompt = [rng.randrange(1, 256) for _ in range(rng.randint(1, length))]
            max_tokens = rng.randint(1, rng.choice([2, 8, 40, 100]))
            request_id = engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, temperature=0))
            requests[request_id] = (prompt, max_tokens)
        for output in engine.step():
            assert output.finished and output.request_id not in outputs
            outputs[output.request_id] = output
        if rng.random() < 0.3:
            victim = rng.choice(list(requests))
            if (output := engine.abort(victim)) is not None:
                outputs[victim] = output
                aborted += 1
        engine.kv_cache.check_integrity()
    assert_idle(engine)
    assert outputs.keys() == requests.keys()
    assert aborted > 20 and engine.metrics().preemptions > 20
    assert engine.metrics().finished_requests == 1000
    if model == "fake":
        for request_id, (prompt, max_tokens) in requests.items():
            completion = outputs[request_id].outputs[0]
            expected = fake_continuation(prompt, max_tokens)
            if completion.finish_reason == "abort":
                assert completion.token_ids == expected[: len(completion.token_ids)]
            else:
                assert completion.token_ids == expected
                assert completion.finish_reason == ("stop" if expected[-1] == EOS else "length")


def mixed_requests(count: int, seed: int = 1) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 100 tokens; greedy, sampled, penalised and biased."""
    rng = random.Random(seed)
    requests = []
    for i in range(count):
        prompt = [rng.randrange(256) for _ in range(rng.choice([1, 2, 15, 16, 17, 33, 100]))]
        kind = [
            {"temperature": 0},
            {"temperature": 0.8, "top_k": 40},
            {"top_p": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.2},
            {"min_p": 0.02, "logit_bias": {5: 3.0}, "min_tokens": 3},
        ][i % 4]
        requests.append((prompt, SamplingParams(max_tokens=24, logprobs=5, seed=i, **kind)))
    return requests


def answers(
    setup: Setup, requests: list[tuple[list[int], SamplingParams]]
) -> tuple[list[Any], InferenceEngine]:
    """Tokens and logprobs of each request, all of them running together."""
    engine = setup.engine()
    ids = engine.add_requests([prompt for prompt, _ in requests], [params for _, params in requests])
    outputs = run(engine)
    completions = [outputs[request_id].outputs[0] for request_id in ids]
    return [(c.token_ids, c.logprobs, c.cumulative_logprob, c.finish_reason) for c in completions], engine


@pytest.fixture(scope="module", params=["float32", "bfloat16", "int8"])
def alone(request: pytest.FixtureRequest) -> tuple[Setup, list[Any]]:
    """What each of 32 requests is answered when it has a native engine for itself."""
    dtype = "bfloat16" if request.param == "int8" else request.param
    setup = Setup("native", num_blocks=64, budget=512, max_num_seqs=32, dtype=dtype, kv_dtype=request.param)
    return setup, [answers(setup, [wish])[0][0] for wish in mixed_requests(32)]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"budget": 16},
        {"budget": 1},
        {"block_size": 1, "num_blocks": 4096},
        {"block_size": 256},
        {"block_size": 7, "num_blocks": 500},
        {"max_num_seqs": 5},
        {"threads": 1},
        {"threads": 3},
        {"num_blocks": 9},
        {"num_blocks": 130, "block_size": 1, "budget": 16},
    ],
    ids=str,
)
def test_same_answer_bit_for_bit(alone: tuple[Setup, list[Any]], change: dict[str, int]) -> None:
    setup, expected = alone
    got, engine = answers(replace(setup, **{"num_blocks": 256, **change}), mixed_requests(32))
    assert got == expected
    assert (engine.metrics().preemptions > 0) == (change.get("num_blocks", 256) in (9, 130))


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    block_size=st.integers(1, 40),
    budget=st.integers(1, 100),
    max_num_seqs=st.integers(1, 9),
    spare=st.integers(0, 20),
)
def test_same_answer_in_any_setup(
    seed: int, block_size: int, budget: int, max_num_seqs: int, spare: int
) -> None:
    requests = mixed_requests(5, seed)
    expected = [answers(Setup("native", budget=512), [wish])[0][0] for wish in requests]
    num_blocks = -(-124 // block_size) + spare  # the longest request, and a little more
    setup = Setup("native", num_blocks, block_size, budget, max_num_seqs)
    assert answers(setup, requests)[0] == expected
