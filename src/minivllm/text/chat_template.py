"""render_chat: messages → the prompt text that a model's chat template makes of them.

The template comes with the model and is not trusted: it runs in jinja2's immutable sandbox, cannot reach
Python's internals, and is stopped when it runs too long or its text grows too large. It sees plain data only.
What it may use is what transformers offers templates (``apply_chat_template``).

Knows nothing of tokenizers; the rendered text spells out its special tokens, so it is encoded with
``add_special_tokens=False``.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from minivllm.errors import RequestError

MAX_RENDERED_LENGTH = 2**24  #: characters of a rendered chat, and of any text or list a template makes
MAX_RENDER_SECONDS = 3.0  #: of CPU time
_MAX_POWER_BITS = 4096

#: Names that belong to this module; ``template_kwargs`` cannot replace them.
_RESERVED = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}
#: Put at the end of the message to be continued, to find where it ends in the rendered text. The space tells
#: whether the template trims its messages.
_END_MARK = "\ue000end of the message to continue\ue000 "

_deadline: ContextVar[float] = ContextVar("_deadline")  #: of the rendering under way, as time.thread_time()


def render_chat(
    template: str | None,
    messages: object,
    *,
    bos_token: str = "",
    eos_token: str = "",
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: object = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Render ``messages`` with a model's chat ``template``.

    Args:
        template: jinja2 source, ``Tokenizer.chat_template``.
        messages: a list of mappings with "role" (a string) and "content": a string, or a list of parts
            ``{"type": "text", "text": …}``, which are joined by line breaks. "content" may be null or missing
            where there are "tool_calls". Other keys are passed on.
        add_generation_prompt: end with what begins the assistant's answer.
        continue_final_message: end within the last message, so that the model goes on with it; excludes
            ``add_generation_prompt``.
        tools: a list of JSON-schema descriptions of functions, as OpenAI has them, or None.
        template_kwargs: further variables of the template ("enable_thinking" …).

    Raises:
        RequestError: there is no template; messages or tools are malformed; the template refuses them, fails,
            or exceeds a limit.
    """
    if template is None:
        raise RequestError(
            "this model has no chat template, so it cannot take messages; give it a prompt instead",
            "messages",
        )
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other; set one of them to false",
            "continue_final_message",
        )
    chat = _checked_messages(messages)
    if continue_final_message:
        chat[-1]["content"] += _END_MARK
    variables = dict(_plain("chat_template_kwargs", {} if template_kwargs is None else template_kwargs))
    if wrong := _RESERVED & variables.keys():
        raise RequestError(
            f"chat_template_kwargs must not set {sorted(wrong)[0]!r}, which has a place of its own",
            "chat_template_kwargs",
        )
    variables |= {
        "messages": chat,
        "tools": _checked_tools(tools),
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos_token,
        "eos_token": eos_token,
    }
    text = _render(template, variables)
    return _cut_at_mark(text) if continue_final_message else text


def _render(template: str, variables: Mapping[str, Any]) -> str:
    token = _deadline.set(time.thread_time() + MAX_RENDER_SECONDS)
    try:
        pieces, length = [], 0
        for piece in _compiled(template).generate(variables):
            length += len(piece)
            if length > MAX_RENDERED_LENGTH:
                raise _LimitError(f"its text has more than {MAX_RENDERED_LENGTH} characters")
            pieces.append(piece)
        return "".join(pieces)
    except Exception as error:  # a template may fail in any way
        raise RequestError(
            f"the model's chat template does not take these messages: "
            f"{str(error)[:500] or type(error).__name__}",
            "messages",
        ) from None
    finally:
        _deadline.reset(token)


def _cut_at_mark(text: str) -> str:
    mark = _END_MARK.rstrip()
    end = text.rfind(mark)
    if end < 0:
        raise RequestError(
            "continue_final_message cannot be used: the model's chat template leaves out the last message",
            "continue_final_message",
        )
    # Where the template trims its messages, the message as the model sees it has no space at its end.
    return text[:end] if text[end : end + len(_END_MARK)] == _END_MARK else text[:end].rstrip()


# What may be passed to a template ------------------------------------------------------------------------


def _plain(param: str, value: object) -> Any:
    """A copy of ``value`` out of plain JSON types, which have no methods that a template could abuse."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        raise RequestError(f"{param} must be JSON data, not nested too deeply", param) from None


def _checked_messages(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise RequestError("messages must be a list of messages, and not empty", "messages")
    plain = _plain("messages", [dict(m) if isinstance(m, Mapping) else m for m in messages])
    return [_checked_message(index, message) for index, message in enumerate(plain)]


def _checked_message(index: int, message: object) -> dict[str, Any]:
    param = f"messages[{index}]"
    if not isinstance(message, dict):
        raise RequestError(f"{param} must be an object with role and content", param)
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise RequestError(
            f"{param} must have a role ('system', 'user', 'assistant' …), a string", f"{param}.role"
        )
    calls = message.get("tool_calls")
    if calls is None:
        message.pop("tool_calls", None)
    else:
        _parse_arguments(calls, param)
    content = message.get("content")
    if content is None and calls:
        content = ""
    if isinstance(content, list):
        content = "\n".join(_text_of(part, param) for part in content)
    if not isinstance(content, str):
        raise RequestError(f"{param} must have content, a string or a list of text parts", f"{param}.content")
    message["content"] = content
    return message


def _text_of(part: object, param: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise RequestError(
        f'{param}.content has a part of type {kind!r:.40}; only {{"type": "text", "text": …}} is taken',
        f"{param}.content",
    )


def _parse_arguments(calls: object, param: str) -> None:
    """Turn the arguments of tool calls, which OpenAI has as JSON text, into the objects templates expect."""
    param = f"{param}.tool_calls"
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(
                f'{param} must be a list of {{"function": {{"name": …, "arguments": …}}}}', param
            )
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError):
                raise RequestError(f"{param} has arguments that are not JSON", param) from None


def _checked_tools(tools: object) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    plain = _plain("tools", tools)
    if not isinstance(plain, list) or not all(isinstance(tool, dict) for tool in plain):
        raise RequestError("tools must be a list of objects that describe functions", "tools")
    return plain


# The environment of templates ----------------------------------------------------------------------------


class _LimitError(jinja2.TemplateRuntimeError):
    """The template exceeds a limit."""


def _tick() -> str:
    """Called in each turn of a loop and each call of a macro."""
    if time.thread_time() > _deadline.get():
        raise _LimitError(f"it runs for more than {MAX_RENDER_SECONDS:g} seconds")
    return ""


def _bounded(value: Any) -> Any:
    """``value``, if it is not too large to go on with: what grows by doubling is caught here."""
    if isinstance(value, str | bytes | list | tuple | dict) and len(value) > MAX_RENDERED_LENGTH:
        raise _LimitError(f"it makes a value of more than {MAX_RENDERED_LENGTH} characters or entries")
    return value


class _Templates(Extension):
    """``{% generation %}`` blocks, which only mark the assistant's text; and the functions for ``_Guard``."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    tick = staticmethod(_tick)

    @staticmethod
    def concatenate(*values: Any) -> str:
        return str(_bounded("".join(map(str, values))))


class _Guard(NodeTransformer):
    """Puts a ``tick`` into each loop and macro, and a bound on each concatenation (``~``)."""

    def _ticking(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body = [nodes.ExprStmt(_call("tick", []), lineno=node.lineno), *node.body]
        return node  # type: ignore[no-any-return]

    visit_For = visit_Macro = visit_CallBlock = _ticking

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concatenate", node.nodes).set_lineno(node.lineno)


def _call(name: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.ExtensionAttribute(_Templates.identifier, name), arguments, [], None, None)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with bounds on what one operation may make."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for text, count in ((left, right), (right, left)):
                if (
                    hasattr(text, "__len__")
                    and isinstance(count, int)
                    and len(text) * count > MAX_RENDERED_LENGTH
                ):
                    raise _LimitError(
                        f"it makes a value of more than {MAX_RENDERED_LENGTH} characters or entries"
                    )
        if operator == "**" and isinstance(left, int) and isinstance(right, int):  # noqa: SIM102
            if left.bit_length() * right > _MAX_POWER_BITS:
                raise _LimitError(f"it makes a number of more than {_MAX_POWER_BITS} bits")
        return _bounded(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        return _bounded(super().call(context, function, *args, **kwargs))


def _bounded_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # jinja2 marks its filters with attributes, which this copies
    def bounded(*args: Any, **kwargs: Any) -> Any:
        return _bounded(function(*args, **kwargs))

    return bounded


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter of this name would escape for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


@lru_cache(maxsize=1)
def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Templates, loopcontrols])
    del environment.globals["lipsum"]
    environment.filters["tojson"] = _tojson
    environment.filters = {name: _bounded_filter(function) for name, function in environment.filters.items()}
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


@lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    environment = _environment()
    return environment.from_string(_Guard().visit(environment.parse(template)))
