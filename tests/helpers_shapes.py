"""Shapes of small models that between them turn every flag of ModelConfig, and of the pools for them."""

import dataclasses

import numpy as np
import pytest

from minivllm.kv_cache.kv_pool import KVGeometry
from minivllm.models.config import ModelConfig

# Sizes that are multiples of nothing that the kernels like.
GPT = ModelConfig(
    kind="gpt2",
    vocab_size=131,
    hidden_size=45,
    intermediate_size=150,
    num_layers=2,
    num_heads=5,
    num_kv_heads=5,
    head_dim=9,
    max_position=1200,
    norm="layernorm",
    norm_eps=1e-5,
    norm_bias=True,
    activation="gelu",
    gated_mlp=False,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    tied_head=True,
    rope_inv_freq=None,
)
LLAMA = ModelConfig(
    kind="llama",
    vocab_size=203,
    hidden_size=70,
    intermediate_size=99,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=20,
    max_position=1200,
    norm="rmsnorm",
    norm_eps=1e-6,
    norm_bias=False,
    activation="silu",
    gated_mlp=True,
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    tied_head=True,
    rope_inv_freq=tuple(float(x) for x in np.float32(500.0) ** (-np.arange(10, dtype=np.float32) / 10)),
)
#: Every flag that the two above do not turn.
MIXED = dataclasses.replace(
    LLAMA, kind="mixed", activation="gelu_tanh", qkv_bias=True, out_bias=True, mlp_bias=True, tied_head=False
)
CONFIGS = {config.kind: config for config in (GPT, LLAMA, MIXED)}

# Small enough that two executors' sums differ little.
_SMALL = {"vocab_size": 97, "hidden_size": 32, "num_heads": 4, "head_dim": 8, "max_position": 64}
SMALL_GPT = dataclasses.replace(GPT, **_SMALL, intermediate_size=128, num_kv_heads=4, activation="gelu_tanh")
SMALL_LLAMA = dataclasses.replace(
    LLAMA,
    **_SMALL,
    intermediate_size=48,
    norm_eps=1e-5,
    tied_head=False,
    rope_inv_freq=(1.0, 0.1, 0.01, 0.001),
)
EVERY_SMALL_CONFIG = pytest.mark.parametrize("config", [SMALL_GPT, SMALL_LLAMA], ids=["gpt", "llama"])
SMALL_PROMPT = np.random.default_rng(1).integers(0, SMALL_GPT.vocab_size, 40).tolist()


def geometry(
    config: ModelConfig, block_size: int = 16, num_blocks: int = 16, dtype: str = "float32"
) -> KVGeometry:
    return KVGeometry(config.num_layers, num_blocks, config.num_kv_heads, block_size, config.head_dim, dtype)  # type: ignore[arg-type]
