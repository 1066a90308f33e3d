"""From what a user types (an alias, a path, a Hub name) to an opened checkpoint.

Knows which loader is for which files; formats are the loaders' own.
"""

import os
import re
from pathlib import Path

from minivllm.errors import ModelError, shown
from minivllm.models.gguf import load_gguf
from minivllm.models.hf import load_hf
from minivllm.models.nanogpt import load_nanogpt
from minivllm.models.pull import ALIASES, MODEL_ALIASES, cache_directory, pull, pulled
from minivllm.models.weights import Checkpoint

__all__ = ["ALIASES", "MODEL_ALIASES", "cache_directory", "load_checkpoint", "pull", "resolve_model"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja"]


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Open the checkpoint at ``path``; its weights are read later, as they are asked for.

    Args:
        path: a .gguf file; a directory with config.json and safetensors; NanoGPT's ckpt.pt, or its directory.

    Raises:
        ModelError: there is no such checkpoint, it is damaged, or it needs something that is not implemented.
    """
    path = Path(path)
    try:
        if path.is_dir():
            if (path / "config.json").is_file():
                return load_hf(path)
            if (path / "ckpt.pt").is_file():
                return load_nanogpt(path / "ckpt.pt")
            ggufs = sorted(path.glob("*.gguf"))
            if len(ggufs) == 1:
                return load_gguf(ggufs[0])
            raise ModelError(
                f"{path} has no config.json, no ckpt.pt, and not one .gguf file but {len(ggufs)}"
            )
        if not path.exists():
            raise ModelError(f"{path} does not exist")
        if path.suffix == ".gguf":
            return load_gguf(path)
        if path.suffix in (".pt", ".pth"):
            return load_nanogpt(path)
    except OSError as error:
        raise ModelError(f"cannot read {error.filename or path}: {error.strerror or error}") from error
    raise ModelError(
        f"{path} is not a model: it must be a .gguf file, a .pt file of NanoGPT, or a directory with "
        "config.json and safetensors"
    )


_FILE_SUFFIXES = (".gguf", ".pt", ".safetensors", ".json")  # of a path that does not exist, not of a Hub name


def resolve_model(name: str | Path) -> Path:
    """Where the model called ``name`` lies: a pulled alias, a path, or a Hub name, which is downloaded.

    A Hub name that is in huggingface_hub's cache is used as it is there when there is no network.

    Raises:
        ModelError: there is no such model, an alias has not been pulled, or a download fails.
    """
    text = str(name)
    if text in MODEL_ALIASES:
        path = pulled(text)
        if path is None:
            raise ModelError(f"{text} is not there yet: run `mini-vllm pull {text}`")
        return path
    if text and os.path.exists(text):  # unlike Path.exists, no error for impossible names
        return Path(name)
    if isinstance(name, str) and _HUB_NAME.fullmatch(name) and Path(name).suffix not in _FILE_SUFFIXES:
        return _download_from_hub(name)
    raise ModelError(
        f"there is no model {shown(text)}: it must be an alias ({', '.join(MODEL_ALIASES)}), an existing "
        "path or a Hub name such as org/name"
    )


def _download_from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download  # half a second to import; needed for Hub names alone

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"]))
    except Exception as error:  # its own errors, those of two HTTP libraries, and OSError
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{name} is no existing path, and could not be downloaded from the Hub: {shown(reason)}"
        ) from error
