"""Checkpoint: what every loader returns. Weights are read lazily, one tensor at a time.

So peak memory at load is the executor's own copy plus one tensor. Formats live in ``nanogpt``, ``hf``
and ``gguf``; this module only names what they have in common.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from minivllm.models.config import ModelConfig

TensorDtype = Literal["float32", "float16", "bfloat16", "q4_0", "q4_1", "q8_0"]


@dataclass(frozen=True)
class WeightTensor:
    """One tensor as the file stores it, under its canonical name (``models.config.tensor_shapes``)."""

    name: str
    shape: tuple[int, ...]
    dtype: TensorDtype
    data: npt.NDArray[Any]
    """float32/float16: that numpy dtype, of ``shape``; bfloat16: uint16 bit patterns, of ``shape``;
    q*: uint8, [rows, bytes of a row] of ggml blocks of 32 weights along the inputs."""

    def to_float32(self) -> npt.NDArray[np.float32]:
        """The values as a float32 array of ``shape`` (a copy, unless they are float32 already)."""
        raise NotImplementedError


@dataclass(frozen=True)
class TokenizerSource:
    """Where a checkpoint's tokenizer comes from; ``text.tokenizer.load_tokenizer`` builds it."""

    kind: Literal["hf", "gguf", "chars", "gpt2"]
    path: Path | None = None  #: hf: the directory; gpt2: the directory searched for vocabulary files
    data: Mapping[str, Any] | None = None  #: gguf: the ``tokenizer.*`` metadata; chars: {"itos": [...]}


class Checkpoint(Protocol):
    """A model on disk, checked but not yet read."""

    config: ModelConfig
    dtype: Literal["float32", "bfloat16"]  #: what ``dtype="auto"`` means for it
    path: Path
    eos_token_ids: tuple[int, ...]
    tokenizer: TokenizerSource | None

    def tensors(self) -> Iterator[WeightTensor]:
        """Every tensor of ``tensor_shapes(config)``, once, each read when it is asked for.

        Raises:
            ModelError: a tensor is missing or has another shape (said before the first one is yielded).
        """
        ...
