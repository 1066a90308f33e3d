"""The GGUF container, read with every count and offset checked before it is believed.

Format: github.com/ggml-org/ggml, docs/gguf.md (versions 2 and 3, little-endian):

    magic | version u32 | tensor count u64 | metadata count u64 | metadata … | tensor infos … | pad | data

Knows nothing of models: metadata keys and tensor names mean nothing here.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from minivllm.errors import ModelError, shown
from minivllm.models.quants import BLOCKS
from minivllm.models.weights import StoredTensor, TensorDtype, map_file

MAGIC = b"GGUF"
_MAX_ARRAY = 2**24  # elements of one metadata array; vocabularies have up to a few 100,000
_MAX_DIMS = 4
_MIN_TENSOR_INFO = 8 + 4 + 8 + 4 + 8  # bytes: empty name, one dimension
_MIN_METADATA = 8 + 4 + 1

#: Metadata value type → struct code, for the types of fixed size
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

#: Tensor type → (name, weights in a block, bytes of a block); block 1 is unquantised
_TENSOR_TYPES: dict[int, tuple[TensorDtype, int, int]] = {
    0: ("float32", 1, 4),
    1: ("float16", 1, 2),
    30: ("bfloat16", 1, 2),
    2: ("q4_0", *BLOCKS["q4_0"]),
    3: ("q4_1", *BLOCKS["q4_1"]),
    6: ("q5_0", *BLOCKS["q5_0"]),
    7: ("q5_1", *BLOCKS["q5_1"]),
    8: ("q8_0", *BLOCKS["q8_0"]),
    10: ("q2_k", *BLOCKS["q2_k"]),
    11: ("q3_k", *BLOCKS["q3_k"]),
    12: ("q4_k", *BLOCKS["q4_k"]),
    13: ("q5_k", *BLOCKS["q5_k"]),
    14: ("q6_k", *BLOCKS["q6_k"]),
    20: ("iq4_nl", *BLOCKS["iq4_nl"]),
    23: ("iq4_xs", *BLOCKS["iq4_xs"]),
}
_NUMPY = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}

#: Names of the tensor types that are refused, for the message
_OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True)
class GGUFFile:
    """A checked GGUF file: metadata read, tensors only located."""

    path: Path
    metadata: dict[str, Any]  #: str, int, float, bool, or a list of one of these
    tensors: dict[str, StoredTensor]  #: shapes outermost first (ggml's order reversed)
    all_float32: bool  #: no tensor is stored in fewer bits


def read_gguf(path: Path) -> GGUFFile:
    """Read and check the header of a GGUF file.

    Raises:
        ModelError: the file is truncated, malformed, of another version, or has a tensor type that is not
            implemented.
        OSError: it cannot be opened.
    """
    raw = map_file(path)
    cursor = _Cursor(path, raw)
    if cursor.take(4).tobytes() != MAGIC:
        raise ModelError(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
    version = cursor.scalar("I")
    if version not in (2, 3):
        hint = "it seems to be big-endian" if version & 0xFFFF == 0 else "versions 2 and 3 are implemented"
        raise ModelError(f"{path}: GGUF version {version} cannot be read; {hint}")
    num_tensors = cursor.count("tensors", _MIN_TENSOR_INFO)
    num_metadata = cursor.count("metadata entries", _MIN_METADATA)

    metadata: dict[str, Any] = {}
    for _ in range(num_metadata):
        key = cursor.string()
        if key in metadata:
            raise ModelError(f"{path}: metadata key {shown(key)} occurs twice")
        metadata[key] = cursor.value(cursor.scalar("I"))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
        raise ModelError(f"{path}: general.alignment is {shown(alignment)}; it must be a power of two")

    infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    for info in infos:
        if info.name in tensors:
            raise ModelError(f"{path}: tensor {shown(info.name)} occurs twice")
        begin = data_start + info.offset
        if info.offset % alignment or begin + info.num_bytes > raw.size:
            raise ModelError(
                f"{path}: tensor {shown(info.name)} is said to be {info.num_bytes} bytes at {begin} "
                f"(alignment {alignment}), but the file has {raw.size} bytes; it is truncated or damaged"
            )
        tensors[info.name] = _stored(raw[begin : begin + info.num_bytes], info)
    return GGUFFile(path, metadata, tensors, all(info.type_name == "float32" for info in infos))


class _Cursor:
    """Reads the header front to back; owner of the position. Every read is checked against the size."""

    def __init__(self, path: Path, raw: npt.NDArray[np.uint8]) -> None:
        self._path = path
        self._raw = raw
        self._view = raw.data
        self.position = 0

    def fail(self, what: str) -> ModelError:
        return ModelError(f"{self._path}: {what}; the file is truncated or damaged")

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        end = self.position + num_bytes
        if end > self._raw.size:
            raise self.fail(f"the header needs {num_bytes} bytes at {self.position}, beyond its end")
        taken = self._raw[self.position : end]
        self.position = end
        return taken

    def scalar(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        start = self.position
        if start + size > self._raw.size:
            raise self.fail(f"the header needs {size} bytes at {start}, beyond its end")
        self.position = start + size
        return struct.unpack_from("<" + code, self._view, start)[0]

    def count(self, what: str, min_bytes: int) -> int:
        number: int = self.scalar("Q")
        room = (self._raw.size - self.position) // min_bytes
        if number > room:
            raise self.fail(f"it claims {number} {what}, but has room for at most {room}")
        return number

    def string(self) -> str:
        length = self.scalar("Q")
        start = self.position
        if length > self._raw.size - start:
            raise self.fail(f"a string of {length} bytes at {start} goes beyond its end")
        self.position = start + length
        try:
            return str(self._view[start : start + length], "utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"the string at {start} is not UTF-8") from error

    def _strings(self, count: int) -> list[str]:
        """``count`` strings: what ``string`` does, without its calls, as vocabularies have 100,000s."""
        view, size, position = self._view, self._raw.size, self.position
        length_at = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            start = position + 8
            if start > size or (end := start + length_at(view, position)[0]) > size:
                break
            try:
                strings.append(str(view[start:end], "utf-8"))
            except UnicodeDecodeError:
                break
            position = end
        self.position = position
        # The first that is not well-formed stopped the loop, and gets its message here.
        return strings + [self.string() for _ in range(count - len(strings))]

    def value(self, value_type: int) -> Any:
        if value_type in _SCALARS:
            return self.scalar(_SCALARS[value_type])
        if value_type == _STRING:
            return self.string()
        if value_type != _ARRAY:
            raise self.fail(f"unknown metadata type {value_type} before byte {self.position}")
        item_type = self.scalar("I")
        if item_type != _STRING and item_type not in _SCALARS:
            raise self.fail(f"unknown type {item_type} of array elements before byte {self.position}")
        item_bytes = 8 if item_type == _STRING else struct.calcsize("<" + _SCALARS[item_type])
        length = self.count("array elements", item_bytes)
        if length > _MAX_ARRAY:
            raise ModelError(
                f"{self._path}: a metadata array has {length} elements; the limit is {_MAX_ARRAY}"
            )
        if item_type == _STRING:
            return self._strings(length)
        return self.take(length * item_bytes).view(np.dtype("<" + _SCALARS[item_type])).tolist()


@dataclass(frozen=True)
class _TensorInfo:
    name: str
    type_name: TensorDtype
    shape: tuple[int, ...]  # outermost first
    row_bytes: int
    num_bytes: int
    offset: int  # from the start of the data


def _tensor_info(cursor: _Cursor) -> _TensorInfo:
    name = cursor.string()
    num_dims = cursor.scalar("I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.fail(f"tensor {shown(name)} has {num_dims} dimensions, not 1 to {_MAX_DIMS}")
    dims = [cursor.scalar("Q") for _ in range(num_dims)]  # innermost first
    type_id, offset = cursor.scalar("I"), cursor.scalar("Q")
    if type_id not in _TENSOR_TYPES:
        known = ", ".join(type_name.upper() for type_name, _, _ in _TENSOR_TYPES.values())
        other = _OTHER_TYPES.get(type_id, f"number {type_id}")
        raise ModelError(f"tensor {shown(name)} has type {other}, which is not implemented; {known} are")
    type_name, block_weights, block_bytes = _TENSOR_TYPES[type_id]
    if min(dims) < 1 or dims[0] % block_weights or (block_weights > 1 and num_dims != 2):
        rows = f", whose rows are whole blocks of {block_weights}" if block_weights > 1 else ""
        raise cursor.fail(
            f"tensor {shown(name)} cannot have shape {dims[::-1]} with type {type_name.upper()}{rows}"
        )
    row_bytes = dims[0] // block_weights * block_bytes
    num_bytes = row_bytes
    for dim in dims[1:]:
        num_bytes *= dim
    return _TensorInfo(name, type_name, tuple(dims[::-1]), row_bytes, num_bytes, offset)


def _stored(raw: npt.NDArray[np.uint8], info: _TensorInfo) -> StoredTensor:
    """``raw``: the mapped bytes of this tensor alone."""
    if info.type_name in _NUMPY:
        numpy_dtype = np.dtype(_NUMPY[info.type_name])
        values = lambda: raw.view(numpy_dtype).reshape(info.shape)  # noqa: E731
        return StoredTensor(info.shape, info.type_name, values, mapped=raw)

    def rows() -> npt.NDArray[np.uint8]:
        return raw.reshape(info.shape[0], info.row_bytes)

    return StoredTensor(info.shape, info.type_name, rows, mapped=raw)
