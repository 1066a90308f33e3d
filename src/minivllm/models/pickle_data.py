"""Pickles read as data: an interpreter of the opcodes that plain containers need, and of nothing else.

``pickle.Unpickler``, even with ``find_class`` restricted, sets attributes and calls methods of what the file
names. Here every opcode is spelled out and acts on new dicts, lists and tuples alone: what is not below is
refused, by name, so nothing that a file says can run. Opcodes: Python's Lib/pickletools.py.

Knows nothing of tensors: the names that a caller allows, and what they make, are the caller's.
"""

import pickletools
from collections.abc import Callable, Mapping
from typing import Any

from minivllm.errors import ModelError, shown

#: GPT-2 XL's, optimizer included, has 0.3 MB. In memory, objects of one byte take some 64 times that.
MAX_BYTES = 2_000_000

#: What a name stands for: a function of the arguments, or (for names that are never called) a value
Globals = Mapping[str, Any]

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT",
    "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
}  # fmt: skip
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_NO_EFFECT = {"PROTO", "FRAME"}


def read_pickle(
    data: bytes, what: str, names: Globals, persistent: Callable[[Any], Any] | None = None
) -> Any:
    """The object that a pickle of plain containers describes.

    Args:
        data: the pickle, protocol 2 or later.
        what: names it in errors.
        names: "module.name" → what it stands for. A function among them may be called with a tuple's elements
            and must check them; it raises ValueError for wrong ones.
        persistent: makes the object that a persistent id stands for; same rules.

    Returns:
        None, bool, int, float, str, tuple, list, dict (OrderedDict too, where ``names`` has it as a dict), or
        whatever ``names`` and ``persistent`` made.

    Raises:
        ModelError: it is too large, damaged, or uses a name or opcode that is not allowed.
    """
    if len(data) > MAX_BYTES:
        raise ModelError(f"{what} is a pickle of {len(data)} bytes; at most {MAX_BYTES} are read")
    try:
        return _Interpreter(names, persistent).run(data)
    except _Refused as error:
        raise ModelError(f"{what} is not plain data: {error}; nothing of it was run") from error
    except (ValueError, TypeError, IndexError, KeyError, OverflowError) as error:
        raise ModelError(f"{what} is a damaged pickle: {shown(str(error))}") from error


class _Refused(Exception):
    """The pickle asks for something that is not data."""


class _Interpreter:
    """The stack, marks and memo of one pickle."""

    def __init__(self, names: Globals, persistent: Callable[[Any], Any] | None) -> None:
        self._names = names
        self._functions = [value for value in names.values() if callable(value)]
        self._persistent = persistent
        self._stack: list[Any] = []
        self._marks: list[int] = []  # heights of the stack
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                (result,) = self._stack
                return result
            self._step(opcode.name, argument)
        raise ValueError("it has no end")

    def _step(self, op: str, argument: Any) -> None:
        stack = self._stack
        if op in _NO_EFFECT:
            return
        if op in _CONSTANTS:
            stack.append(_CONSTANTS[op])
        elif op in _LITERALS:
            stack.append(argument)
        elif op == "MARK":
            self._marks.append(len(stack))
        elif op in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif op == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif op in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif op == "EMPTY_LIST":
            stack.append([])
        elif op == "EMPTY_DICT":
            stack.append({})
        elif op in _TUPLES:
            stack.append(tuple(self._pop(_TUPLES[op])))
        elif op == "TUPLE":
            stack.append(tuple(self._pop_to_mark()))
        elif op in ("APPEND", "APPENDS"):
            items = self._pop(1) if op == "APPEND" else self._pop_to_mark()
            self._top(list).extend(items)
        elif op in ("SETITEM", "SETITEMS"):
            items = self._pop(2) if op == "SETITEM" else self._pop_to_mark()
            self._set_items(self._top(dict), items)
        elif op == "GLOBAL":
            stack.append(self._named(argument.replace(" ", ".")))
        elif op == "STACK_GLOBAL":
            module, name = self._pop(2)
            stack.append(self._named(f"{module}.{name}" if type(module) is type(name) is str else "?"))
        elif op == "REDUCE":
            function, arguments = self._pop(2)
            if not any(function is known for known in self._functions) or type(arguments) is not tuple:
                raise _Refused("it calls something that may not be called")
            stack.append(function(*arguments))
        elif op == "BUILD":
            # State of an OrderedDict (a state dict's _metadata): dropped. Other objects here have none.
            self._pop(1)
            self._top(dict)
        elif op == "BINPERSID" and self._persistent is not None:
            stack.append(self._persistent(self._pop(1)[0]))
        else:
            raise _Refused(f"it uses the opcode {op}")

    def _pop(self, count: int) -> list[Any]:
        start = len(self._stack) - count
        if start < (self._marks[-1] if self._marks else 0):
            raise ValueError("an opcode finds too little on the stack")
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def _pop_to_mark(self) -> list[Any]:
        return self._pop(len(self._stack) - self._marks.pop())

    def _top(self, kind: type) -> Any:
        if type(self._stack[-1]) is not kind:
            raise _Refused(f"it fills something that is not a {kind.__name__}")
        return self._stack[-1]

    def _named(self, name: str) -> Any:
        if name not in self._names:
            raise _Refused(f"it names {shown(name)}")
        return self._names[name]

    def _set_items(self, target: dict[Any, Any], items: list[Any]) -> None:
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, int):
                # Also: hashing nested tuples recurses without a limit in C.
                raise _Refused(f"it has a {type(key).__name__} as a key")
            target[key] = value
