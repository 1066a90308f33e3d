"""Structured outputs through the server, by OpenAI's package, from a model of random weights."""

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pydantic
import pytest
from helpers_server import HI, MODEL, Live, events, live_server, with_setup

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "size": {"enum": [1, 2, 3]}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
CITY_FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": CITY}}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(with_setup(model="native", eos=(0,), num_blocks=256, budget=256)) as live:
        yield live
        live.wait_until_idle()


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_schema(live: Live, temperature: float) -> None:
    options: Any = {"temperature": temperature, "seed": 5, "max_tokens": 200, "response_format": CITY_FORMAT}
    answer = live.client.chat.completions.create(model=MODEL, messages=HI, n=3, **options)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), CITY)
    chunks = live.client.chat.completions.create(model=MODEL, messages=HI, n=3, stream=True, **options)
    texts = ["", "", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in answer.choices]


def test_a_pydantic_model(live: Live) -> None:
    class Step(pydantic.BaseModel):
        kind: bool
        numbers: tuple[int, int]

    answer = live.client.chat.completions.parse(
        model=MODEL, messages=HI, response_format=Step, max_tokens=300, seed=1
    )
    assert isinstance(answer.choices[0].message.parsed, Step)


def test_whatever_vllm_calls_it(live: Live) -> None:
    def text(**form: Any) -> str:
        chat = live.client.chat.completions.create(
            model=MODEL, messages=HI, max_tokens=200, seed=2, extra_body=form
        )
        plain = live.client.completions.create(
            model=MODEL, prompt="Hi", max_tokens=200, seed=2, extra_body=form
        )
        assert chat.choices[0].finish_reason == plain.choices[0].finish_reason == "stop"
        return (chat.choices[0].message.content or "") + "|" + plain.choices[0].text

    both = r"a\d{3}\|a\d{3}"
    assert re.fullmatch(both, text(guided_regex=r"a\d{3}"))
    assert re.fullmatch(both, text(structured_outputs={"regex": r"a\d{3}"}))
    assert re.fullmatch("(x|yy)[|](x|yy)", text(guided_choice=["x", "yy"]))
    assert re.fullmatch("(x|yy)[|](x|yy)", text(structured_outputs={"choice": ["x", "yy"]}))
    assert text(guided_grammar='start: "a" "b"') == text(structured_outputs={"grammar": 'root ::= "ab"'})
    for form in (
        {"guided_json": CITY},
        {"guided_json": json.dumps(CITY)},
        {"structured_outputs": {"json": CITY}},
        {"response_format": CITY_FORMAT},
    ):
        for part in text(**form).split("}|"):
            jsonschema.validate(json.loads(part.removesuffix("}") + "}"), CITY)


def test_any_object(live: Live) -> None:
    options: Any = {"response_format": {"type": "json_object"}, "max_tokens": 300}
    for seed in range(4):
        answer = live.client.chat.completions.create(model=MODEL, messages=HI, seed=seed, **options)
        (choice,) = answer.choices
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content or ""), dict)
        else:
            assert choice.finish_reason == "length" and (choice.message.content or "").startswith("{")


def test_the_limit_and_stop_strings(live: Live) -> None:
    def answer(**options: Any) -> Any:
        form = {"guided_choice": ['{"a": [1, 2]}']}
        created = live.client.chat.completions.create(model=MODEL, messages=HI, extra_body=form, **options)
        return created.choices[0].message.content, created.choices[0].finish_reason

    assert answer() == ('{"a": [1, 2]}', "stop")
    assert answer(max_tokens=6) == ('{"a": ', "length")
    assert answer(stop=", ") == ('{"a": [1', "stop")


def test_logprobs_are_those_of_the_free_answer(live: Live) -> None:
    options: Any = {"model": MODEL, "messages": HI, "max_tokens": 1, "logprobs": True, "top_logprobs": 3}
    free = live.client.chat.completions.create(temperature=0, **options).choices[0].logprobs
    bound = live.client.chat.completions.create(extra_body={"guided_choice": ["{"]}, **options)
    assert free is not None and free.content is not None
    logprobs = bound.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert logprobs.content[0].token == "{" and logprobs.content[0].logprob < free.content[0].logprob
    assert logprobs.content[0].top_logprobs == free.content[0].top_logprobs


def test_what_cannot_be_served_is_refused_before_any_event(live: Live) -> None:
    deep: Any = {"type": "null"}
    for _ in range(150):
        deep = {"type": "array", "items": deep}
    for schema in (
        {"type": "no such"},
        {"not": {}},
        {"$ref": "#"},
        {"$ref": "http://127.0.0.1/x"},
        deep,
        False,
    ):
        for stream in (False, True):
            wrong: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            with pytest.raises(openai.BadRequestError) as refusal:
                live.client.chat.completions.create(
                    model=MODEL, messages=HI, response_format=wrong, stream=stream
                )
            assert refusal.value.param == "response_format"


def test_a_form_that_turns_out_too_complex_is_not_our_fault(live: Live) -> None:
    form = {"guided_regex": r"(\p{L}{0,500}\w{0,500}){0,20}", "messages": HI, "temperature": 1, "seed": 1}
    answer = live.post("/v1/chat/completions", form | {"ignore_eos": True})
    assert answer.status_code == 400 and "cannot go on in the form" in answer.json()["error"]["message"]
    stream = live.post("/v1/chat/completions", form | {"ignore_eos": True, "stream": True})
    assert stream.status_code == 200 and "event: error" in stream.text and "[DONE]" not in stream.text


def test_other_streams_go_on_while_a_large_schema_is_compiled(live: Live) -> None:
    large = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1800)}}
    body = {"messages": HI, "guided_json": large}
    compiling = threading.Thread(target=live.post, args=("/v1/chat/completions", body))
    compiling.start()
    num_answers = 0
    while compiling.is_alive():
        answer = live.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2, "stream": True})
        num_answers += len(events(answer.text)) > 1
    assert num_answers >= 3, "it takes about half a second"
