"""NanoGPT checkpoints: ckpt.pt as NanoGPT's train.py writes it, and the vocabulary that belongs to it.

Names and defaults: github.com/karpathy/nanoGPT, train.py and model.py. Bytes are ``torch_zip``'s. The
embedding is padded (50304 rows for GPT-2's 50257 tokens): it is cut to what the tokenizer knows, so that no
other token can be drawn. Knows nothing of how text becomes tokens.
"""

import re
from pathlib import Path
from typing import Any

from minivllm.errors import ModelError
from minivllm.models.config import ModelConfig
from minivllm.models.json_file import Fields
from minivllm.models.pickle_data import read_pickle
from minivllm.models.torch_zip import TorchFile, TorchTensor
from minivllm.models.weights import (
    Checkpoint,
    StoredTensor,
    TokenizerSource,
    refuse_unused,
    split_rows,
)

_GPT2_TOKENS = 50257
_GPT2_END_OF_TEXT = 50256
_GPT2_VOCAB_SIZES = (_GPT2_TOKENS, 50304)  # 50304: rounded up to a multiple of 64
_COMPILED = "_orig_mod."  # torch.compile's prefix

_LAYER = {
    "ln_1": "attn_norm",
    "attn.c_proj": "o",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "up",
    "mlp.c_proj": "down",
}


def load_nanogpt(path: Path) -> Checkpoint:
    """Open a ckpt.pt.

    Raises:
        ModelError: the file is damaged, holds code, or is not a NanoGPT checkpoint.
        OSError: it cannot be opened.
    """
    file = TorchFile(path)
    value = file.value if type(file.value) is dict else {}
    model, arguments = value.get("model"), value.get("model_args")
    if type(model) is not dict or type(arguments) is not dict:
        raise ModelError(f"{path} is not a NanoGPT checkpoint: it has no dicts 'model' and 'model_args'")
    tensors = {
        name.removeprefix(_COMPILED): tensor
        for name, tensor in model.items()
        if type(name) is str and type(tensor) is TorchTensor
    }
    fields = Fields(arguments, f"{path}, model_args")
    rows = fields.integer("vocab_size")  # of the embedding, padding included
    tokenizer = _tokenizer(path, value, rows)
    config = _config(fields, tokenizer)
    stored = _stored(file, path, config, rows, tensors)
    return Checkpoint(
        config=config,
        dtype="float32" if all(tensor.dtype == "float32" for tensor in stored.values()) else "bfloat16",
        path=path,
        eos_token_ids=(_GPT2_END_OF_TEXT,) if tokenizer and tokenizer.kind == "gpt2" else (),
        tokenizer=tokenizer,
        stored=stored,
    )


def _config(fields: Fields, tokenizer: TokenizerSource | None) -> ModelConfig:
    rows = fields.integer("vocab_size")
    vocab_size = rows
    if tokenizer is not None:
        vocab_size = len(tokenizer.data["itos"]) if tokenizer.data is not None else _GPT2_TOKENS
    if vocab_size > rows:
        raise ModelError(f"{fields.where}: vocab_size is {rows}, but its vocabulary has {vocab_size} tokens")
    hidden_size, num_heads = fields.integer("n_embd"), fields.integer("n_head")
    if num_heads < 1 or hidden_size % num_heads:
        raise ModelError(f"{fields.where}: n_embd {hidden_size} is not a multiple of n_head {num_heads}")
    bias = fields.boolean("bias", True)
    return ModelConfig(
        kind="nanogpt",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_layers=fields.integer("n_layer"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_position=fields.integer("block_size"),  # NanoGPT's word for the context length
        norm="layernorm",
        norm_eps=1e-5,
        norm_bias=bias,
        activation="gelu",
        gated_mlp=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        tied_head=True,
        rope_inv_freq=None,
    )


def _stored(
    file: TorchFile, path: Path, config: ModelConfig, rows: int, tensors: dict[str, TorchTensor]
) -> dict[str, StoredTensor]:
    parts = ("weight", "bias") if config.norm_bias else ("weight",)
    names = {"transformer.wte.weight": "embed.weight", "transformer.wpe.weight": "pos_embed.weight"}
    names |= {f"transformer.ln_f.{part}": f"final_norm.{part}" for part in parts}
    fused: dict[str, list[str]] = {}
    ignored = {"lm_head.weight"}
    for i in range(config.num_layers):
        layer = f"transformer.h.{i}"
        ignored.add(f"{layer}.attn.bias")  # the causal mask of checkpoints before flash attention
        for part in parts:
            names |= {
                f"{layer}.{theirs}.{part}": f"layers.{i}.{ours}.{part}" for theirs, ours in _LAYER.items()
            }
            fused[f"{layer}.attn.c_attn.{part}"] = [f"layers.{i}.{x}.{part}" for x in "qkv"]
    refuse_unused(path, tensors, [*names, *fused, *ignored])
    embed, head = tensors.get("transformer.wte.weight"), tensors.get("lm_head.weight")
    if embed is not None and head is not None and head != embed:
        raise ModelError(
            f"{path}: lm_head.weight is not tied to transformer.wte.weight; NanoGPT always ties them"
        )

    stored = {
        ours: file.stored(theirs, tensors[theirs]) for theirs, ours in names.items() if theirs in tensors
    }
    if embed is not None:
        cut = [config.vocab_size, rows - config.vocab_size]
        stored["embed.weight"] = split_rows(path, "wte.weight", stored["embed.weight"], cut)[0]
    for theirs, ours in fused.items():
        if theirs in tensors:
            thirds = split_rows(path, theirs, file.stored(theirs, tensors[theirs]), [config.hidden_size] * 3)
            stored |= dict(zip(ours, thirds, strict=True))
    return stored


def _tokenizer(path: Path, value: dict[Any, Any], vocab_size: int) -> TokenizerSource | None:
    """The characters of meta.pkl, where there is one; else GPT-2's BPE, if the size of the vocabulary is its.

    meta.pkl is looked for beside ckpt.pt, and where NanoGPT leaves it: ../data/DATASET/, as trained on.
    """
    candidates = [path.parent / "meta.pkl"]
    settings = value.get("config")
    dataset = settings.get("dataset") if type(settings) is dict else None
    if type(dataset) is str and re.fullmatch(r"\w[\w.-]*", dataset):
        candidates.append(path.parent.absolute().parent / "data" / dataset / "meta.pkl")
    for meta in candidates:
        if meta.is_file():
            return TokenizerSource("chars", path=meta, data={"itos": _characters(meta)})
    if vocab_size in _GPT2_VOCAB_SIZES:
        return TokenizerSource("gpt2", path=path.parent)
    return None


def _characters(meta: Path) -> list[Any]:
    """Token id → character, out of a meta.pkl of NanoGPT's data/*_char/prepare.py."""
    value = read_pickle(meta.read_bytes(), str(meta), {})
    itos = value.get("itos") if type(value) is dict else None
    if type(itos) is not dict or not itos:
        raise ModelError(f"{meta} has no dict 'itos' from token ids to characters")
    characters = [itos.get(token_id) for token_id in range(len(itos))]
    if not all(isinstance(character, str) and character for character in characters):
        raise ModelError(f"{meta}: 'itos' does not map every id from 0 to {len(itos) - 1} to a character")
    return characters
