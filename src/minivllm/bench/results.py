"""The CSV of ``benchmark.py``: its columns, appending to it, and what is in it already.

A row is one mode at one point of a sweep. The file is only ever appended to, under a lock. Knows nothing of
how the figures came about.
"""

import csv
import fcntl
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO

from minivllm.errors import ConfigError, counted, shown


@dataclass(frozen=True)
class Row:
    """One line of the CSV; the fields are the columns, in order. None is an empty cell."""

    timestamp_utc: str  #: ISO 8601, when the row was written
    benchmark_label: str  #: what the user called this measurement
    execution_device: str  #: "cpu" or "cuda"
    cuda_available: bool  #: whether torch finds a CUDA device
    mode: str  #: see ``bench.cache_modes``
    prompt: str  #: the text; the prompt repeats its tokens up to ``prompt_tokens``
    prompt_tokens: int  #: of each request
    new_tokens: int  #: generated for each request
    total_tokens_processed: int  #: concurrency × (prompt_tokens + new_tokens)
    total_blocks: int | None  #: of the KV pool
    block_size: int | None  #: tokens in one
    warmup_runs: int
    timed_runs: int
    avg_seconds: float  #: mean of the timed runs; a run ends when all requests have all their tokens
    stdev_seconds: float  #: sample standard deviation; 0 of a single run
    min_seconds: float
    max_seconds: float
    median_seconds: float
    tokens_per_second: float  #: concurrency × new_tokens / avg_seconds
    speedup_vs_no_cache: float | None  #: avg_seconds of no_kv_cache at the same point / this one's
    run_durations_json: str  #: the timed runs in order, seconds
    # From here on the columns are this project's.
    model: str
    parameters: int  #: weights, the tied head counted once
    dtype: str  #: of the weights, and of the KV cache
    executor: str  #: "baseline", "torch" or "native"
    threads: int
    concurrency: int  #: requests; together with a KV cache, one after the other without
    seed: int  #: of the default model's weights
    version: str  #: of minivllm
    git_commit: str  #: empty outside a checkout; ends with "-dirty" if the code was changed since
    processor: str
    instruction_set: str  #: of the native kernels; empty for the others
    torch_version: str
    kv_bytes_per_token: int | None
    kv_peak_bytes_used: int | None  #: of the pool, by tokens; the most after any step
    kv_peak_bytes_reserved: int | None  #: of the pool, by blocks that a sequence holds
    kv_mean_bytes_used: int | None  #: mean over the steps
    kv_mean_bytes_reserved: int | None
    kv_utilisation: float | None  #: used / reserved, over all steps
    matching_tokens: int | None  #: leading tokens that are those of the first mode; new_tokens: all are


COLUMNS = tuple(field.name for field in fields(Row))


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Append the rows, all or none, and the header to a file that is new or empty.

    Raises:
        ConfigError: the file is something else than such a CSV; it is left as it is.
        OSError: it cannot be written.
    """
    with _locked(path) as file:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if _check(path, file):
            writer.writerow(COLUMNS)
        writer.writerows(map(_cell, astuple(row)) for row in rows)
        data = text.getvalue().encode()
        size = file.seek(0, os.SEEK_END)
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        except OSError:  # a full disk: no half of a row stays
            file.truncate(size)
            raise


def check_file(path: Path) -> None:
    """Whether ``append_rows`` will take this path; to be asked before hours of measuring.

    Raises:
        ConfigError: the file is something else than such a CSV, or cannot be written.
    """
    directory = path.parent
    if not path.exists() and not (directory.is_dir() and os.access(directory, os.W_OK)):
        raise ConfigError(f"the results cannot be written to {path}: {directory} is no directory to write to")
    try:
        read_rows(path)
    except OSError as error:
        raise ConfigError(f"the results cannot be written to {path}: {error.strerror or error}") from None


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows as the file has them, by column; none if there is no file.

    Raises:
        ConfigError: the file is something else than such a CSV, or damaged.
    """
    if not path.exists():
        return []
    with _locked(path) as file:
        _check(path, file)
        file.seek(0)
        data = file.read()
    try:
        lines = list(csv.reader(io.StringIO(data.decode(), newline="")))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} is damaged: {error}; give another file, or mend it") from None
    for number, cells in enumerate(lines[1:], start=1):
        if len(cells) != len(COLUMNS):
            raise ConfigError(
                f"{path} is damaged: row {number} has {counted(len(cells), 'cell')}, not {len(COLUMNS)}; "
                "give another file, or mend it"
            )
    return [dict(zip(COLUMNS, cells, strict=True)) for cells in lines[1:]]


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """The file, opened to read and append, with nobody else in it."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"the results cannot be written to {path}: it is no regular file")
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        yield file


def _check(path: Path, file: BinaryIO) -> bool:
    """Whether the file is empty, so that it needs a header.

    Raises:
        ConfigError: it has another header, or does not end with a whole line.
    """
    file.seek(0)
    header = file.readline()
    if not header:
        return True
    columns = next(csv.reader([header.decode(errors="replace")]), [])
    if tuple(columns) != COLUMNS:
        pairs = enumerate(zip_longest(columns, COLUMNS, fillvalue=None), start=1)
        place, (theirs, ours) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
        difference = f"column {place} is {shown(theirs)}, not {shown(ours)}"
        raise ConfigError(f"{path} has another header than these results ({difference}); give another file")
    file.seek(-1, os.SEEK_END)
    if file.read(1) != b"\n":
        raise ConfigError(f"{path} ends in the middle of a line; complete or remove its last line")
    return False


def _cell(value: object) -> object:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value
