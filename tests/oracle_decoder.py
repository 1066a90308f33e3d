"""The decoder as ModelConfig's docstring states it, in plain numpy: full attention, no cache, float64.

Shares nothing with the executors that are held to it.
"""

from collections.abc import Mapping
from math import erf
from typing import Any

import numpy as np
import numpy.typing as npt

from minivllm.models.config import ModelConfig

Array = npt.NDArray[Any]


def forward(config: ModelConfig, tensors: Mapping[str, Array], token_ids: list[int]) -> Array:
    """Logits [len(token_ids), vocabulary] of one sequence, float64."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    n, group = len(token_ids), config.num_heads // config.num_kv_heads
    future = np.triu(np.full((n, n), -np.inf), 1)

    def linear(name: str, x: Array) -> Array:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def norm(name: str, x: Array) -> Array:
        if config.norm == "layernorm":
            x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps)
        return x * w[f"{name}.weight"] + w.get(f"{name}.bias", 0.0)

    def heads(x: Array) -> Array:  # [n, heads * head_dim] → [heads, n, head_dim]
        return x.reshape(n, -1, config.head_dim).swapaxes(0, 1)

    def rotated(x: Array) -> Array:
        if config.rope_inv_freq is None:
            return x
        angles = np.arange(n)[:, None] * np.array(config.rope_inv_freq)
        first, second = np.split(x, 2, axis=-1)
        turned = (first + 1j * second) * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag], axis=-1)

    x = w["embed.weight"][token_ids]
    if config.rope_inv_freq is None:
        x = x + w["pos_embed.weight"][:n]
    for i in range(config.num_layers):
        h = norm(f"layers.{i}.attn_norm", x)
        q, k, v = (heads(linear(f"layers.{i}.{name}", h)) for name in "qkv")
        q, k = rotated(q), rotated(k)
        k, v = k.repeat(group, axis=0), v.repeat(group, axis=0)
        scores = q @ k.swapaxes(1, 2) * config.head_dim**-0.5 + future
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + linear(f"layers.{i}.o", (weights @ v).swapaxes(0, 1).reshape(n, -1))
        h = norm(f"layers.{i}.mlp_norm", x)
        inner = linear(f"layers.{i}.up", h)
        if config.gated_mlp:
            inner = activation(config, linear(f"layers.{i}.gate", h)) * inner
        else:
            inner = activation(config, inner)
        x = x + linear(f"layers.{i}.down", inner)
    head = w["embed.weight"] if config.tied_head else w["head.weight"]
    logits: Array = norm("final_norm", x) @ head.T
    return logits


def activation(config: ModelConfig, x: Array) -> Array:
    """The activation, element by element."""
    if config.activation == "silu":
        return x / (1 + np.exp(-x))
    if config.activation == "gelu":
        return x * 0.5 * (1 + np.vectorize(erf)(x / np.sqrt(2)))
    return x * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
