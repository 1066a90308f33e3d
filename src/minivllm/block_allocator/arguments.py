"""What the reference twin accepts as numbers, lists and names, and how it refuses the rest.

The extension's bindings (csrc/bindings/block_allocator.cpp) do the same in the same words.
"""

from collections.abc import Iterable
from operator import index
from typing import Any

from minivllm.errors import BlockError


def to_integer(value: Any, what: str) -> int:
    """``value`` as an int: an int, or what converts to one without loss (numpy's integers), except bool."""
    if not isinstance(value, bool):
        try:
            return index(value)
        except TypeError:
            pass
    raise BlockError(f"{what} must be an integer{_not_what(value)}")


def to_list(values: Iterable[int], what: str) -> list[int]:
    """The items of any iterable, unchecked."""
    try:
        items = iter(values)
    except TypeError:
        raise BlockError(f"{what} must be a list of integers{_not_what(values)}") from None
    return list(items)


def to_tokens(values: Iterable[int]) -> list[int]:
    """Token ids, each checked unless an int32 buffer holds them."""
    try:
        with memoryview(values) as view:  # type: ignore[arg-type]  # whatever has none is a TypeError
            if view.format == "i" and view.ndim == 1:
                return view.tolist()
    except (TypeError, ValueError, BufferError):
        pass
    return [_to_token(value) for value in to_list(values, "token ids")]


def _to_token(value: int) -> int:
    token = to_integer(value, "a token id")
    if not -(2**31) <= token < 2**31:
        raise BlockError(f"token id {shown(token)} does not fit an int32")
    return token


def to_namespace(value: bytes) -> bytes:
    """``value``, if it is bytes."""
    if not isinstance(value, bytes):
        raise BlockError(f"a namespace must be bytes{_not_what(value)}")
    return value


def _not_what(value: object) -> str:
    return f", not {shown(value)} ({type(value).__name__})"


def shown(value: object) -> str:
    """``ascii(value)``, cut after 80 characters. (Numbers of thousands of digits cannot be printed.)"""
    try:
        text = ascii(value)
    except Exception:
        return "an unprintable value"
    return text if len(text) <= 80 else text[:80] + "..."
