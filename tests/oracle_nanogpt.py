"""NanoGPT's model, uncached, as plainly as it can be said in torch: what our executors are compared with.

Written to NanoGPT's definition (pre-norm GPT-2 with exact GELU, biases optional, the head tied to the token
embedding), on tensors with NanoGPT's state-dict names. Shares no code with minivllm.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class NanoGPT:
    model_args: dict  # n_layer, n_head, n_embd, block_size (context length), bias, vocab_size, dropout
    state: dict[str, torch.Tensor]  # "transformer.wte.weight", …; torch.float32

    @classmethod
    def random(cls, model_args: dict, seed: int = 0) -> "NanoGPT":
        """Random weights, biases and norms included, large enough for lively texts."""
        generator = torch.Generator().manual_seed(seed)
        width, bias = model_args["n_embd"], model_args["bias"]
        state = {}

        def linear(name: str, outputs: int, inputs: int, has_bias: bool = bias) -> None:
            state[f"{name}.weight"] = torch.randn(outputs, inputs, generator=generator) * 1.5 * inputs**-0.5
            if has_bias:
                state[f"{name}.bias"] = torch.randn(outputs, generator=generator) * 0.1

        def norm(name: str) -> None:
            state[f"{name}.weight"] = 1 + torch.randn(width, generator=generator) * 0.3
            if bias:
                state[f"{name}.bias"] = torch.randn(width, generator=generator) * 0.1

        linear("transformer.wte", model_args["vocab_size"], width, has_bias=False)
        linear("transformer.wpe", model_args["block_size"], width, has_bias=False)
        for i in range(model_args["n_layer"]):
            layer = f"transformer.h.{i}"
            norm(f"{layer}.ln_1")
            linear(f"{layer}.attn.c_attn", 3 * width, width)
            linear(f"{layer}.attn.c_proj", width, width)
            norm(f"{layer}.ln_2")
            linear(f"{layer}.mlp.c_fc", 4 * width, width)
            linear(f"{layer}.mlp.c_proj", width, 4 * width)
        norm("transformer.ln_f")
        state["lm_head.weight"] = state["transformer.wte.weight"]
        return cls(model_args, state)

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[tokens, vocabulary]: row t is what follows token_ids[: t + 1]."""
        state, heads, tokens = self.state, self.model_args["n_head"], len(token_ids)

        def linear(x: torch.Tensor, name: str) -> torch.Tensor:
            return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

        def norm(x: torch.Tensor, name: str) -> torch.Tensor:
            return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state.get(f"{name}.bias"), 1e-5)

        x = state["transformer.wte.weight"][token_ids] + state["transformer.wpe.weight"][:tokens]
        past = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        for i in range(self.model_args["n_layer"]):
            layer = f"transformer.h.{i}"
            qkv = linear(norm(x, f"{layer}.ln_1"), f"{layer}.attn.c_attn")
            q, k, v = (t.view(tokens, heads, -1).transpose(0, 1) for t in qkv.chunk(3, dim=1))
            scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])  # [heads, tokens, tokens]
            attended = scores.masked_fill(~past, -math.inf).softmax(dim=2) @ v
            x = x + linear(attended.transpose(0, 1).reshape(tokens, -1), f"{layer}.attn.c_proj")
            x = x + linear(
                F.gelu(linear(norm(x, f"{layer}.ln_2"), f"{layer}.mlp.c_fc")), f"{layer}.mlp.c_proj"
            )
        return linear(norm(x, "transformer.ln_f"), "lm_head")

    def greedy(self, prompt: list[int], max_tokens: int) -> tuple[list[int], torch.Tensor]:
        """The continuation, and the logits [max_tokens, vocabulary] that each of its tokens came from."""
        tokens = list(prompt)
        for _ in range(max_tokens):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :], self.logits(tokens)[len(prompt) - 1 : -1]
