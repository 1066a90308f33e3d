"""Where chat templates are rendered: they come with a model, and are not trusted.

A template runs in jinja2's immutable sandbox, cannot reach Python's internals, and is stopped when it loops
for too long or makes a text too large. (What remains to one made to harm is to take time or memory within one
step, by nesting lists or by absurd formats.) What it may use is what transformers offers templates: the
functions raise_exception and strftime_now, tojson without escapes for HTML, break and continue, generation
blocks.

Knows nothing of messages.
"""

import json
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
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

MAX_RENDERED_LENGTH = 2**24  #: characters of the whole text, and of any text or list made on the way
MAX_RENDER_SECONDS = 3.0  #: of CPU time
_MAX_POWER_BITS = 4096

_deadline: ContextVar[float] = ContextVar("_deadline")  #: of the rendering under way, as time.thread_time()


class TemplateError(Exception):
    """A template is malformed, fails, refuses its variables, or exceeds a limit."""


def render_template(template: str, variables: Mapping[str, Any]) -> str:
    """The text that a jinja2 template makes of ``variables``, which must be plain JSON data: their methods,
    too, are within the template's reach.

    Raises:
        TemplateError: it makes none.
    """
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
        raise TemplateError(str(error)[:500] or type(error).__name__) from None
    finally:
        _deadline.reset(token)


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
        if isinstance(getattr(function, "__self__", None), str):
            _check_widths(*args, **kwargs)
        return _bounded(super().call(context, function, *args, **kwargs))


def _check_widths(*args: Any, **kwargs: Any) -> None:
    """Refuse widths for padding and indentation that no text could have."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and value > MAX_RENDERED_LENGTH:
            raise _LimitError(f"it pads a text to more than {MAX_RENDERED_LENGTH} characters")


def _bounded_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # jinja2 marks its filters with attributes, which this copies
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_widths(*args[1:], **kwargs)  # all but what is filtered
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
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Templates, loopcontrols])
    del environment.globals["lipsum"]
    environment.filters["tojson"] = _tojson
    environment.filters = {name: _bounded_filter(function) for name, function in environment.filters.items()}
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
