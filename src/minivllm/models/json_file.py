"""JSON objects out of untrusted files, and typed access to their fields. Knows nothing of what they mean."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minivllm.errors import ModelError, shown

_MAX_BYTES = 200_000_000  # tokenizer.json files reach tens of megabytes
_MAX_DIGITS = 100  # of an integer
_REQUIRED = object()


def parse_json(text: bytes, what: str) -> dict[str, Any]:
    """The JSON object in ``text``; ``what`` names it in errors.

    Raises:
        ModelError: it is not JSON, not an object, or has a key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a key occurs twice")
        return result

    def integer(digits: str) -> int:
        if len(digits) > _MAX_DIGITS:  # Python's own limit is 4300, and it says so in other words
            raise ValueError(f"a number has {len(digits)} digits")
        return int(digits)

    try:
        value = json.loads(text, object_pairs_hook=unique, parse_int=integer)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{what} is not valid JSON: {error}") from error
    if type(value) is not dict:
        raise ModelError(f"{what} is {shown(value)}; it must be a JSON object")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ModelError: as ``parse_json``, or the file is too large to be meant.
        OSError: it cannot be read.
    """
    if path.stat().st_size > _MAX_BYTES:
        raise ModelError(f"{path} has {path.stat().st_size} bytes; at most {_MAX_BYTES} are read")
    return parse_json(path.read_bytes(), str(path))


class Fields:
    """Typed access to an object's fields. Null counts as absent; absent without a default is an error."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)

    def integer(self, name: str, default: Any = _REQUIRED) -> Any:
        """An int (not a bool) of 64 bits at most, or the default."""
        value = self._typed(name, (int,), "an integer", default)
        if type(value) is int and not -(2**63) <= value < 2**63:
            raise ModelError(f"{self.where}: {name} is {shown(value)}; it must fit 64 bits")
        return value

    def string(self, name: str, default: Any = _REQUIRED) -> Any:
        """A str, or the default."""
        return self._typed(name, (str,), "a string", default)

    def boolean(self, name: str, default: Any = _REQUIRED) -> Any:
        """A bool, or the default."""
        return self._typed(name, (bool,), "true or false", default)

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        """An int or a float, as a float; or the default."""
        value = self._typed(name, (int, float), "a number", default)
        try:
            return None if value is None else float(value)
        except OverflowError as error:
            raise ModelError(f"{self.where}: {name} is too large") from error

    def _typed(self, name: str, kinds: tuple[type, ...], expected: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is _REQUIRED:
                raise ModelError(f"{self.where}: {name} is missing")
            return default
        if type(value) not in kinds:
            raise ModelError(f"{self.where}: {name} is {shown(value)}; it must be {expected}")
        return value
