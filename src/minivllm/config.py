"""EngineConfig: the one frozen configuration of an engine, checked on construction.

What depends on the model (its context length, the memory of its cache) is checked where the engine is
put together, in ``minivllm.factory``.
"""

import operator
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

from minivllm.errors import ConfigError, shown

Dtype = Literal["auto", "float32", "bfloat16"]
KVCacheDtype = Literal["auto", "float32", "bfloat16", "int8"]
ExecutorName = Literal["native", "torch"]
Quantization = Literal["auto", "int8", "int4"]
QuantizationName = Literal["auto", "int8", "int4", "none"]  #: on a command line; none: None

# Ranges of the integer settings. The upper ends only refuse nonsense: slots must fit int32, and an
# activation row exists for each batched token.
_RANGES = {
    "block_size": (1, 2**20),
    "num_blocks": (1, 2**30),
    "kv_cache_memory": (1, 2**50),
    "max_num_batched_tokens": (1, 2**20),
    "max_num_seqs": (1, 2**16),
    "max_model_len": (2, 2**30),
    "threads": (1, 1024),
    "seed": (0, 2**64 - 1),
}


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine, with vLLM's names where vLLM has one.

    Raises:
        ConfigError: a value is out of range, or two contradict each other.
    """

    model: str | Path  #: an alias ("smollm2-135m"), a file, a directory, or a Hub name
    dtype: Dtype = "auto"  #: of the weights; auto: float32 for float32 checkpoints, else bfloat16
    quantization: Quantization | None = "auto"
    """Of the native executor's weights. auto: as near to the file as can be (Q4_0, Q4_1 and Q4_K of a GGUF
    become int4, its other quantised types int8: docs/performance.md has what that costs), unless a ``dtype``
    is asked for; int8, int4: whatever the file has (int4: embedding and head int8); None: all weights in
    ``dtype``, as the torch executor always has them."""
    block_size: int = 16
    """Tokens in a KV block, 1 to the context length. 16: a sequence wastes half a block on average, 8 tokens
    (2 % of a 400-token chat), while a block of a small model is still a few KiB in each layer."""
    num_blocks: int | None = None  #: physical blocks; None: from kv_cache_memory
    kv_cache_memory: int | None = None  #: bytes; None: a share of the memory that is available
    kv_cache_dtype: KVCacheDtype = "auto"
    """auto: as dtype; int8 (native executor): bytes, and a scale for each token and head."""
    max_num_batched_tokens: int = 512  #: tokens computed in one step, at most
    max_num_seqs: int = 64  #: sequences running at once, at most
    max_model_len: int | None = None  #: prompt + output tokens; None: what the model and the pool allow
    executor: ExecutorName = "native"
    device: str = "auto"  #: auto: cpu, or cuda for the torch executor where there is one
    threads: int | None = None  #: of the native executor; None: the cores that this process may use
    enable_prefix_caching: bool = True  #: let requests with equal beginnings share blocks
    seed: int = 0  #: requests without a seed get theirs from this one and their ordinal

    @property
    def weight_quantization(self) -> Quantization | None:
        """``quantization``, or None where "auto" gives way to the ``dtype`` that was asked for."""
        return None if self.quantization == "auto" and self.dtype != "auto" else self.quantization

    def __post_init__(self) -> None:
        """Check every value."""
        if not isinstance(self.model, str | Path) or not str(self.model):
            raise ConfigError(f"model is {shown(self.model)}; give an alias, a path, or a Hub name")
        _one_of("dtype", self.dtype, get_args(Dtype))
        _one_of("kv_cache_dtype", self.kv_cache_dtype, get_args(KVCacheDtype))
        _one_of("executor", self.executor, get_args(ExecutorName))
        if self.quantization is not None:
            _one_of("quantization", self.quantization, (*get_args(Quantization), None))
            if self.executor == "torch" and self.quantization != "auto":
                raise ConfigError(
                    f"quantization is {self.quantization!r}, but the torch executor keeps weights in dtype; "
                    f"use executor='native' or quantization=None"
                )
        if self.kv_cache_dtype == "int8" and self.executor == "torch":
            raise ConfigError(
                "kv_cache_dtype is 'int8', but the torch executor's cache is 'float32' or 'bfloat16'; "
                "use executor='native' or one of these"
            )
        if not isinstance(self.enable_prefix_caching, bool):
            raise ConfigError(
                f"enable_prefix_caching is {shown(self.enable_prefix_caching)}; use True or False"
            )
        optional = {f.name for f in fields(self) if f.default is None}
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            object.__setattr__(self, name, _integer(name, value, low, high))
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise ConfigError(
                f"num_blocks ({self.num_blocks:,}) and kv_cache_memory ({self.kv_cache_memory:,} bytes) "
                f"both size the KV cache; set one of them"
            )
        if not isinstance(self.device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device):
            raise ConfigError(f"device is {shown(self.device)}; use 'auto', 'cpu', 'cuda' or 'cuda:N'")
        if self.executor == "torch" and self.threads is not None:
            raise ConfigError(
                f"threads is {self.threads}, but it is the native executor's; "
                f"for torch set the variable OMP_NUM_THREADS"
            )
        if self.executor == "native" and self.device.startswith("cuda"):
            raise ConfigError(
                f"device is {self.device!r}, but the native executor runs on the CPU; "
                f"use executor='torch' or device='cpu'"
            )


def _one_of(name: str, value: object, allowed: tuple[str | None, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{name} is {shown(value)}; use one of {', '.join(map(repr, allowed))}")


def _integer(name: str, value: object, low: int, high: int) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"{name} is {shown(value)}; it must be an integer") from None
    if not low <= number <= high:
        raise ConfigError(f"{name} is {shown(number)}; it must be from {low:,} to {high:,}")
    return number
