"""StructuredOutputsParams: the form that an answer must have. Knows nothing of tokens.

What the form's own language allows is found out when it is compiled: see ``minivllm.text.grammar``.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minivllm.errors import RequestError, shown

#: Characters of a schema (as JSON), of an expression, of a grammar, or of all choices together
MAX_GRAMMAR_LENGTH = 2**16

_FORMS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form of an answer, which it has from its first token to its last, with vLLM's names. One of:

    Raises:
        RequestError: none or several of them are given, or one is malformed or too large.
    """

    json: str | Mapping[str, Any] | bool | None = None
    """A JSON schema that the answer, a JSON text, is valid under; kept as JSON text."""
    regex: str | None = None  #: a regular expression (Rust's syntax) that matches the whole answer
    choice: tuple[str, ...] | list[str] | None = None  #: the answer is one of these; kept as a tuple
    grammar: str | None = None
    """A context-free grammar, in Lark's notation as llguidance has it (the answer is its ``start``), or GBNF
    (``root``)."""
    json_object: bool | None = None  #: True: the answer is any JSON object

    def __post_init__(self) -> None:
        given = [name for name in _FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            said = " and ".join(given) or "none"
            raise RequestError(
                f"structured_outputs needs exactly one of {', '.join(_FORMS)}, not {said}",
                "structured_outputs",
            )
        (name,) = given
        value = getattr(self, name)
        if name == "json":
            value = _schema(value)
        elif name == "choice":
            value = _choices(value)
        elif name == "json_object":
            if value is not True:
                raise RequestError(
                    f"json_object is {shown(value)}; it must be true, or left out", "structured_outputs"
                )
        elif not isinstance(value, str) or not value:
            raise RequestError(
                f"{name} is {shown(value)}; it must be a string, and not empty", "structured_outputs"
            )
        size = sum(map(len, value)) if isinstance(value, tuple) else 0 if value is True else len(value)
        if size > MAX_GRAMMAR_LENGTH:
            raise RequestError(
                f"{name} has {size:,} characters; at most {MAX_GRAMMAR_LENGTH:,} are allowed",
                "structured_outputs",
            )
        for text in value if isinstance(value, tuple) else [] if value is True else [value]:
            try:
                text.encode()
            except UnicodeEncodeError:
                raise RequestError(
                    f"{name} is no text: it has a lone surrogate", "structured_outputs"
                ) from None
        object.__setattr__(self, name, value)


def _schema(value: object) -> str:
    """The schema as JSON text."""
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"json is no JSON schema: {str(error)[:200]}", "structured_outputs") from None
    if not isinstance(schema, Mapping | bool):
        raise RequestError(
            f"json is {shown(schema)}; a JSON schema is an object, true or false", "structured_outputs"
        )
    return text


def _choices(value: object) -> tuple[str, ...]:
    choices = list(value) if isinstance(value, list | tuple) else []
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise RequestError(
            f"choice is {shown(value)}; it must be a list of strings, none of them empty",
            "structured_outputs",
        )
    return tuple(dict.fromkeys(choices))
