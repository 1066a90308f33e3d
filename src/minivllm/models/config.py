"""ModelConfig: everything that the one decoder must know to be NanoGPT, GPT-2 or Llama.

Executors obey this description; they know no model names. A field of a checkpoint that changes the
arithmetic and has no counterpart here must be refused by its loader, by name.
"""

import math
from dataclasses import dataclass
from typing import Literal

from minivllm.errors import ModelError, shown

Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "gelu_tanh", "silu"]


@dataclass(frozen=True)
class ModelConfig:
    """Shape and arithmetic of a decoder. Sizes count elements.

    One layer computes, on the residual stream x:
        x += o(attention(q(h), k(h), v(h)))   with h = attn_norm(x), rotary on q and k if ``rope_inv_freq``
        x += down(act(gate(h)) * up(h))       with h = mlp_norm(x), if ``gated_mlp``;  else  down(act(up(h)))
    Attention scores are scaled by head_dim ** -0.5.

    Raises:
        ModelError: a size is not positive or absurdly large, or sizes contradict each other.
    """

    kind: str  #: for messages only: "nanogpt", "gpt2", "llama", "qwen2"
    vocab_size: int  #: rows of the embedding and of the head; cut to what the tokenizer knows
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  #: divides num_heads; query head i reads kv head i // (num_heads // num_kv_heads)
    head_dim: int
    max_position: int  #: the model's own context length
    norm: Norm
    norm_eps: float
    norm_bias: bool
    activation: Activation
    gated_mlp: bool
    qkv_bias: bool
    out_bias: bool  #: of the attention's output projection
    mlp_bias: bool
    tied_head: bool  #: the head is the token embedding; there is no ``head.weight``
    rope_inv_freq: tuple[float, ...] | None
    """head_dim // 2 inverse frequencies (scaling already applied), float32 values; None: learned positions.

    Rotation is by halves (GPT-NeoX): element i is paired with element i + head_dim // 2. Loaders permute
    weights stored for interleaved pairs (GGUF).
    """

    def __post_init__(self) -> None:
        for name, limit in _SIZE_LIMITS.items():
            size = getattr(self, name)
            if not (type(size) is int and 1 <= size <= limit):
                raise ModelError(f"{self.kind} model: {name} is {shown(size)}; it must be in 1 … {limit}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.kind} model: num_heads {self.num_heads} is not a multiple of "
                f"num_kv_heads {self.num_kv_heads}"
            )
        if not (math.isfinite(self.norm_eps) and self.norm_eps >= 0):
            raise ModelError(f"{self.kind} model: norm_eps is {self.norm_eps}; it must be finite and ≥ 0")
        if self.rope_inv_freq is not None and 2 * len(self.rope_inv_freq) != self.head_dim:
            raise ModelError(
                f"{self.kind} model: rope_inv_freq has {len(self.rope_inv_freq)} frequencies, but "
                f"head_dim is {self.head_dim}"
            )
        if not all(math.isfinite(frequency) for frequency in self.rope_inv_freq or ()):
            raise ModelError(
                f"{self.kind} model: rope_inv_freq is {shown(self.rope_inv_freq)}; it must be finite numbers"
            )


#: Far above any real model; what a file claims is held against them before anything is sized by it.
_SIZE_LIMITS = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "num_layers": 4096,
    "num_heads": 2**14,
    "num_kv_heads": 2**14,
    "head_dim": 2**14,
    "max_position": 2**30,
}


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name → shape of every tensor that a checkpoint of this configuration has.

    Matrices are [outputs, inputs], row-major: y = W @ x + b.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (config.vocab_size, hidden)}
    if config.rope_inv_freq is None:
        shapes["pos_embed.weight"] = (config.max_position, hidden)

    def norm(name: str) -> None:
        shapes[f"{name}.weight"] = (hidden,)
        if config.norm_bias:
            shapes[f"{name}.bias"] = (hidden,)

    def linear(name: str, outputs: int, inputs: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (outputs, inputs)
        if bias:
            shapes[f"{name}.bias"] = (outputs,)

    for i in range(config.num_layers):
        layer = f"layers.{i}"
        norm(f"{layer}.attn_norm")
        linear(f"{layer}.q", q_size, hidden, config.qkv_bias)
        linear(f"{layer}.k", kv_size, hidden, config.qkv_bias)
        linear(f"{layer}.v", kv_size, hidden, config.qkv_bias)
        linear(f"{layer}.o", hidden, q_size, config.out_bias)
        norm(f"{layer}.mlp_norm")
        if config.gated_mlp:
            linear(f"{layer}.gate", inner, hidden, config.mlp_bias)
        linear(f"{layer}.up", inner, hidden, config.mlp_bias)
        linear(f"{layer}.down", hidden, inner, config.mlp_bias)
    norm("final_norm")
    if not config.tied_head:
        linear("head", config.vocab_size, hidden, bias=False)
    return shapes
