"""Tool calls in text: every form that models write, whole and in pieces, and the grammars that force them."""

import json
import random
from typing import Any

import jsonschema
import pytest
from helpers_engine import byte_tokenizer
from helpers_grammar import random_text
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.structured_outputs import StructuredOutputsParams
from minivllm.text.grammar import GrammarCompiler
from minivllm.text.tool_calls import (
    CallArguments,
    CallBegin,
    Piece,
    Style,
    ToolCallParser,
    call_grammar,
    template_style,
    written_call,
)

NAMES = frozenset({"f", "get_weather"})
Read = tuple[str, list[tuple[str, str]]]


def read(pieces: list[Piece]) -> Read:
    """The text, and each call's name and arguments; checks that the pieces come in order."""
    text, calls = "", []
    for piece in pieces:
        if isinstance(piece, str):
            assert piece
            text += piece
        elif isinstance(piece, CallBegin):
            assert piece.index == len(calls)
            calls.append((piece.name, ""))
        else:
            assert isinstance(piece, CallArguments) and piece.text and piece.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return text, calls


def parse(*texts: str) -> Read:
    parser = ToolCallParser(NAMES)
    pieces = [piece for text in texts for piece in parser.push(text)] + parser.finish()
    text, calls = read(pieces)
    assert parser.num_calls == len(calls)
    return text, calls


F: Any = ("f", '{"a": {"b": "}\\"<tool_call>"}, "c": [1, 2]}')
G: Any = ("get_weather", "{}")


def call(one: tuple[str, str], key: str = "arguments") -> str:
    return f'{{"name": "{one[0]}", "{key}": {one[1]}}}'


def tag(one: tuple[str, str]) -> str:
    return f"<tool_call>\n{call(one)}\n</tool_call>"


CASES: dict[str, tuple[str, Read]] = {
    "text": ("Hello <b>there</b>. \n", ("Hello <b>there</b>. \n", [])),
    "hermes": (tag(F), ("", [F])),
    "after text": (f"Let me see.\n\n{tag(G)}", ("Let me see.", [G])),
    "several": (f"{tag(F)}\n{tag(G)}", ("", [F, G])),
    "text around": (f"One {tag(F)} two\n{tag(G)}\n three", ("Onetwothree", [F, G])),
    "not closed": (f"<tool_call>{call(F)}", ("", [F])),
    "llama": (call(F, "parameters"), ("", [F])),
    "python tag": (f"<|python_tag|>{call(G, 'parameters')}", ("", [G])),
    "llama, several": (f"{call(F, 'parameters')}; {call(G, 'parameters')}", ("", [F, G])),
    "json": (f"  {call(G)}\n", ("", [G])),
    "list": (f"[{call(F)}, {call(G)}]", ("", [F, G])),
    "other order": ('{"arguments": {"x": 1}, "name": "f"}', ("", [("f", '{"x": 1}')])),
    "tagged, other order": ('<tool_call>{"arguments": {}, "name": "f"}</tool_call>', ("", [("f", "{}")])),
    "with a type": (
        '{"type": "function", "name": "f", "parameters": {"x": "é"}}',
        ("", [("f", '{"x": "é"}')]),
    ),
    "as in the API": (
        '{"type": "function", "function": {"name": "f", "arguments": "{\\"x\\":1}"}}',
        ("", [("f", '{"x":1}')]),
    ),
    "cut off": ('{"name": "f", "arguments": {"a": "tru', ("", [("f", '{"a": "tru')])),
    "cut off early": ('{"name": "f", "argu', ('{"name": "f", "argu', [])),
    "other function": ('{"name": "g", "arguments": {}}', ('{"name": "g", "arguments": {}}', [])),
    "tagged other": (
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        ('<tool_call>{"name": "g", "arguments": {}}</tool_call>', []),
    ),
    "other object": ('{"city": {"name": "f"}}', ('{"city": {"name": "f"}}', [])),
    "no arguments": ('{"name": "f"}', ('{"name": "f"}', [])),
    "no JSON": ('{"name" "f"}', ('{"name" "f"}', [])),
    "a list": ("[1, 2]", ("[1, 2]", [])),
    "a list of others": ('[{"a": 1}]', ('[{"a": 1}]', [])),
    "later": (f"It is {call(F)}", (f"It is {call(F)}", [])),
    "no object": ("<tool_call>f()</tool_call>", ("<tool_call>f()</tool_call>", [])),
    "part of a tag": ("a <tool_cal", ("a <tool_cal", [])),
    "white space": (" \n", (" \n", [])),
    "a long name": ('{"name": "' + "f" * 2000 + '"}', ('{"name": "' + "f" * 2000 + '"}', [])),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_form_whole_and_in_pieces(name: str) -> None:
    text, expected = CASES[name]
    assert parse(text) == expected
    assert parse(*text) == expected
    for seed in range(30):
        rng = random.Random(seed)
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 8)))
        assert parse(*(text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True))) == expected


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                '{"name": "f", ',
                '"arguments": ',
                "{",
                "}",
                "<tool_call>",
                "</tool_call>",
                "a",
                "\n",
                '"',
                "\\",
                "[",
                "]",
                ", ",
            ]
        )
    )
)
def test_pieces_are_the_whole_whatever_comes(parts: list[str]) -> None:
    assert parse(*parts) == parse("".join(parts)) == parse(*"".join(parts))


def test_arguments_are_told_while_they_arrive() -> None:
    parser = ToolCallParser(NAMES)
    assert parser.push('Well. <tool_call>{"name": "f", "arguments": {"a') == [
        "Well.", CallBegin(0, "f"), CallArguments(0, '{"a'),
    ]  # fmt: skip
    assert parser.push('": 1}') == [CallArguments(0, '": 1}')]
    assert parser.push("}</tool_call>") == parser.finish() == []


def test_text_is_told_as_soon_as_it_is_certain() -> None:
    parser = ToolCallParser(NAMES)
    assert parser.push("Hello") == ["Hello"]
    assert parser.push(" <") == [] and parser.push("b") == [" <b"]
    parser = ToolCallParser(NAMES)
    assert parser.push('{"city": ') == ['{"city": '], "no call begins like this"


def test_the_style_is_the_templates() -> None:
    assert template_style("... <tool_call>\n{'name': ...") == "hermes"
    assert template_style("{'role': 'ipython'} <|python_tag|>") == "llama"
    assert template_style("{{ messages }}") == template_style(None) == "json"


SCHEMAS: dict[str, dict[str, Any] | None] = {
    "f": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/small"}},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"small": {"type": "integer", "minimum": 1, "maximum": 20}},
    },
    "get_weather": {
        "properties": {"unit": {"enum": ["c", 'f"']}},
        "required": ["unit"],
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("style", ["hermes", "llama", "json"])
@pytest.mark.parametrize("several", [False, True])
def test_what_the_grammar_allows_are_calls(style: Style, several: bool) -> None:
    """Random walks, each of which ends with calls of these functions, with valid arguments."""
    compiler = GrammarCompiler(byte_tokenizer(), 256)
    grammar = compiler.compile(StructuredOutputsParams(grammar=call_grammar(style, SCHEMAS, several)))
    seen = set()
    for seed in range(20):
        text, calls = parse(random_text(grammar, seed))
        assert text == "" and calls and (several or len(calls) == 1)
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name] or {})
        seen.add(len(calls))
    assert len(seen) > 1 or not several


@pytest.mark.parametrize("style", ["hermes", "llama", "json"])
def test_calls_are_written_as_they_are_read(style: Style) -> None:
    assert parse(written_call(style, *F)) == ("", [F])


def test_an_answer_may_come_in_place_of_calls() -> None:
    compiler = GrammarCompiler(byte_tokenizer(), 256)
    answer = {
        "type": "object",
        "properties": {"x": {"const": 1}},
        "required": ["x"],
        "additionalProperties": False,
    }
    source = call_grammar("json", SCHEMAS, False, answer)
    grammar = compiler.compile(StructuredOutputsParams(grammar=source))
    kinds = set()
    for seed in range(30):
        text, calls = parse(random_text(grammar, seed))
        assert bool(calls) != bool(text) and (not text or json.loads(text) == {"x": 1})
        kinds.add(bool(calls))
    assert kinds == {True, False}
