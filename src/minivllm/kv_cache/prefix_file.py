"""The file of a saved prefix cache: published blocks, their tokens, and what they are blocks of.

A safetensors file (github.com/huggingface/safetensors, README), so that other tools can open it:

    u64 length | JSON header | parents    | token_ids       | blocks                | sha256
                               int32 [n]    int32 [n, size]   uint8 [n, bytes]        uint8 [32]

``parents`` says which of the blocks before it each one continues, -1: none; ``blocks`` has K and V of each,
[num_layers, num_kv_heads, 2, block_size, head_dim] as the pool stores them; ``sha256`` is of every byte
before it, the header's included. The header's metadata is the identity: what must be the same where the
blocks are used again. Written and read a few blocks at a time (the safetensors package writes only what is
whole in memory). Knows neither executors nor allocators.
"""

import hashlib
import json
import math
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from minivllm.batch import IntArray
from minivllm.errors import ModelError, PrefixCacheError, shown
from minivllm.models.json_file import parse_json

_FORMAT = {"format": "prefix cache of mini-vllm", "format version": "2"}
_MAX_HEADER = 1 << 16  # bytes; ours are a few hundred
_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class PrefixFile:
    """A saved prefix cache whose checksum and identity are right."""

    path: Path
    parents: IntArray  #: [n] each -1 or less than its own index
    token_ids: IntArray  #: [n, block_size]
    block_bytes: int
    stream: BinaryIO
    start: int  #: of the first block's bytes

    def read_blocks(self, indices: IntArray) -> npt.NDArray[np.uint8]:
        """K and V of these blocks: [len(indices), block_bytes].

        Raises:
            PrefixCacheError: somebody has cut the file meanwhile.
        """
        blocks = np.empty((len(indices), self.block_bytes), np.uint8)
        for block, index in zip(blocks, indices.tolist(), strict=True):
            self.stream.seek(self.start + index * self.block_bytes)
            block[:] = _read(self.stream, self.path, np.uint8, self.block_bytes)
        return blocks


def check_prefix_target(path: str | Path) -> Path:
    """Find out before the work whether a prefix cache can be saved there in the end. Leaves nothing behind.

    Returns: the file that will be written: where ``path`` leads, if it is a link.

    Raises:
        PrefixCacheError: something else than a saved prefix cache is there (an empty file is nothing), or the
            system does not let us write.
    """
    target = Path(os.path.realpath(_checked(path)))
    try:
        with suppress(FileNotFoundError):
            status = target.stat()
            if not stat.S_ISREG(status.st_mode):
                raise PrefixCacheError(f"{path} is not a file")
            if status.st_size:
                with target.open("rb") as stream:
                    _read_header(stream, Path(path))
        with _temporary(target):
            pass
    except PrefixCacheError as error:
        raise PrefixCacheError(f"{error}; it is not replaced") from None
    except (OSError, ValueError) as error:  # ValueError: characters that no path has
        raise _unwritable(path, error) from error
    return target


def write_prefix_file(
    path: str | Path,
    identity: Mapping[str, str],
    parents: IntArray,
    token_ids: IntArray,
    block_bytes: int,
    blocks: Iterable[npt.NDArray[np.uint8]],
) -> None:
    """Write the file beside its place and move it there when it is complete.

    Args:
        path: as ``check_prefix_target`` takes it; a prefix cache that is there is replaced.
        identity: what ``open_prefix_file`` will ask for.
        parents: as in ``PrefixFile``, and so is ``token_ids``.
        block_bytes: of one block.
        blocks: [some, block_bytes] each, all in the order of ``parents``.

    Raises:
        PrefixCacheError: as ``check_prefix_target``.
    """
    target = check_prefix_target(path)
    header = _header(identity, len(parents), token_ids.shape[1], block_bytes)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    digest = hashlib.sha256()
    unfinished: Path | None = None
    try:
        with _temporary(target, delete=False) as file:
            unfinished = Path(file.name)
            index = len(text).to_bytes(8, "little") + text + parents.tobytes() + token_ids.tobytes()
            pieces: Iterable[bytes | memoryview] = chain((index,), (some.data for some in blocks))
            for piece in pieces:
                file.write(piece)
                digest.update(piece)
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, target)
        unfinished = None
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        if unfinished is not None:
            with suppress(OSError):
                unfinished.unlink()


@contextmanager
def open_prefix_file(
    path: str | Path, identity: Mapping[str, str], block_size: int, block_bytes: int
) -> Iterator[PrefixFile]:
    """Check everything about a file before anything is made of it, and open it for reading its blocks.

    Args:
        path: what ``write_prefix_file`` has written.
        identity: what the file must say of itself.
        block_size: tokens in a block.
        block_bytes: bytes of K and V in a block.

    Raises:
        PrefixCacheError: it cannot be read, is damaged or something else, or has another identity.
    """
    path = _checked(path)
    with _opened(path) as stream:
        header, start = _read_header(stream, path)
        _check_digest(stream, path)
        _check_identity(header["__metadata__"], path, identity)
        count = _count(header)
        end = start + _header(identity, count, block_size, block_bytes)["sha256"]["data_offsets"][1]
        size = os.fstat(stream.fileno()).st_size
        if header != _header(identity, count, block_size, block_bytes) or size != end:
            raise _malformed(path)
        stream.seek(start)
        parents = _read(stream, path, np.int32, count)
        token_ids = _read(stream, path, np.int32, count, block_size)
        if ((parents < -1) | (parents >= np.arange(count))).any():
            raise _malformed(path)
        yield PrefixFile(path, parents, token_ids, block_bytes, stream, stream.tell())


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for its other end
            raise PrefixCacheError(f"{path} is not a file")
        stream = path.open("rb")
    except (OSError, ValueError) as error:  # ValueError: the path has a zero byte
        raise _unreadable(path, error) from error
    with stream:
        try:
            yield stream
        except OSError as error:
            raise _unreadable(path, error) from error


def _header(identity: Mapping[str, str], count: int, block_size: int, block_bytes: int) -> dict[str, Any]:
    header: dict[str, Any] = {"__metadata__": {**_FORMAT, **identity}}
    begin = 0
    for name, dtype, item, *shape in (
        ("parents", "I32", 4, count),
        ("token_ids", "I32", 4, count, block_size),
        ("blocks", "U8", 1, count, block_bytes),
        ("sha256", "U8", 1, _DIGEST_BYTES),
    ):
        end = begin + item * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    return header


def _read_header(stream: BinaryIO, path: Path) -> tuple[dict[str, Any], int]:
    """The header of a file of ours, whatever else may be wrong with it, and where the data begins."""
    length = int.from_bytes(stream.read(8), "little")
    header: dict[str, Any] = {}
    if length <= _MAX_HEADER:
        with suppress(ModelError):
            header = parse_json(stream.read(length), "the header")
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or metadata.get("format") != _FORMAT["format"]:
        raise PrefixCacheError(f"{path} is not a prefix cache that mini-vllm has saved, or is damaged")
    return header, 8 + length


def _check_digest(stream: BinaryIO, path: Path) -> None:
    left = stream.seek(0, os.SEEK_END) - _DIGEST_BYTES
    stream.seek(0)
    digest = hashlib.sha256()
    while left > 0 and (piece := stream.read(min(left, 1 << 20))):
        digest.update(piece)
        left -= len(piece)
    if stream.read() != digest.digest():
        raise PrefixCacheError(f"{path} is damaged: its checksum is not that of its contents")


def _check_identity(metadata: Mapping[str, str], path: Path, identity: Mapping[str, str]) -> None:
    wanted = {**_FORMAT, **identity}
    for name in {**wanted, **metadata}:
        if metadata.get(name) != wanted.get(name):
            raise PrefixCacheError(
                f"{path} was saved with {name} {shown(metadata.get(name))}, "
                f"but here it is {shown(wanted.get(name))}; it can only be used where it would be computed "
                f"the same"
            )


def _count(header: Mapping[str, Any]) -> int:
    """Blocks in the file, by its header; whatever makes no sense is 0, which no such header fits."""
    try:
        count = header["parents"]["shape"][0]
    except (KeyError, IndexError, TypeError):
        return 0
    return count if type(count) is int and 0 <= count < 2**31 else 0


def _read(stream: BinaryIO, path: Path, dtype: type[Any], *shape: int) -> npt.NDArray[Any]:
    values = np.empty(shape, dtype)
    if stream.readinto(values.reshape(-1).view(np.uint8)) != values.nbytes:  # type: ignore[attr-defined]
        raise _malformed(path)
    return values


def _checked(path: object) -> Path:
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(name, str) or not name or "\0" in name:
        raise PrefixCacheError(f"the prefix cache's path is {shown(path)}; it must be that of a file")
    return Path(name)


def _temporary(target: Path, *, delete: bool = True) -> "tempfile._TemporaryFileWrapper[bytes]":
    """A new file beside ``target``, for its owner alone."""
    return tempfile.NamedTemporaryFile(dir=target.parent, prefix=".prefix-cache.", delete=delete)


def _malformed(path: Path) -> PrefixCacheError:
    return PrefixCacheError(f"{path} is damaged: its parts do not fit together")


def _unwritable(path: str | Path, error: OSError | ValueError) -> PrefixCacheError:
    return PrefixCacheError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}")


def _unreadable(path: Path, error: OSError | ValueError) -> PrefixCacheError:
    return PrefixCacheError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}")
