"""EngineConfig: the one frozen configuration of an engine, checked on construction."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine, with vLLM's names where vLLM has one.

    Raises:
        ConfigError: a value is out of range, or two contradict each other.
    """

    model: str | Path  #: an alias ("smollm2-135m"), a file, a directory, or a Hub name
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    quantization: str | None = None
    block_size: int = 16  #: tokens in a KV block
    num_blocks: int | None = None  #: physical blocks; None: from kv_cache_memory
    kv_cache_memory: int | None = None  #: bytes; None: a share of the memory that is available
    kv_cache_dtype: Literal["auto", "float32", "bfloat16"] = "auto"  #: auto: as dtype
    max_num_batched_tokens: int = 512  #: tokens computed in one step, at most
    max_num_seqs: int = 64  #: sequences running at once, at most
    max_model_len: int | None = None  #: None: what the model and the pool allow
    executor: Literal["native", "torch"] = "native"
    device: str = "auto"  #: auto: cpu, or cuda for the torch executor where there is one
    threads: int | None = None  #: None: the cores that this process may use
    enable_prefix_caching: bool = True
    seed: int = 0
