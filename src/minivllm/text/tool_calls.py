"""Tool calls in an answer's text: found while it arrives, and the grammar of answers that are nothing else.

Models write calls in three ways, and a parser takes them all, of functions that it has been told of:

    hermes   text <tool_call>\\n{"name": "f", "arguments": {…}}\\n</tool_call> …    Hermes, Qwen
    llama    {"name": "f", "parameters": {…}}; …   perhaps after <|python_tag|>     Llama 3
    json     {"name": "f", "arguments": {…}}, or a list of these

Whatever only looks like a call is text. Knows nothing of tokens, and nothing of HTTP.
"""

import json
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal

from minivllm.text.grammar import JSON_OPTIONS

Style = Literal["hermes", "llama", "json"]

_OPEN, _CLOSE, _PYTHON_TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"
_ARGUMENTS = ("arguments", "parameters")
#: As models write it: up to where the arguments begin.
_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_FIRST_KEY = re.compile(r'\{\s*"([^"\\]*)"\s*:')
_NAME = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]*)"')
_KEYS = ("name", "type", "function", "id", *_ARGUMENTS)
_MAX_HEAD = 512  # characters, within which that must have come


@dataclass(frozen=True)
class CallBegin:
    """A call begins."""

    index: int  #: its place among the calls
    name: str  #: of the function


@dataclass(frozen=True)
class CallArguments:
    """A piece of the call's arguments, which is JSON text."""

    index: int
    text: str


Piece = str | CallBegin | CallArguments


def template_style(template: str | None) -> Style:
    """How a model writes its calls, by its chat template."""
    if template is not None and _OPEN in template:
        return "hermes"
    if template is not None and (_PYTHON_TAG in template or '"parameters": ' in template):
        return "llama"
    return "json"


def written_call(style: Style, name: str, arguments: str) -> str:
    """A call as a model writes it; ``arguments`` is JSON text."""
    key = "parameters" if style == "llama" else "arguments"
    call = f'{{"name": {json.dumps(name)}, "{key}": {arguments}}}'
    return f"{_OPEN}\n{call}\n{_CLOSE}" if style == "hermes" else call


def call_grammar(
    style: Style,
    functions: Mapping[str, Mapping[str, Any] | None],
    several: bool,
    answer: Mapping[str, Any] | None = None,
) -> str:
    """The grammar, in Lark's notation, of an answer that is one call, or several.

    Args:
        functions: by name, the JSON schema of their arguments; None: any object.
        several: more than one call may come.
        answer: the JSON schema of what may come in place of calls; None: nothing.
    """
    rules = []
    for i, (name, schema) in enumerate(functions.items()):
        before, after = written_call(style, name, "\0").split("\0")
        rules.append(f"call{i}: {json.dumps(before)} arguments{i} {json.dumps(after)}")
        rules.append(f"arguments{i}: {_json_rule({'type': 'object', **(schema or {})})}")
    rules.append("call: " + " | ".join(f"call{i}" for i in range(len(functions))))
    if not several:
        rules.append("calls: call")
    elif style == "json":
        rules.append('calls: "[" call (", " call)* "]"')
    else:
        rules.append(f"calls: call ({json.dumps(chr(10) if style == 'hermes' else '; ')} call)*")
    if answer is not None:
        rules.append(f"answer: {_json_rule(answer)}")
    rules.append("start: calls" if answer is None else "start: calls | answer")
    return "\n".join(rules)


def _json_rule(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}"


class ToolCallParser:
    """Owner of the text of one answer that is not certain yet.

    The strings among the pieces are the answer's text, as it is but for white space around calls.

    Args:
        names: of the functions that may be called.
    """

    def __init__(self, names: Set[str]) -> None:
        self.num_calls = 0  #: begun so far
        self._names = names
        self._place: Literal["start", "text", "tagged", "object", "after", "gap"] = "start"
        self._held = ""  # arrived, and not looked at to the end
        self._raw = ""  # taken since the text ended; it is text, too, if no call comes of it
        self._in_tag = False
        self._object = _ObjectReader(names)

    def push(self, text: str) -> list[Piece]:
        """Take the next piece of the answer, and return what is certain."""
        self._held += text
        pieces: list[Piece] = []
        look = {
            "start": self._at_start,
            "text": self._in_text,
            "tagged": self._after_tag,
            "object": self._in_object,
            "after": self._after_call,
            "gap": self._after_gap,
        }
        while look[self._place](pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """Nothing more will come: return what was held back."""
        text = self._raw + self._held if self._place not in ("after", "gap") else ""
        self._held = self._raw = ""
        return [text] if text else []

    # Each looks at what is held. False: more must come first.

    def _at_start(self, pieces: list[Piece]) -> bool:
        """Only here a call may come without a tag: else every brace could be one."""
        begin = self._held.lstrip()
        if not begin or (begin != _PYTHON_TAG and _PYTHON_TAG.startswith(begin)):
            return False
        if begin.startswith(_PYTHON_TAG):
            self._take(len(self._held) - len(begin) + len(_PYTHON_TAG))
            return True
        if begin[0] == "[" and not begin[1:].strip():
            return False
        if begin[0] == "{" or (begin[0] == "[" and begin[1:].lstrip()[0] == "{"):
            self._begin_object(in_tag=False)
        else:
            self._reject(pieces)
        return True

    def _in_text(self, pieces: list[Piece]) -> bool:
        text, tag, after = self._held.partition(_OPEN)
        if tag:
            certain = text.rstrip()
            self._raw, self._held = text[len(certain) :] + tag, after
            self._place = "tagged"
        else:  # what may become white space and a tag is held back
            keep = next(n for n in range(len(_OPEN) - 1, -1, -1) if text.endswith(_OPEN[:n]))
            certain = text[: len(text) - keep].rstrip()
            self._held = text[len(certain) :]
        if certain:
            pieces.append(certain)
        return bool(tag)

    def _after_tag(self, pieces: list[Piece]) -> bool:
        begin = self._held.lstrip()
        if begin[:1] == "{":
            self._begin_object(in_tag=True)
        elif begin:
            self._reject(pieces)
        return bool(begin)

    def _in_object(self, pieces: list[Piece]) -> bool:
        self._take(self._object.push(self._held))
        if (name := self._object.take_name()) is not None:
            pieces.append(CallBegin(self.num_calls, name))
            self.num_calls += 1
        if arguments := self._object.take_arguments():
            pieces.append(CallArguments(self.num_calls - 1, arguments))
        if self._object.is_call:
            self._raw = ""
        if self._object.is_text:
            self._reject(pieces)
        elif self._object.complete:
            self._place = "after"
        else:
            return False
        return True

    def _after_call(self, pieces: list[Piece]) -> bool:
        """Another one, or text."""
        begin = self._held.lstrip() if self._in_tag else self._held.lstrip(" \t\r\n;,]")
        if not begin or (self._in_tag and begin != _CLOSE and _CLOSE.startswith(begin)):
            return False
        self._held = begin.removeprefix(_CLOSE) if self._in_tag else begin
        if begin[0] == "{" and not self._in_tag:
            self._begin_object(in_tag=False)
        else:
            self._place = "gap"
        return True

    def _after_gap(self, pieces: list[Piece]) -> bool:
        self._held = self._held.lstrip()
        if self._held:
            self._place = "text"
        return bool(self._held)

    def _begin_object(self, in_tag: bool) -> None:
        self._take(self._held.index("{"))
        self._in_tag = in_tag
        self._object = _ObjectReader(self._names)
        self._place = "object"

    def _take(self, count: int) -> None:
        self._raw += self._held[:count]
        self._held = self._held[count:]

    def _reject(self, pieces: list[Piece]) -> None:
        """It was text."""
        if self._raw:
            pieces.append(self._raw)
        self._raw = ""
        self._place = "text"


class _ObjectReader:
    """Reads one JSON object that may be a call, to its end and no further."""

    def __init__(self, names: Set[str]) -> None:
        self.is_call = self.is_text = False  # neither: it is not decided yet
        self.complete = False
        self._names = names
        self._text = ""
        self._depth = 0
        self._in_string = self._escaped = False
        self._end_of_arguments: int | None = None  # of those that the head tells of: where depth 2 first ends
        self._name: str | None = None  # not taken yet
        self._arguments = ""  # not taken yet
        self._next = 0  # where in the text the arguments go on

    def push(self, text: str) -> int:
        """Take the object's next characters; returns how many of these there are."""
        before = len(self._text)
        count = self._scan(text)
        self._text += text[:count]
        if not self.is_call:
            self._decide()
        if self.is_call and self._next:
            end = len(self._text) if self._end_of_arguments is None else self._end_of_arguments
            self._arguments += self._text[self._next : end]
            self._next = max(self._next, end)
        return len(self._text) - before

    def take_name(self) -> str | None:
        """The function's name, once."""
        name, self._name = self._name, None
        return name

    def take_arguments(self) -> str:
        """What is new of the arguments."""
        arguments, self._arguments = self._arguments, ""
        return arguments

    def _scan(self, text: str) -> int:
        """Find the end; returns the number of characters up to it, or all."""
        for count, character in enumerate(text, start=1):
            if self._escaped:
                self._escaped = False
            elif character == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                self._escaped = character == "\\"
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 1 and self._end_of_arguments is None:
                    self._end_of_arguments = len(self._text) + count
                if self._depth == 0:
                    self.complete = True
                    return count
        return len(text)

    def _decide(self) -> None:
        """Whether it is a call, as soon as that can be told."""
        if len(self._text) < _MAX_HEAD and (head := _HEAD.match(self._text)) and head[1] in self._names:
            self.is_call = True
            self._name, self._next = head[1], head.end()
        elif self.complete:
            call = _call(self._text, self._names)
            self.is_call, self.is_text = call is not None, call is None
            if call is not None:
                self._name, self._arguments = call
        elif len(self._text) < _MAX_HEAD and (first := _FIRST_KEY.match(self._text)):
            named = _NAME.match(self._text)
            self.is_text = first[1] not in _KEYS or (named is not None and named[1] not in self._names)


def _call(text: str, names: Set[str]) -> tuple[str, str] | None:
    """Name and arguments, if the JSON text is a call of one of these functions, in whatever order."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(inner := value.get("function"), dict):
        value = inner
    name = value.get("name")
    arguments = next((value[key] for key in _ARGUMENTS if key in value), None)
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict | str):
        return None
    return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
