"""Structured outputs through the engine: a model of random weights, which left to itself writes no JSON."""

import json
import re
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from helpers_engine import Setup, answer, assert_idle, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minivllm.engine.inference_engine import InferenceEngine
from minivllm.errors import RequestError
from minivllm.sampling_params import SamplingParams, StructuredOutputsParams
from minivllm.text.char_tokenizer import char_tokenizer

NATIVE = Setup(model="native", num_blocks=128, budget=128)
PROMPT = list(b"Give me JSON: ")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine() -> InferenceEngine:
    return NATIVE.engine()


def wish(temperature: float = 1.0, max_tokens: int | None = 400, **fields: Any) -> SamplingParams:
    names = {"json", "regex", "choice", "grammar", "json_object"}
    form = {name: fields.pop(name) for name in names & fields.keys()}
    return SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        structured_outputs=StructuredOutputsParams(**form),
        **fields,
    )


LEAVES = st.one_of(
    st.sampled_from(
        [
            {"type": "null"},
            {"type": "boolean"},
            {"type": "string", "maxLength": 6},
            {"type": "string", "pattern": "^[a-z]{2,4}-[0-9]$"},
            {"type": "string", "format": "date"},
            {"type": "number", "minimum": -1, "maximum": 1.5},
            {"enum": ["x", 3, None, {"k": [1]}]},
            {"const": "é\n\""},
        ]
    ),
    st.integers(-200, 200).map(lambda low: {"type": "integer", "minimum": low, "maximum": low + 50}),
)  # fmt: skip


def objects(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "b c", "ü", "$d", ""])
    return st.dictionaries(names, children, max_size=3).flatmap(
        lambda properties: st.sets(st.sampled_from(sorted(properties)) if properties else st.nothing()).map(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": sorted(required),
                "additionalProperties": False,
            }
        )
    )


SCHEMAS = st.recursive(
    LEAVES,
    lambda children: st.one_of(
        objects(children),
        children.map(lambda items: {"type": "array", "items": items, "minItems": 1, "maxItems": 2}),
        st.lists(children, min_size=1, max_size=2).map(lambda kinds: {"anyOf": kinds}),
    ),
    max_leaves=5,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_whatever_the_model_the_answer_is_valid(schema: Any, seed: int, engine: InferenceEngine) -> None:
    (output,) = answer(engine, PROMPT, wish(json=schema, seed=seed, max_tokens=900)).outputs
    assert output.finish_reason == "stop"
    jsonschema.validate(
        json.loads(output.text), schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_form(engine: InferenceEngine, temperature: float) -> None:
    def text(**form: Any) -> str:
        (output,) = answer(engine, PROMPT, wish(temperature, seed=3, **form)).outputs
        assert output.finish_reason == "stop", output
        assert bytes(output.token_ids).decode() == output.text + "\0" * output.token_ids.count(0)
        return output.text

    assert re.fullmatch(r"[a-f]{3}-\d+x", text(regex=r"[a-f]{3}-\d{1,5}x"))
    assert text(choice=["yes", "no", 'ja 🙂"\\']) in ("yes", "no", 'ja 🙂"\\')
    assert re.fullmatch("SELECT [a-z]{1,9};", text(grammar='start: "SELECT " /[a-z]{1,9}/ ";"'))
    assert re.fullmatch("(ab){1,3}", text(grammar='root ::= ab | ab ab | ab ab ab\nab ::= "ab"'))
    jsonschema.validate(json.loads(text(json=json.dumps(PERSON))), PERSON)


def test_any_json_object(engine: InferenceEngine) -> None:
    for seed in range(5):
        (output,) = answer(engine, PROMPT, wish(json_object=True, seed=seed, max_tokens=900)).outputs
        if output.finish_reason == "stop":
            assert isinstance(json.loads(output.text), dict)
        else:
            assert output.text.startswith("{")


def test_the_end_token_comes_only_where_the_answer_can_end(engine: InferenceEngine) -> None:
    lengths = set()
    for seed in range(40):
        (output,) = answer(engine, PROMPT, wish(regex="ab*", seed=seed, max_tokens=30)).outputs
        assert re.fullmatch("ab*", output.text)
        assert (output.finish_reason, output.token_ids[-1] == 0) in (("stop", True), ("length", False))
        lengths.add(len(output.text))
    assert len(lengths) > 1
    # Without an end token it goes on, and ends where nothing can follow.
    (output,) = answer(engine, PROMPT, wish(regex="ab*", ignore_eos=True, max_tokens=30)).outputs
    assert output.text == "a" + "b" * 29 and output.finish_reason == "length"
    (output,) = answer(engine, PROMPT, wish(regex="ab{9}", ignore_eos=True, max_tokens=30)).outputs
    assert output.text == "a" + "b" * 9 and output.finish_reason == "stop" and output.stop_reason is None


def test_the_limit_may_cut_an_answer_off_or_be_just_enough(engine: InferenceEngine) -> None:
    form: dict[str, Any] = {"choice": ['{"a":[1,2,3]}']}
    (output,) = answer(engine, PROMPT, wish(max_tokens=5, **form)).outputs
    assert (output.text, output.finish_reason) == ('{"a":', "length")
    (output,) = answer(engine, PROMPT, wish(max_tokens=13, **form)).outputs
    assert (output.text, output.finish_reason) == ('{"a":[1,2,3]}', "stop")


def test_stop_strings_and_stop_tokens_end_it_earlier(engine: InferenceEngine) -> None:
    form: dict[str, Any] = {"choice": ["one two three"]}
    (output,) = answer(engine, PROMPT, wish(stop=" t", **form)).outputs
    assert (output.text, output.finish_reason, output.stop_reason) == ("one", "stop", " t")
    (output,) = answer(engine, PROMPT, wish(stop_token_ids=[ord("w")], **form)).outputs
    assert (output.text, output.finish_reason, output.stop_reason) == ("one t", "stop", ord("w"))
    # Where the text can end, a stop token that is not of it may come, and only there.
    (output,) = answer(
        engine, PROMPT, wish(regex="x?", stop_token_ids=[200], ignore_eos=True, logit_bias={200: 100})
    ).outputs
    assert (output.text, output.token_ids, output.stop_reason) == ("", [200], 200)


def test_logprobs_are_of_the_raw_logits(engine: InferenceEngine) -> None:
    free = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    (freely,) = answer(engine, PROMPT, free).outputs
    (bound,) = answer(engine, PROMPT, wish(0.0, choice=["{"], logprobs=5)).outputs
    assert freely.logprobs is not None and bound.logprobs is not None
    assert bound.token_ids == [ord("{")] != freely.token_ids
    top = dict(list(bound.logprobs[0].items())[1:])
    assert {i: entry.logprob for i, entry in top.items()} == {
        i: entry.logprob for i, entry in freely.logprobs[0].items()
    }
    assert bound.logprobs[0][ord("{")].rank > 5


def test_with_prompt_logprobs_and_penalties(engine: InferenceEngine) -> None:
    params = wish(json=PERSON, seed=1, prompt_logprobs=2, repetition_penalty=1.3, presence_penalty=0.5)
    output = answer(engine, PROMPT, params)
    jsonschema.validate(json.loads(output.outputs[0].text), PERSON)
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(PROMPT)


MIXED = [
    wish(json=PERSON, seed=1, max_tokens=110),
    SamplingParams(temperature=1, max_tokens=90, seed=2),
    wish(0.0, json_object=True, max_tokens=120),
    wish(regex="[a-z ]{60}", seed=3, logprobs=3, max_tokens=70),
    wish(json=PERSON, seed=4, n=3, max_tokens=80),
    wish(
        choice=["a long answer that takes many steps", "and another that takes as many"],
        seed=5,
        max_tokens=50,
    ),
    SamplingParams(temperature=0, max_tokens=60, logprobs=2, prompt_logprobs=1),
]


@pytest.mark.parametrize("setup", [NATIVE, replace(NATIVE, num_blocks=24, budget=40, max_num_seqs=8)])
def test_an_answer_does_not_depend_on_its_batch(setup: Setup) -> None:
    """Nor on preemption, after which an answer goes on where it was in its form."""
    prompts = [PROMPT + list(f"no. {i} ".encode()) * 3 for i in range(len(MIXED))]
    alone = [
        answer(replace(setup, num_blocks=200).engine(), *pair) for pair in zip(prompts, MIXED, strict=True)
    ]
    engine = setup.engine()
    ids = engine.add_requests(prompts, MIXED)
    together = run(engine)
    for request_id, expected in zip(ids, alone, strict=True):
        assert together[request_id].outputs == expected.outputs
        assert together[request_id].prompt_logprobs == expected.prompt_logprobs
    if setup.num_blocks < 100:
        assert engine.metrics().preemptions > 0


def test_choices_of_one_request_go_their_own_ways(engine: InferenceEngine) -> None:
    outputs = answer(engine, PROMPT, wish(json=PERSON, seed=9, n=8, max_tokens=200)).outputs
    assert len({output.text for output in outputs}) == 8
    for output in outputs:
        assert output.finish_reason == "stop"
        jsonschema.validate(json.loads(output.text), PERSON)


def test_streamed_pieces_are_the_whole(engine: InferenceEngine) -> None:
    whole = answer(engine, PROMPT, wish(json=PERSON, seed=2)).outputs[0]
    pieces = list(engine.stream(PROMPT, wish(json=PERSON, seed=2)))
    assert "".join(piece.outputs[0].text for piece in pieces) == whole.text
    assert pieces[-1].outputs[0].finish_reason == "stop"
    assert_idle(engine)


def test_a_step_that_fails_leaves_the_others_in_their_form() -> None:
    """The tokens of a step are drawn again if another request's logits are no numbers."""
    engine = NATIVE.engine()
    execute, failing = engine.executor.execute, [True]

    def broken(batch: Any, sampling: Any, *rest: Any, **more: Any) -> Any:
        if len(batch.context_lens) == 2 and failing.pop():
            failing.append(False)
            raise RuntimeError("logit row 1 has no token to choose: a test")
        return execute(batch, sampling, *rest, **more)

    engine.executor.execute = broken  # type: ignore[method-assign]
    good, bad = engine.add_requests([PROMPT, PROMPT], [wish(json=PERSON, seed=1)] * 2)
    outputs = {}
    while engine.has_unfinished_requests():
        try:
            outputs |= {output.request_id: output for output in engine.step()}
        except Exception as error:
            assert "logit row 1" in str(error)
    assert outputs[bad].outputs[0].finish_reason == "error"
    assert outputs[good].outputs == answer(NATIVE.engine(), PROMPT, wish(json=PERSON, seed=1)).outputs


def test_a_form_that_the_vocabulary_cannot_complete_is_an_error_of_its_request_alone() -> None:
    engine = NATIVE.engine()
    letters = [chr(i) for i in range(97, 123)]
    tokenizer = char_tokenizer({"itos": letters})
    engine = InferenceEngine(
        executor=engine.executor, kv_cache=engine.kv_cache, scheduler=engine.scheduler, tokenizer=tokenizer,
        vocab_size=256, eos_token_ids=(200,), max_model_len=500,
    )  # fmt: skip
    ids = engine.add_requests([[1, 2]] * 2, [wish(regex="[ab](1|2)"), wish(regex="[ab]{7}")])
    outputs = run(engine)
    failed, good = (outputs[i].outputs[0] for i in ids)
    assert failed.finish_reason == "error" and isinstance(failed.stop_reason, str)
    assert re.fullmatch("[ab]{7}", good.text) and good.finish_reason == "stop"


def test_what_cannot_be_asked() -> None:
    with pytest.raises(RequestError, match="min_tokens cannot be kept") as refusal:
        wish(regex="a", min_tokens=1)
    assert refusal.value.param == "min_tokens"
    with pytest.raises(RequestError, match="must be a StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    engine = replace(NATIVE, tokenizer=False).engine()
    with pytest.raises(RequestError, match="this model has no tokenizer"):
        engine.add_request(PROMPT, wish(regex="a"))
    engine = NATIVE.engine()
    with pytest.raises(RequestError, match="prompt 2 of 2: structured output is not possible"):
        engine.add_requests([PROMPT] * 2, [wish(regex="a"), wish(regex="(")])
    assert_idle(engine)
