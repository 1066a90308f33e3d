"""Where chat templates are rendered: they come with a model, and are not trusted.

A template runs in jinja2's immutable sandbox, cannot reach Python's internals, and is stopped when it loops
for too long, when a value is too large, or when all that it has made is. What an operation would make is
estimated before, where that may be out of all proportion to what it is given.

What it may use is what transformers offers templates: the functions raise_exception and strftime_now, tojson
without escapes for HTML, break and continue, generation blocks.

Knows nothing of messages.
"""

import json
import re
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any

import jinja2
import jinja2.utils
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from minivllm.errors import shown

MAX_RENDERED_LENGTH = 2**24  #: characters of the whole text, and of any text made on the way
MAX_ENTRIES = 100_000  #: of any list or dict, and as jinja2 has it of any range
MAX_TOTAL = 2**28  #: characters and entries of all values made
MAX_RENDER_SECONDS = 3.0  #: of CPU time
_MAX_POWER_BITS = 4096

_WIDE = re.compile(r"\d{6}|\*")  # a width in a format, or one that is among the arguments


@dataclass
class _Budget:
    """What the rendering under way has left."""

    deadline: float  # as time.thread_time()
    size: int = MAX_TOTAL  # characters and entries


_budget: ContextVar[_Budget] = ContextVar("_budget")


class TemplateError(Exception):
    """A template is malformed, fails, refuses its variables, or exceeds a limit."""


def render_template(template: str, variables: Mapping[str, Any]) -> str:
    """The text that a jinja2 template makes of ``variables``, which must be plain JSON data: their methods,
    too, are within the template's reach.

    Raises:
        TemplateError: it makes none.
    """
    token = _budget.set(_Budget(time.thread_time() + MAX_RENDER_SECONDS))
    try:
        pieces, length = [], 0
        for piece in _compiled(template).generate(variables):
            length += len(piece)
            if length > MAX_RENDERED_LENGTH:
                raise _LimitError(f"its text has more than {MAX_RENDERED_LENGTH} characters")
            pieces.append(piece)
        return "".join(pieces)
    except Exception as error:  # a template may fail in any way
        raise TemplateError(str(error)[:500] or type(error).__name__) from None
    finally:
        _budget.reset(token)


class _LimitError(jinja2.TemplateRuntimeError):
    """The template exceeds a limit."""


def _tick() -> str:
    """Called in each turn of a loop and each call of a macro."""
    if time.thread_time() > _budget.get().deadline:
        raise _LimitError(f"it runs for more than {MAX_RENDER_SECONDS:g} seconds")
    return ""


def _bounded(value: Any) -> Any:
    """``value``, which has just been made, if it is not too large to go on with."""
    if isinstance(value, _SIZED):
        _check_length(len(value), value)
        budget = _budget.get()
        budget.size -= len(value)
        if budget.size < 0:
            raise _LimitError(f"its values have more than {MAX_TOTAL} characters and entries together")
    return value


_SIZED = (str, bytes, list, tuple, dict)


def _check_length(length: int, kind: Any) -> None:
    """Refuse a length that a value of the kind of ``kind`` may not have."""
    if isinstance(kind, str | bytes):
        if length > MAX_RENDERED_LENGTH:
            raise _LimitError(f"it makes a text of more than {MAX_RENDERED_LENGTH} characters")
    elif length > MAX_ENTRIES:
        raise _LimitError(f"it makes a list of more than {MAX_ENTRIES} entries")


def _weight(value: Any) -> int:
    """Characters and entries of a value and all within it; a number as an argument counts as itself."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return abs(int(value))
    if isinstance(value, list | tuple | dict):
        _tick()
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        return len(value) + sum(_weight(part) for part in parts if not isinstance(part, int))
    return MAX_ENTRIES if hasattr(value, "__next__") else 1


def _check_work(name: str, subject: Any, arguments: list[Any]) -> None:
    """Refuse an operation that would make, or go through, more than MAX_TOTAL characters and entries."""
    most = max(map(_weight, arguments), default=0)
    if name == "replace" and len(arguments) > 1:
        old, new = str(arguments[0]), str(arguments[1])
        size = str(subject).count(old) * len(new)
    elif name in ("format", "%"):
        text = str(subject)
        if _WIDE.search(text):
            raise _LimitError("it has a format with a width of more than 99999 characters, or a variable one")
        size = (text.count("%") + text.count("{")) * most
    elif name in _MULTIPLYING:
        size = max(_weight(subject), 1) * max(most, 1)
    elif name == "sum" and any(
        isinstance(argument, _SIZED) and not isinstance(argument, str) for argument in arguments
    ):
        raise _LimitError("it sums up lists")
    else:
        size = _weight(subject) if name in _THOROUGH else 0
    if size > MAX_TOTAL:
        raise _LimitError(f"{name} would work on more than {MAX_TOTAL} characters and entries")


#: Operations whose results grow with one argument times another
_MULTIPLYING = {"join", "indent", "wordwrap", "expandtabs", "translate", "tojson"}
#: Filters that go through all that is within a value
_THOROUGH = {"sort", "min", "max", "unique", "groupby", "string", "pprint", "dictsort"}


class _Templates(Extension):
    """``{% generation %}`` blocks, which only mark the assistant's text; and the functions for ``_Guard``."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    tick = staticmethod(_tick)

    @staticmethod
    def concatenate(*values: Any) -> str:
        for value in values:
            _check_work("string", value, [])
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
                if hasattr(text, "__len__") and isinstance(count, int):
                    _check_length(len(text) * count, text)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):  # noqa: SIM102
            if left.bit_length() * right > _MAX_POWER_BITS:
                raise _LimitError(f"it makes a number of more than {_MAX_POWER_BITS} bits")
        if operator == "%" and isinstance(left, str):
            _check_work("%", left, [right])
        return _bounded(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(function, "__wrapped__", function)  # jinja2 wraps str.format
        subject = getattr(method, "__self__", None)
        if isinstance(subject, str):
            _check_widths(*args, **kwargs)
            _check_work(method.__name__, subject, [*args, *kwargs.values()])
        return _bounded(super().call(context, function, *args, **kwargs))


def _check_widths(*args: Any, **kwargs: Any) -> None:
    """Refuse widths for padding and indentation that no text could have."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and value > MAX_RENDERED_LENGTH:
            raise _LimitError(f"it pads a text to more than {MAX_RENDERED_LENGTH} characters")


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # jinja2 marks its filters with attributes, which this copies
    def bounded(*args: Any, **kwargs: Any) -> Any:
        subject, *others = [argument for argument in args if not isinstance(argument, _CONTEXTS)]
        _check_widths(*others, **kwargs)
        _check_work(name, subject, [*others, *kwargs.values()])
        return _bounded(function(*args, **kwargs))

    return bounded


_CONTEXTS = (jinja2.Environment, jinja2.runtime.Context, jinja2.nodes.EvalContext)


def _printable(value: Any) -> Any:
    """``value``, if its text would not be too large."""
    _check_work("string", value, [])
    return value


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


class _Namespace(jinja2.utils.Namespace):
    """jinja2's, without names that Python or jinja2 could take for their own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            _Namespace.__setitem__(self, name, value)  # a namespace finds its entries only, not its methods

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot have an entry {shown(name)}")
        super().__setitem__(name, value)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """A function, so that templates do not get at the type and its methods."""
    return dict(*args, **kwargs)


@lru_cache(maxsize=1)
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Templates, loopcontrols], finalize=_printable
    )
    del environment.globals["lipsum"]
    environment.filters["tojson"] = _tojson
    filters = environment.filters.items()
    environment.filters = {name: _bounded_filter(name, function) for name, function in filters}
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": _Namespace,
        "dict": _dict,
    }
    return environment


@lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    environment = _environment()
    return environment.from_string(_Guard().visit(environment.parse(template)))
