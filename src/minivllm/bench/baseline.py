"""The yardstick: generation without a KV cache, as NanoGPT does it, in plain PyTorch.

For every token the whole sequence so far goes through the model again, and only its last position through
the head. This is what a KV cache is compared with, so it is what PyTorch has to offer and no less: one fused
q, k, v product, ``scaled_dot_product_attention``, inference mode. Written to NanoGPT's definition
(github.com/karpathy/nanoGPT, model.py: ``GPT.forward`` and ``GPT.generate``); for other models that
``ModelConfig`` describes, the same with their norm, positions and gate.

Knows nothing of blocks or requests.

Letters in the comments of shapes:
    T   tokens of the sequence      H, Hkv   query heads, key/value heads      D   head_dim
"""

from collections.abc import Callable, Sequence
from typing import Literal

from minivllm.errors import ConfigError
from minivllm.models.weights import Checkpoint

try:
    import torch
    import torch.nn.functional as F
    from torch import Tensor
except ImportError as error:
    raise ConfigError("the baseline needs PyTorch: pip install '.[bench]'") from error

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def use_threads(threads: int) -> None:
    """Let torch compute with so many threads, the torch executor's work included."""
    torch.set_num_threads(threads)


def cuda_available() -> bool:
    """Whether torch finds a CUDA device."""
    return bool(torch.cuda.is_available())


def torch_version() -> str:
    """As torch calls itself."""
    return str(torch.__version__)


class UncachedModel:
    """A decoder that remembers nothing from one token to the next.

    Args:
        checkpoint: the model.
        dtype: of weights and activations.
        device: "cpu" or "cuda".
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: Literal["float32", "bfloat16"], device: str = "cpu"
    ) -> None:
        self.config = checkpoint.config
        self.device = device
        self.weights: dict[str, Tensor] = {}
        for tensor in checkpoint.tensors():
            values = torch.tensor(tensor.to_float32())
            self.weights[tensor.name] = values.to(device, getattr(torch, dtype))
        for i in range(self.config.num_layers):  # NanoGPT's c_attn: q, k and v in one product
            for part in ("weight", "bias"):
                names = [f"layers.{i}.{x}.{part}" for x in "qkv"]
                if names[0] in self.weights:
                    fused = [self.weights.pop(name) for name in names]
                    self.weights[f"layers.{i}.qkv.{part}"] = torch.cat(fused)

    def generate(
        self, prompt: Sequence[int], new_tokens: int, on_token: Callable[[], None] = lambda: None
    ) -> list[int]:
        """The greedy continuation: ``new_tokens`` token ids, whatever they are.

        Args:
            prompt: token ids; with ``new_tokens`` no more than the model's context.
            new_tokens: how many to generate.
            on_token: called after each.
        """
        with torch.inference_mode():
            token_ids = torch.tensor(prompt, device=self.device)  # [T]
            for _ in range(new_tokens):
                token_ids = torch.cat((token_ids, self.logits(token_ids).argmax(dim=-1, keepdim=True)))
                on_token()
            return [int(token_id) for token_id in token_ids[len(prompt) :].tolist()]

    def logits(self, token_ids: Tensor) -> Tensor:
        """What follows the last of the tokens: [T] → [vocabulary]."""
        config, weights = self.config, self.weights
        tokens = len(token_ids)
        positions = torch.arange(tokens, device=self.device)
        x = F.embedding(token_ids, weights["embed.weight"])  # [T, hidden]
        rotation = None
        if config.rope_inv_freq is None:
            x = x + F.embedding(positions, weights["pos_embed.weight"])
        else:
            angles = positions[:, None] * torch.tensor(config.rope_inv_freq, device=self.device)
            rotation = angles.cos(), angles.sin()  # [T, D / 2] each

        for i in range(config.num_layers):
            layer = f"layers.{i}"
            x = x + self._linear(
                self._attention(self._norm(x, f"{layer}.attn_norm"), layer, rotation), f"{layer}.o"
            )
            h = self._norm(x, f"{layer}.mlp_norm")
            inner = _ACTIVATIONS[config.activation](
                self._linear(h, f"{layer}.gate" if config.gated_mlp else f"{layer}.up")
            )
            if config.gated_mlp:
                inner = inner * self._linear(h, f"{layer}.up")
            x = x + self._linear(inner, f"{layer}.down")
        last = self._norm(x[-1], "final_norm")
        return self._linear(last, "embed" if config.tied_head else "head")

    def _attention(self, h: Tensor, layer: str, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """Causal attention of all tokens over all tokens: [T, hidden] → [T, H · D]."""
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = self._linear(h, f"{layer}.qkv").unflatten(1, (heads + 2 * kv_heads, config.head_dim))
        q, k, v = qkv.transpose(0, 1).split((heads, kv_heads, kv_heads))  # [H or Hkv, T, D] each
        if rotation is not None:
            q, k = _rotated(q, *rotation), _rotated(k, *rotation)
        grouped = heads != kv_heads
        attended = F.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, enable_gqa=grouped
        )
        return attended[0].transpose(0, 1).flatten(1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, eps = self.weights[f"{name}.weight"], self.config.norm_eps
        if self.config.norm == "rmsnorm":
            return F.rms_norm(x, weight.shape, weight, eps)
        return F.layer_norm(x, weight.shape, weight, self.weights.get(f"{name}.bias"), eps)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding by halves, in float32: see ``executors.torch_``. x: [heads, T, D]."""
    a, b = x.float().chunk(2, dim=2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=2).to(x.dtype)
