"""From what a user types (an alias, a path, a Hub name) to an opened checkpoint."""

from pathlib import Path

from minivllm.errors import ModelError
from minivllm.models.gguf import load_gguf
from minivllm.models.weights import Checkpoint


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Open the checkpoint at ``path``; its weights are read later, as they are asked for."""
    path = Path(path)
    if path.suffix == ".gguf":
        return load_gguf(path)
    raise ModelError(f"{path} is not a checkpoint of a kind that is known")
