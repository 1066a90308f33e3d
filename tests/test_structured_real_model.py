"""SmolLM2 within a form: offline, and through OpenAI's package with tools."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from conftest import find_real_model
from helpers_server import MODEL, Live, live_server

from minivllm import LLM, SamplingParams, StructuredOutputsParams

pytestmark = pytest.mark.real_model

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "country": {"type": "string"},
        "population": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
    },
    "required": ["city", "country", "population"],
    "additionalProperties": False,
}
ASK: Any = [{"role": "user", "content": "Tell me about Paris, the capital of France, as JSON."}]
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
        "additionalProperties": False,
    }}},
    {"type": "function", "function": {"name": "get_time", "parameters": {
        "type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"],
        "additionalProperties": False,
    }}},
]  # fmt: skip


@pytest.fixture(scope="module")
def llm() -> LLM:
    model = find_real_model()
    assert model is not None
    return LLM(model, num_blocks=128, max_model_len=1024)


@pytest.fixture(scope="module")
def live(llm: LLM) -> Iterator[Live]:
    with live_server(llm.engine) as live:
        yield live
        live.wait_until_idle()


def test_offline(llm: LLM) -> None:
    forms = [
        StructuredOutputsParams(json=CITY),
        StructuredOutputsParams(choice=["Paris", "London"]),
        StructuredOutputsParams(regex=r"The population is about \d{1,3} million\."),
    ]
    params = [SamplingParams(temperature=0, max_tokens=80, structured_outputs=form) for form in forms]
    about, choice, sentence = (output.outputs[0] for output in llm.chat([ASK] * 3, params))
    value = json.loads(about.text)
    jsonschema.validate(value, CITY)
    assert value["city"] == "Paris" and value["country"].lower() == "france"
    assert choice.text == "Paris" and sentence.text.startswith("The population is about ")
    assert {output.finish_reason for output in (about, choice, sentence)} == {"stop"}


def test_an_answer_is_the_same_alone_and_among_others(llm: LLM) -> None:
    form = StructuredOutputsParams(json=CITY)
    params = SamplingParams(temperature=1, seed=4, max_tokens=60, n=2, structured_outputs=form)
    free = SamplingParams(temperature=1, seed=5, max_tokens=40)
    alone = llm.chat(ASK, params)[0].outputs
    assert llm.chat([ASK] * 3, [free, params, free])[1].outputs == alone


def test_a_form_agrees_with_the_stream(live: Live) -> None:
    options: Any = {
        "model": MODEL, "messages": ASK, "temperature": 0, "max_tokens": 80,
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}},
    }  # fmt: skip
    whole = live.client.chat.completions.create(**options).choices[0].message.content
    pieces = live.client.chat.completions.create(**options, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole
    jsonschema.validate(json.loads(whole or ""), CITY)


def test_a_call_there_and_back(live: Live) -> None:
    """The template of SmolLM2 knows no tools; it calls them all the same where it must."""
    messages: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
    options: Any = {"model": MODEL, "tools": TOOLS, "temperature": 0, "max_tokens": 60}
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    answer = live.client.chat.completions.create(messages=messages, tool_choice=named, **options)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls" and message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function" and call.function.name == "get_weather"
    assert "Rome" in json.loads(call.function.arguments)["city"]

    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 25 degrees."}
    more = live.client.chat.completions.create(
        messages=[*messages, message, result], tool_choice="none", **options
    )
    assert more.choices[0].message.content and not more.choices[0].message.tool_calls

    required = live.client.chat.completions.create(messages=messages, tool_choice="required", **options)
    calls = required.choices[0].message.tool_calls
    assert calls and all(
        call.type == "function" and json.loads(call.function.arguments) for call in calls[:1]
    )
