"""Batch files: OpenAI's lines of requests and of answers, and which requests have been answered.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once"}}
    {"id": "batch_req_1", "custom_id": "a", "response": {"status_code": 200, ...}, "error": null}

The number in ``id`` is that of the request's line, from 1: by it a run that was cut off knows what it has
done. Both files are read line by line; of each line 17 bytes are kept. Knows nothing of the engine.
"""

import base64
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from minivllm.errors import ConfigError, shown
from minivllm.server.errors import ApiError
from minivllm.server.json_body import parsed

MAX_LINE_BYTES = 2 * 2**20
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
_ID_PREFIX = "batch_req_"
_ID = re.compile(_ID_PREFIX + r"([1-9][0-9]{0,17})")
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str)
_BLANK, _NO_ID = b"", b"?"  # in place of a digest


@dataclass(frozen=True)
class BatchRequest:
    """A line that can be asked."""

    custom_id: str
    url: str
    body: bytes  #: JSON


@dataclass(frozen=True)
class BadLine:
    """A line that is no request."""

    custom_id: str | None  #: if at least that can be read
    message: str


def parsed_line(line: bytes) -> BatchRequest | BadLine:
    """What a line of the input says."""
    if len(line) > MAX_LINE_BYTES:
        return BadLine(None, f"the line is longer than the {MAX_LINE_BYTES:,} bytes that one may have")
    try:
        fields = parsed(line, "the line")
    except ApiError as error:
        return BadLine(None, error.error["message"] or "")
    if not isinstance(fields, dict):
        return BadLine(None, "the line is not a JSON object")
    custom_id, method, url, body = (fields.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        return BadLine(None, f"custom_id is {shown(custom_id)}; give each line a string of its own")
    if method != "POST":
        return BadLine(custom_id, f'method is {shown(method)}; it must be "POST"')
    if url not in URLS:
        return BadLine(custom_id, f"url is {shown(url)}; it must be one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        return BadLine(custom_id, f"body is {shown(body)}; it must be a JSON object, the request")
    if body.get("stream"):
        return BadLine(custom_id, "body.stream is set; a batch has no streams, leave it out")
    return BatchRequest(custom_id, url, _member(line.decode(), "body").encode())


def _member(text: str, name: str) -> str:
    """The text of a member of an object, as it stands: written anew, 1e999 would be no JSON.

    Args:
        text: a JSON object that has been parsed, and has the member.
    """
    at = _between(text, text.index("{") + 1)
    while True:
        key, at = _DECODER.raw_decode(text, at)
        start = _between(text, at)
        _, end = _DECODER.raw_decode(text, start)
        if key == name:
            return text[start:end]
        at = _between(text, end)


def _between(text: str, at: int) -> int:
    """Where the next key or value begins."""
    while text[at] in " \t\n\r,:":
        at += 1
    return at


class Batch:
    """Owner of the two files while they are open. See ``open_batch``.

    Attributes:
        num_requests: lines of the input that are not blank.
        num_answered: those of them whose answer is in the output.
    """

    def __init__(
        self, requests: IO[bytes], answers: IO[bytes], path: Path, digests: npt.NDArray[np.bytes_]
    ) -> None:
        self._requests = requests
        self._answers = answers
        self._answered = _answered_lines(answers, path, digests)
        self.num_requests = int(np.count_nonzero(digests != _BLANK))
        self.num_answered = int(np.count_nonzero(self._answered))

    def unanswered(self) -> Iterator[tuple[int, bytes]]:
        """Number and text of every line that is still to be answered, as of the opening."""
        self._requests.seek(0)
        for number, line in _lines(self._requests):
            if number > len(self._answered):  # it was not there when the file was checked
                return
            if not line.isspace() and not self._answered[number - 1]:
                yield number, line

    def write(
        self,
        number: int,
        custom_id: str | None,
        response: Mapping[str, Any] | None,
        error: Mapping[str, str] | None,
    ) -> None:
        """Write the answer to a line. It is in the system's hands when this returns."""
        answer = {
            "id": f"{_ID_PREFIX}{number}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
        self._answers.write(json.dumps(answer, ensure_ascii=False).encode() + b"\n")
        self._answers.flush()
        self.num_answered += 1


@contextmanager
def open_batch(requests: Path, answers: Path) -> Iterator[Batch]:
    """Open a batch, with everything checked that can be checked before any work.

    Args:
        requests: the input.
        answers: the output, which is created, or gone on with: its last line is dropped if it is torn.

    Raises:
        ConfigError: a file cannot be opened, a custom_id is given twice, or the output is another input's.
    """
    for path, verb in ((requests, "read"), (answers, "written")):
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} cannot be {verb}: it is no regular file; copy what is in it to one")
    try:
        source = requests.open("rb")
    except OSError as error:
        raise ConfigError(f"{requests} cannot be read: {error.strerror}") from None
    with source:
        digests = _digests(source, requests)
        try:
            target = os.fdopen(os.open(answers, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")
        except OSError as error:
            raise ConfigError(f"{answers} cannot be written: {error.strerror}") from None
        with target:
            if os.path.sameopenfile(source.fileno(), target.fileno()):
                raise ConfigError(f"{answers} is the input itself; the answers need a file of their own")
            try:
                fcntl.flock(target, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another run is writing {answers}; wait for it, or end it") from None
            yield Batch(source, target, answers, digests)


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines and their numbers from 1; of one that is too long as much as shows that it is."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        piece = line
        while piece and not piece.endswith(b"\n"):
            piece = file.readline(MAX_LINE_BYTES)
        yield number, line


def _digests(file: IO[bytes], path: Path) -> npt.NDArray[np.bytes_]:
    """Of each line's custom_id, 16 bytes each.

    Raises:
        ConfigError: two lines have the same.
    """
    found = bytearray()
    for _, line in _lines(file):
        digest = _BLANK if line.isspace() else _digest(parsed_line(line).custom_id)
        found += digest.ljust(16, b"\0")
    digests = np.frombuffer(bytes(found), dtype="S16")
    order = np.argsort(digests, kind="stable")
    ordered = digests[order]
    again = np.flatnonzero((ordered[1:] == ordered[:-1]) & (ordered[1:] != _BLANK) & (ordered[1:] != _NO_ID))
    if len(again):
        earliest = again[np.argmin(order[again + 1])]
        first, second = order[earliest] + 1, order[earliest + 1] + 1
        num_more = len(again) - 1
        more = f", and there are {num_more:,} more such lines" if num_more > 1 else ""
        more = ", and there is one more such line" if num_more == 1 else more
        raise ConfigError(
            f"the lines {first:,} and {second:,} of {path} have the same custom_id{more}; "
            "give each line one of its own"
        )
    return digests


def _digest(custom_id: str | None) -> bytes:
    """ASCII, so that it has no zero at its end, which numpy would drop. 96 bits do not collide."""
    if custom_id is None:
        return _NO_ID
    return base64.b64encode(hashlib.blake2b(custom_id.encode(), digest_size=12).digest())


def _answered_lines(answers: IO[bytes], path: Path, digests: npt.NDArray[np.bytes_]) -> npt.NDArray[np.bool_]:
    """Whether each line is answered. Leaves the file at its end, without a torn last line.

    Raises:
        ConfigError: a line is no answer to this input.
    """
    answered = np.zeros(len(digests), np.bool_)
    end = 0
    for number, line in enumerate(answers, 1):
        if not line.endswith(b"\n"):
            break  # the run that wrote it was killed
        end += len(line)
        request = _answered_line(line, digests)
        if request is None:
            raise ConfigError(
                f"line {number:,} of {path} is no answer to a line of this input; "
                "give another output file, or the input that it belongs to"
            )
        answered[request] = True
    answers.truncate(end)
    answers.seek(end)
    return answered


def _answered_line(line: bytes, digests: npt.NDArray[np.bytes_]) -> int | None:
    """The index of the line that this one answers; None: there is no such line."""
    try:
        answer = json.loads(line)
        match = _ID.fullmatch(answer["id"])
        custom_id = answer["custom_id"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    index = int(match[1]) - 1 if match else len(digests)
    if index >= len(digests) or not isinstance(custom_id, str | None):
        return None
    return index if digests[index] == _digest(custom_id) else None
