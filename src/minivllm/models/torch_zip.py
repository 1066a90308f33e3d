"""torch.save's files, read without torch and without running anything that they say.

A zip of uncompressed members: ``NAME/data.pkl`` describes the object, and storages lie in ``NAME/data/KEY``.
The pickle is read as data (``pickle_data``); tensors are only located, so an optimizer's state costs nothing.
Layout: pytorch's torch/serialization.py (``_save``) and torch/_utils.py (``_rebuild_tensor_v2``).
Knows nothing of models.
"""

import struct
import zipfile
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from minivllm.errors import ModelError, shown
from minivllm.models.pickle_data import MAX_BYTES, read_pickle
from minivllm.models.weights import StoredTensor, TensorDtype, map_file

_LOCAL_HEADER = 30  # bytes before the name; APPNOTE.TXT 4.3.7


@dataclass(frozen=True)
class _StorageType:
    name: str


@dataclass(frozen=True)
class _Storage:
    kind: _StorageType
    key: str  # of the member data/KEY
    num_elements: int


@dataclass(frozen=True)
class TorchTensor:
    """A tensor as the pickle describes it: not checked against its storage before ``TorchFile.stored``."""

    storage: _Storage
    offset: int  #: elements of the storage before the first one
    shape: tuple[int, ...]
    strides: tuple[int, ...]  #: elements


#: Storage classes of weights → ours, and numpy's for the stored bytes
_DTYPES: dict[str, tuple[TensorDtype, str]] = {
    "FloatStorage": ("float32", "<f4"),
    "HalfStorage": ("float16", "<f2"),
    "BFloat16Storage": ("bfloat16", "<u2"),
}
#: Classes that may be named (optimizers, masks), but not be weights
_OTHER_STORAGES = (
    "DoubleStorage", "LongStorage", "IntStorage", "ShortStorage", "CharStorage", "ByteStorage", "BoolStorage",
)  # fmt: skip


def _is_size(number: Any) -> bool:
    return type(number) is int and 0 <= number < 2**63


def _rebuild_tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, requires_grad: Any, hooks: Any, metadata: Any = None
) -> TorchTensor:
    sizes_ok = type(shape) is tuple and type(strides) is tuple and len(shape) == len(strides) <= 8
    if not sizes_ok or type(storage) is not _Storage:
        raise ValueError("a tensor is malformed")
    if not all(_is_size(number) for number in (offset, *shape, *strides)):
        raise ValueError("a tensor has a size, stride or offset that is not a whole number of 63 bits")
    return TorchTensor(storage, offset, shape, strides)


def _rebuild_parameter(data: Any, requires_grad: Any, hooks: Any) -> TorchTensor:
    if type(data) is not TorchTensor:
        raise ValueError("a parameter is malformed")
    return data


def _empty_dict() -> dict[Any, Any]:
    return {}


_NAMES: dict[str, Any] = {
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "collections.OrderedDict": _empty_dict,
    **{f"torch.{name}": _StorageType(name) for name in (*_DTYPES, *_OTHER_STORAGES)},
}


def _persistent(value: Any) -> _Storage:
    """("storage", class, key, device, number of elements) → the storage."""
    if type(value) is not tuple or len(value) != 5:
        raise ValueError("a persistent id is malformed")
    tag, kind, key, _, num_elements = value
    well_typed = type(tag) is type(key) is str and type(kind) is _StorageType
    if not well_typed or tag != "storage" or not _is_size(num_elements):
        raise ValueError("a persistent id is malformed")
    return _Storage(kind, key, num_elements)


class TorchFile:
    """An opened file of torch.save.

    Raises:
        ModelError: it is damaged, compressed, big-endian, of torch before 1.6, or not plain data.
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._raw = map_file(path)
        if self._raw[:4].tobytes() != b"PK\3\4":
            raise ModelError(
                f"{path} is not a zip file as torch.save writes since 1.6; if it is older, load and save it "
                "with a newer torch"
            )
        try:
            with zipfile.ZipFile(path) as archive:
                self._members = {info.filename: info for info in archive.infolist()}
        except (
            zipfile.BadZipFile,
            NotImplementedError,
            ValueError,
            struct.error,
            EOFError,
            OverflowError,
        ) as e:
            raise ModelError(f"{path} is a damaged zip file: {e}") from e
        pickles = [name for name in self._members if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise ModelError(f"{path} holds {len(pickles)} data.pkl, not one: it is not a file of torch.save")
        self._prefix = pickles[0].removesuffix("data.pkl")
        byte_order = self._members.get(f"{self._prefix}byteorder")
        if byte_order is not None and self._bytes(byte_order.filename)[:6].tobytes() != b"little":
            raise ModelError(f"{path} was saved on a big-endian machine, which is not implemented")
        described = self._bytes(pickles[0])
        if described.size > MAX_BYTES:
            raise ModelError(f"{path}: data.pkl has {described.size} bytes; at most {MAX_BYTES} are read")
        #: What was saved: containers, numbers and strings, with a TorchTensor for each tensor
        self.value = read_pickle(described.tobytes(), str(path), _NAMES, _persistent)

    def stored(self, name: str, tensor: TorchTensor) -> StoredTensor:
        """Locate a tensor; ``name`` is for errors.

        Raises:
            ModelError: it does not lie within its storage, or is of a type that weights cannot have.
        """
        storage = tensor.storage
        if storage.kind.name not in _DTYPES:
            raise ModelError(
                f"{self._path}: {name} is in a {storage.kind.name}; weights of float32, float16 and "
                "bfloat16 are implemented"
            )
        dtype, numpy_dtype = _DTYPES[storage.kind.name]
        raw = self._bytes(f"{self._prefix}data/{storage.key}")
        if raw.size != storage.num_elements * np.dtype(numpy_dtype).itemsize:
            raise ModelError(
                f"{self._path}: the storage of {name} has {raw.size} bytes, which is not "
                f"{storage.num_elements} elements"
            )
        steps = zip(tensor.shape, tensor.strides, strict=True)
        last = tensor.offset + sum((size - 1) * stride for size, stride in steps)
        if 0 in tensor.shape or last >= storage.num_elements or prod(tensor.shape) > storage.num_elements:
            raise ModelError(
                f"{self._path}: {name} of shape {list(tensor.shape)} with strides {list(tensor.strides)} "
                f"does not lie within its storage of {storage.num_elements} elements"
            )

        def read() -> npt.NDArray[Any]:
            elements = raw.view(numpy_dtype)
            strides = [stride * elements.itemsize for stride in tensor.strides]
            return as_strided(elements[tensor.offset :], tensor.shape, strides, writeable=False)

        return StoredTensor(tensor.shape, dtype, read, mapped=raw)

    def _bytes(self, member: str) -> npt.NDArray[np.uint8]:
        """The mapped bytes of a member, which must be stored as they are."""
        info = self._members.get(member)
        if info is None:
            raise ModelError(f"{self._path}: the member {shown(member)} is missing; the file is damaged")
        if (
            info.compress_type != zipfile.ZIP_STORED
            or info.flag_bits & 1
            or info.file_size != info.compress_size
        ):
            raise ModelError(
                f"{self._path}: {shown(member)} is compressed or encrypted; torch.save does neither"
            )
        header = self._raw[info.header_offset : info.header_offset + _LOCAL_HEADER].tobytes()
        if len(header) < _LOCAL_HEADER or header[:4] != b"PK\3\4":
            raise ModelError(
                f"{self._path}: {shown(member)} is not where the zip directory says; it is damaged"
            )
        name_length, extra_length = struct.unpack_from("<HH", header, 26)
        begin = info.header_offset + _LOCAL_HEADER + name_length + extra_length
        if begin + info.file_size > self._raw.size:
            raise ModelError(
                f"{self._path}: {shown(member)} goes beyond the end of the file; it is truncated"
            )
        return self._raw[begin : begin + info.file_size]
