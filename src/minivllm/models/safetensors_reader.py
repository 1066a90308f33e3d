"""The safetensors container, read with every offset checked before it is believed.

Format: github.com/huggingface/safetensors, README:  header length u64 | JSON header | data. Read here and not
by the package, so that bfloat16 comes as its bit patterns and every tensor stays a view of the mapped file.
Knows nothing of models.
"""

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from minivllm.errors import ModelError, shown
from minivllm.models.json_file import parse_json
from minivllm.models.weights import StoredTensor, TensorDtype, map_file

_MAX_HEADER = 100_000_000  # bytes, as in the format's reference implementation

#: Type in the header → ours, and numpy's for the stored bytes
_DTYPES: dict[str, tuple[TensorDtype, str]] = {
    "F32": ("float32", "<f4"),
    "F16": ("float16", "<f2"),
    "BF16": ("bfloat16", "<u2"),
}
#: Masks of older checkpoints: checked like the others, but not offered as weights
_MASK_DTYPES = ("BOOL", "U8")


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Locate the tensors of a safetensors file; masks (of type BOOL or U8) are left out.

    Raises:
        ModelError: the file is truncated or malformed.
        OSError: it cannot be opened.
    """
    raw = map_file(path)
    length = int.from_bytes(raw[:8].tobytes(), "little")
    if raw.size < 8 or length > min(raw.size - 8, _MAX_HEADER):
        raise ModelError(
            f"{path} claims a header of {length} bytes, but has {raw.size} bytes in all; "
            "it is truncated, or not a safetensors file"
        )
    header = parse_json(raw[8 : 8 + length].tobytes(), f"the header of {path}")
    header.pop("__metadata__", None)
    data = raw[8 + length :]

    entries = sorted(((*_range(path, name, entry), name) for name, entry in header.items()))
    position = 0
    tensors: dict[str, StoredTensor] = {}
    for begin, end, name in entries:
        if begin != position:
            raise ModelError(
                f"{path}: tensor {shown(name)} begins at {begin}, not at {position}; damaged header"
            )
        position = end
        if header[name]["dtype"] not in _MASK_DTYPES:
            tensors[name] = _stored(header[name], data[begin:end])
    if position != data.size:
        raise ModelError(
            f"{path}: its tensors take {position} bytes, but it has {data.size} bytes of data; "
            "it is truncated or damaged"
        )
    return tensors


def _range(path: Path, name: str, entry: Any) -> tuple[int, int]:
    """Begin and end of a tensor in the data; its shape and type are checked against them."""
    try:
        kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        well_formed = type(kind) is str and type(shape) is list and len(shape) <= 8
        well_formed = well_formed and all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        well_formed = False
    if not well_formed:
        raise ModelError(f"{path}: the header's entry for {shown(name)} is malformed: {shown(entry)}")
    if kind not in _DTYPES and kind not in _MASK_DTYPES:
        raise ModelError(
            f"{path}: tensor {shown(name)} has type {shown(kind)}, which is not implemented; "
            f"{', '.join(_DTYPES)} are"
        )
    item_bytes = np.dtype(_DTYPES[kind][1]).itemsize if kind in _DTYPES else 1
    if end - begin != prod(shape) * item_bytes:
        raise ModelError(
            f"{path}: tensor {shown(name)} of shape {shown(shape)} and type {kind} is said to take "
            f"{end - begin} bytes; the header is damaged"
        )
    return begin, end


def _stored(entry: dict[str, Any], raw: npt.NDArray[np.uint8]) -> StoredTensor:
    shape = tuple(entry["shape"])
    dtype, numpy_dtype = _DTYPES[entry["dtype"]]
    return StoredTensor(shape, dtype, lambda: raw.view(numpy_dtype).reshape(shape), mapped=raw)
