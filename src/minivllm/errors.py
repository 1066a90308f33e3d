"""Every error that mini-vllm raises on purpose. Each message says what was wrong and what would be right."""

import numbers
import reprlib
from contextlib import suppress


class MiniVLLMError(Exception):
    """Base of all errors raised on purpose; the command line prints them in one line, without a traceback."""


class ConfigError(MiniVLLMError, ValueError):
    """A setting of the engine has a value that cannot be used, or settings contradict each other."""


class RequestError(MiniVLLMError, ValueError):
    """One request is wrong; it is refused before any work is done and no other request is affected."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        #: Name of the offending field (``"temperature"``, ``"prompt"`` …), where there is one.
        self.param = param


class ContextLengthError(RequestError):
    """A prompt, with the answer that is asked for, is longer than ``max_model_len``."""


class ModelError(MiniVLLMError):
    """A checkpoint cannot be loaded: missing, truncated, malformed, or of a kind that is not implemented.

    Or it has been loaded, and what it computes are no numbers.
    """


class PrefixCacheError(MiniVLLMError):
    """A saved prefix cache cannot be written, or cannot be used: damaged, or of an engine unlike this one."""


class BlockError(MiniVLLMError):
    """The block allocator was misused (double free, unknown block id): always a bug of the caller."""


def shown(value: object) -> str:
    """The value as it appears in a message: one short line, whatever a caller or a file brings."""
    text = _Short().repr(value)
    return text if len(text) <= 120 else text[:120] + "…"


def counted(number: int, noun: str) -> str:
    """A count in words, as in "1 block" and "1,024 blocks"."""
    return f"{number:,} {noun}" + ("s" if number != 1 else "")


class _Short(reprlib.Repr):
    """``reprlib``'s, for numbers of any size, and without calling the ``repr`` of types it does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxstring = 80

    def repr_int(self, x: int, level: int) -> str:
        # str() of an int of more than 4300 digits is a ValueError, and below that a long line.
        return str(int(x)) if int(x).bit_length() <= 128 else f"a number of {int(x).bit_length()} bits"

    def repr_instance(self, x: object, level: int) -> str:
        if x is None or isinstance(x, bool):
            return repr(x)
        if isinstance(x, str):
            return self.repr_str(str.__str__(x), level)
        if isinstance(x, numbers.Integral):
            return self.repr_int(int(x), level)
        if isinstance(x, float | numbers.Real):
            with suppress(OverflowError):  # a fraction may be too large
                return repr(float(x))
        kind = type(x)
        name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
        return f"a {name}"
