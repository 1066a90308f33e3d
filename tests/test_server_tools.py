"""Tools through the server, by OpenAI's package: answers that a script writes, and answers bound to call."""

import json
from collections.abc import Iterator
from typing import Any

import fakes
import jsonschema
import openai
import pytest
from helpers_server import HI, MODEL, Live, events, live_server, with_setup

PLACE = {
    "type": "object",
    "properties": {"place": {"type": "string", "maxLength": 5}, "days": {"enum": [1, 2, 3]}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather", "parameters": PLACE},
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.name }}:{{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome", "days": 1}}\n</tool_call>'


class Script:
    """What a fake model answers, by choice, each ended by its end token."""

    texts: list[str]

    def next(self, token_ids: Any, choice: int = 0) -> tuple[int, float]:
        tokens = bytes(list(token_ids))
        answer = self.texts[choice].encode() + bytes([fakes.EOS])
        return answer[len(tokens) - tokens.rindex(b"<a>") - 3], -1.0


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()
    monkeypatch.setattr(fakes, "fake_next", script.next)
    return script


@pytest.fixture(scope="module")
def scripted() -> Iterator[Live]:
    with live_server(with_setup(chat_template=TEMPLATE, eos=(fakes.EOS,))) as live:
        yield live
        live.wait_until_idle()


@pytest.fixture(scope="module")
def random_model() -> Iterator[Live]:
    setup = with_setup(model="native", chat_template=TEMPLATE, eos=(0,), num_blocks=256, budget=256)
    with live_server(setup) as live:
        yield live
        live.wait_until_idle()


@pytest.fixture(scope="module")
def without_tools() -> Iterator[Live]:
    """Its template knows neither tools nor calls."""
    with live_server(with_setup(model="native", eos=(0,), num_blocks=256, budget=256)) as live:
        yield live
        live.wait_until_idle()


def created(live: Live, **options: Any) -> Any:
    options = {"messages": HI, "tools": [WEATHER, CLOCK], "seed": 3} | options
    return live.client.chat.completions.create(model=MODEL, **options)


def streamed(live: Live, **options: Any) -> list[tuple[str, list[tuple[str, str]], str | None]]:
    """Each choice's text, calls and reason, put together from the stream as its clients do."""
    choices: dict[int, tuple[str, list[tuple[str, str]], str | None]] = {}
    ids = set()
    for chunk in created(live, stream=True, **options):
        (choice,) = chunk.choices
        text, calls, reason = choices.get(choice.index, ("", [], None))
        assert reason is None, "nothing comes after the reason"
        for call in choice.delta.tool_calls or []:
            assert call.function is not None
            if call.index == len(calls):
                assert call.id and call.id not in ids and call.type == "function" and call.function.name
                ids.add(call.id)
                calls.append((call.function.name, ""))
            else:
                assert call.index == len(calls) - 1 and call.id is None and call.function.name is None
            calls[-1] = (calls[-1][0], calls[-1][1] + (call.function.arguments or ""))
        text += choice.delta.content or ""
        choices[choice.index] = (text, calls, choice.finish_reason)
    return [choices[index] for index in sorted(choices)]


def told(choice: Any) -> tuple[str, list[tuple[str, str]], str | None]:
    """The same of a whole choice."""
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    return choice.message.content or "", calls, choice.finish_reason


SCRIPTS = {
    "text": ("Hello, <b>you</b>", ("Hello, <b>you</b>", [], "stop")),
    "hermes": (CALL, ("", [("weather", '{"place": "Rome", "days": 1}')], "tool_calls")),
    "both": (f"Wait.\n{CALL}", ("Wait.", [("weather", '{"place": "Rome", "days": 1}')], "tool_calls")),
    "llama": ('{"name": "clock", "parameters": {}}', ("", [("clock", "{}")], "tool_calls")),
    "json": (
        '[{"name": "clock", "arguments": {}}, {"name": "clock", "arguments": {"x": 1}}]',
        ("", [("clock", "{}"), ("clock", '{"x": 1}')], "tool_calls"),
    ),
    "unknown": ('{"name": "f", "arguments": {}}', ('{"name": "f", "arguments": {}}', [], "stop")),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_calls_are_found_in_every_form(name: str, scripted: Live, script: Script) -> None:
    text, expected = SCRIPTS[name]
    script.texts = [text]
    (choice,) = created(scripted).choices
    assert told(choice) == expected
    assert choice.message.content is None or choice.message.content or not expected[1]
    assert streamed(scripted) == [expected]


def test_choices_call_each_for_themselves(scripted: Live, script: Script) -> None:
    script.texts = [CALL, "No.", f"{CALL}\n{CALL}"]
    expected = [told(choice) for choice in created(scripted, n=3).choices]
    assert [(text, len(calls), reason) for text, calls, reason in expected] == [
        ("", 1, "tool_calls"), ("No.", 0, "stop"), ("", 2, "tool_calls"),
    ]  # fmt: skip
    assert streamed(scripted, n=3) == expected
    script.texts = [f"{CALL}\n{CALL}"]
    for choices in (
        [told(choice) for choice in created(scripted, parallel_tool_calls=False).choices],
        streamed(scripted, parallel_tool_calls=False),
    ):
        assert [len(calls) for _, calls, _ in choices] == [1]


def test_the_stream_of_a_call(scripted: Live, script: Script) -> None:
    script.texts = [CALL]
    body = {"messages": HI, "tools": [WEATHER], "stream": True, "logprobs": True}
    chunks = [chunk["choices"][0] for chunk in events(scripted.post("/v1/chat/completions", body).text)]
    first, *middle, last = chunks
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert last["delta"] == {} and last["finish_reason"] == "tool_calls"
    calls = [chunk["delta"]["tool_calls"] for chunk in middle if "tool_calls" in chunk["delta"]]
    (begin,) = calls[0]
    assert begin["function"] == {"name": "weather", "arguments": ""} and begin["type"] == "function"
    assert all(set(piece[0]) == {"index", "function"} for piece in calls[1:]) and len(calls) > 5
    assert not any(chunk["delta"].get("content") for chunk in middle)
    logprobs = [entry for chunk in middle for entry in (chunk["logprobs"] or {}).get("content", [])]
    assert bytes(byte for entry in logprobs for byte in entry["bytes"]) == CALL.encode() + b"\0"


def test_a_call_that_the_limit_cuts_off(scripted: Live, script: Script) -> None:
    script.texts = [CALL]
    (choice,) = created(scripted, max_tokens=58).choices
    assert told(choice) == ("", [("weather", '{"place": "Ro')], "length")
    assert streamed(scripted, max_tokens=58) == [told(choice)]


def test_what_the_template_is_given(scripted: Live, script: Script) -> None:
    script.texts = ["ok"]

    def prompt_tokens(**options: Any) -> int:
        return int(created(scripted, **options).usage.prompt_tokens)

    assert prompt_tokens() == len("[weather][clock]<user>Hi<a>")
    assert prompt_tokens(tool_choice="auto") == len("[weather][clock]<user>Hi<a>")
    assert prompt_tokens(tool_choice="none") == prompt_tokens(tools=openai.omit) == len("<user>Hi<a>")
    assert prompt_tokens(tools=[], tool_choice="none") == len("<user>Hi<a>")
    answer = created(scripted, messages=HI)
    script.texts = [CALL]
    asked = created(scripted).choices[0].message
    script.texts = ["ok"]
    history = [*HI, asked, {"role": "tool", "tool_call_id": asked.tool_calls[0].id, "content": "sunny"}]
    said = '<user>Hi<assistant><tool_call>weather:{"place": "Rome", "days": 1}</tool_call><tool>sunny<a>'
    assert prompt_tokens(messages=history, tools=[CLOCK]) == len("[clock]" + said)
    assert answer.choices[0].message.tool_calls is None
    counted = scripted.post("/tokenize", {"messages": HI, "tools": [CLOCK]}).json()["count"]
    assert counted == len("[clock]<user>Hi<a>")


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_whatever_the_model(temperature: float, parallel: bool, random_model: Live) -> None:
    options: Any = {
        "tool_choice": "required", "parallel_tool_calls": parallel, "n": 4, "temperature": temperature,
        "tools": [WEATHER, {"type": "function", "function": {"name": "w.2", "parameters": PLACE}}],
        "max_tokens": 400,
    }  # fmt: skip
    choices = [told(choice) for choice in created(random_model, **options).choices]
    for text, calls, reason in choices:
        if temperature:
            assert text == "" and reason == "tool_calls" and calls and (parallel or len(calls) == 1)
        for _, arguments in calls if reason == "tool_calls" else []:
            jsonschema.validate(json.loads(arguments), PLACE)
    assert streamed(random_model, **options) == choices


def test_a_named_function_is_called(random_model: Live, without_tools: Live) -> None:
    """Also by a model that is not told of it."""
    for live in (random_model, without_tools):
        named = {"type": "function", "function": {"name": "weather"}}
        options: Any = {"tool_choice": named, "max_tokens": 300}
        (choice,) = created(live, **options).choices
        text, ((name, arguments),), reason = told(choice)
        assert (text, name, reason) == ("", "weather", "tool_calls") and choice.message.content is None
        jsonschema.validate(json.loads(arguments), PLACE)
        assert streamed(live, **options) == [told(choice)]


def test_calls_or_an_answer_of_a_form(random_model: Live) -> None:
    answer = {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": answer}}
    kinds = set()
    for seed in range(12):
        options: Any = {"response_format": form, "seed": seed, "max_tokens": 300, "tools": [WEATHER]}
        (choice,) = created(random_model, **options).choices
        text, calls, reason = told(choice)
        if reason == "stop":
            assert json.loads(text) == {"a": 1}
        for _, arguments in calls:
            jsonschema.validate(json.loads(arguments), PLACE)
        kinds.add(reason)
    assert "stop" in kinds and "tool_calls" in kinds


def test_calls_in_the_history_are_not_lost_on_a_model_whose_template_has_no_place_for_them(
    without_tools: Live,
) -> None:
    function = {"name": "weather", "arguments": '{"place": "Rome"}'}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    messages = [{"role": "assistant", "content": None, "tool_calls": calls}]
    counted = without_tools.post("/tokenize", {"messages": messages}).json()["count"]
    assert counted == len('<assistant>{"name": "weather", "arguments": {"place": "Rome"}}<a>')


def test_what_is_refused(scripted: Live, without_tools: Live) -> None:
    def tool(**function: Any) -> Any:
        return {"type": "function", "function": function}

    named = {"type": "function", "function": {"name": "no_such"}}
    form = {"type": "json_object"}
    wrong: list[tuple[Any, str]] = [
        ({"tools": [tool()]}, "tools[0].function.name"),
        ({"tools": [tool(name="a b")]}, "tools[0].function.name"),
        ({"tools": [tool(name="f" * 65)]}, "tools[0].function.name"),
        ({"tools": [tool(name="f", parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [tool(name="f"), tool(name="f")]}, "tools"),
        ({"tools": [tool(name=f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": "f"}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "any", "tools": [CLOCK]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [CLOCK]}, "tool_choice"),
        ({"tool_choice": named, "tools": [CLOCK]}, "tool_choice"),
        ({"tool_choice": "required", "tools": [CLOCK], "response_format": form}, "tool_choice"),
        ({"tool_choice": "auto", "tools": [CLOCK], "guided_regex": "a"}, "tools"),
        ({"tool_choice": "required", "tools": [tool(name="f", parameters={"type": "no such"})]}, "tools"),
        ({"tool_choice": "required", "tools": [tool(name="f", parameters={"not": {}})]}, "tools"),
        ({"tool_choice": "required", "tools": [CLOCK], "min_tokens": 3}, "min_tokens"),
        ({"messages": [{"role": "assistant", "tool_calls": "f"}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [tool(name="f", arguments="{")]}]},
            "messages[0].tool_calls",
        ),
    ]  # fmt: skip
    for body, param in wrong:
        for stream in (False, True):
            answer = scripted.post("/v1/chat/completions", {"messages": HI, "stream": stream} | body)
            assert answer.status_code == 400, body
            assert answer.json()["error"]["param"] == param, answer.text
    answer = without_tools.post("/v1/chat/completions", {"messages": HI, "tools": [CLOCK]})
    assert answer.status_code == 400 and "no place for tools" in answer.json()["error"]["message"]
