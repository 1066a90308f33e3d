"""Tools: what a conversation may call, and how its calls look in OpenAI's API."""

import json
import re
import uuid
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from minivllm.errors import shown
from minivllm.server.errors import bad_request
from minivllm.server.forms import structured_outputs
from minivllm.server.protocol import ChatCompletionRequest, NamedTool
from minivllm.server.responses import Delta, ToolCall, ToolCallDelta
from minivllm.structured_outputs import StructuredOutputsParams
from minivllm.text.tool_calls import (
    CallArguments,
    CallBegin,
    Piece,
    ToolCallParser,
    call_grammar,
    template_style,
    written_call,
)


@dataclass(frozen=True)
class Tools:
    """What an answer may call."""

    names: frozenset[str]
    several: bool  #: more than one call
    form: StructuredOutputsParams | None  #: of the answer, if it is bound to call


def tools_of(body: ChatCompletionRequest, template: str | None) -> Tools | None:
    """The tools of a conversation; None: it has none, or is not to call them.

    Args:
        template: the model's chat template.

    Raises:
        ApiError: the fields contradict each other, or the model could not know of the tools.
    """
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none"):
            raise bad_request("tool_choice needs tools; leave it out, or say what they are", "tool_choice")
        return None
    functions = {tool.function.name: tool.function.parameters for tool in body.tools}
    if len(functions) < len(body.tools):
        raise bad_request("two of the tools have the same name", "tools")
    if choice == "none":
        return None
    several, form = body.parallel_tool_calls is not False, structured_outputs(body)
    style = template_style(template)
    if choice in (None, "auto"):
        if not _knows(template, "tools"):
            raise bad_request(
                "the model's chat template has no place for tools, so the model would not know of them; with "
                'tool_choice "required", or the name of a function, it calls them all the same',
                "tools",
            )
        if form is None:
            return Tools(frozenset(functions), several, None)
        if not isinstance(form.json, str) and not form.json_object:
            raise bad_request("with tools an answer's form can only be JSON", "tools")
        answer = json.loads(form.json) if isinstance(form.json, str) else {"type": "object"}
        answer = {} if answer is True else {"enum": []} if answer is False else answer
        return Tools(frozenset(functions), several, _form(call_grammar(style, functions, several, answer)))
    if form is not None:
        raise bad_request(
            "an answer that must call a tool has no other form; leave one of both out", "tool_choice"
        )
    if isinstance(choice, NamedTool):
        name, several = choice.name, False
        if name not in functions:
            raise bad_request(f"tool_choice names {shown(name)}, which is none of the tools", "tool_choice")
        functions = {name: functions[name]}
    return Tools(frozenset(functions), several, _form(call_grammar(style, functions, several)))


def _form(grammar: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(grammar=grammar)


def _knows(template: str | None, name: str) -> bool:
    return template is not None and re.search(rf"\b{name}\b", template) is not None


def with_calls_as_text(message: dict[str, Any], template: str | None) -> dict[str, Any]:
    """A message whose calls are in its content, as the model wrote them, if its template would drop them."""
    calls = message.get("tool_calls")
    if not calls or _knows(template, "tool_calls"):
        return message
    parts = [] if message.get("content") is None else [_text(message["content"])]
    for call in calls:
        arguments = call["function"].get("arguments") or "{}"
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        parts.append(written_call(template_style(template), call["function"]["name"], text))
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return rest | {"content": "\n".join(filter(None, parts))}


def _text(content: Any) -> str:
    """A message's content; what is no text is left to the template to refuse."""
    if not isinstance(content, list):
        return str(content)
    return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))


class AnswerParser:
    """Owner of what one choice of a conversation has called so far."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._parser = ToolCallParser(tools.names)

    @property
    def has_calls(self) -> bool:
        """Whether it has called anything."""
        return self._parser.num_calls > 0

    def deltas(self, text: str, finished: bool) -> list[Delta]:
        """What is new, when ``text`` is."""
        pieces = self._parser.push(text)
        if finished:
            pieces += self._parser.finish()
        return [_delta(piece) for piece in pieces if self._tools.several or getattr(piece, "index", 0) == 0]


def _delta(piece: Piece) -> Delta:
    if isinstance(piece, CallBegin):
        begin: ToolCallDelta = {
            "index": piece.index,
            "id": f"call_{uuid.uuid4().hex}",
            "type": "function",
            "function": {"name": piece.name, "arguments": ""},
        }
        return {"tool_calls": [begin]}
    if isinstance(piece, CallArguments):
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
    return {"content": piece}


def joined(deltas: Seq[Delta]) -> tuple[str | None, list[ToolCall]]:
    """The content and the calls of a whole message."""
    content = "".join(delta.get("content", "") for delta in deltas)
    calls: list[ToolCall] = []
    for delta in deltas:
        for call in delta.get("tool_calls", []):
            if "id" in call:
                name = call["function"].get("name", "")
                calls.append(
                    {"id": call["id"], "type": "function", "function": {"name": name, "arguments": ""}}
                )
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return (content or None) if calls else content, calls
