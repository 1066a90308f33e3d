"""A NanoGPT checkpoint of GPT-2's 124M shape with seeded random weights: a model that needs no download.

Files as NanoGPT's train.py and data/*_char/prepare.py write them (ckpt.pt, meta.pkl). A character is a token,
so that prompts need no vocabulary file: the vocabulary is the first 50,304 characters of Unicode, as many as
NanoGPT has tokens. What the model writes is noise; how fast it writes it depends on the shape alone.
"""

import os
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minivllm.errors import ConfigError

try:
    import torch
except ImportError as error:
    raise ConfigError("the benchmark's model needs PyTorch: pip install '.[bench]'") from error

#: The defaults of NanoGPT's GPTConfig; its ``block_size`` is the context length
GPT2_124M: Mapping[str, Any] = {
    "n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "bias": True, "vocab_size": 50304,
    "dropout": 0.0,
}  # fmt: skip


def random_nanogpt(directory: Path, seed: int, model_args: Mapping[str, Any] = GPT2_124M) -> Path:
    """The checkpoint's directory below ``directory``, written if it is not there yet (GPT-2 124M: 498 MB).

    Equal seeds, equal weights. Several processes may call it at once.
    """
    target = directory / f"nanogpt-{_millions(model_args)}m-seed{seed}"
    if (target / "ckpt.pt").is_file():
        return target
    target.mkdir(parents=True, exist_ok=True)
    checkpoint = {
        "model": _state(model_args, seed),
        "model_args": dict(model_args),
        "iter_num": 0,
        "best_val_loss": torch.tensor(1e9),
        "config": {"init_from": "scratch", "seed": seed, **model_args},
    }
    characters = [chr(i) for i in range(model_args["vocab_size"])]
    meta = {
        "vocab_size": len(characters),
        "itos": dict(enumerate(characters)),
        "stoi": {character: i for i, character in enumerate(characters)},
    }
    with tempfile.TemporaryDirectory(dir=directory) as temporary:  # ckpt.pt last: where it is, all is
        (Path(temporary) / "meta.pkl").write_bytes(pickle.dumps(meta))
        torch.save(checkpoint, Path(temporary) / "ckpt.pt")
        for name in ("meta.pkl", "ckpt.pt"):
            os.replace(Path(temporary) / name, target / name)
    return target


def _state(model_args: Mapping[str, Any], seed: int) -> dict[str, "torch.Tensor"]:
    """Names and shapes of NanoGPT's state dict.

    NanoGPT draws all with 0.02, and such a model, untrained, repeats one token for ever. Larger matrices, and
    positions that outweigh the tokens, make it write something that can be compared.
    """
    width, bias = model_args["n_embd"], model_args["bias"]
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, torch.Tensor] = {}

    def draw(name: str, std: float, *shape: int) -> None:
        state[name] = torch.randn(shape, generator=generator) * std

    def linear(name: str, outputs: int, inputs: int) -> None:
        draw(f"{name}.weight", inputs**-0.5, outputs, inputs)
        if bias:
            draw(f"{name}.bias", 0.1, outputs)

    def norm(name: str) -> None:
        state[f"{name}.weight"] = torch.ones(width)
        if bias:
            state[f"{name}.bias"] = torch.zeros(width)

    draw("transformer.wte.weight", 0.05, model_args["vocab_size"], width)
    draw("transformer.wpe.weight", 1.0, model_args["block_size"], width)
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
    return state


def _millions(model_args: Mapping[str, Any]) -> int:
    """Weights in millions, positions left out, as NanoGPT counts them."""
    width, layers = int(model_args["n_embd"]), int(model_args["n_layer"])
    return round((12 * layers * width**2 + int(model_args["vocab_size"]) * width) / 1e6)
