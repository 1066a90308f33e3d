"""GGUF checkpoints of Llama and Qwen2 kind: metadata → ModelConfig, tensor names → canonical ones.

Key and tensor names: github.com/ggml-org/ggml, docs/gguf.md, and the ``gguf`` package's constants. The bytes
are ``gguf_reader``'s. Knows nothing of tokenizers beyond where their metadata is.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from minivllm.errors import ModelError, shown
from minivllm.models.config import ModelConfig
from minivllm.models.gguf_reader import GGUFFile, read_gguf
from minivllm.models.rope import as_config_field, divide_frequencies, inverse_frequencies, scale_linear
from minivllm.models.weights import Checkpoint, StoredTensor, TokenizerSource, refuse_unused

#: Keys (after "llama.") that ``_config`` reads or that change nothing here. Any other one is refused, so that
#: a variant of the architecture cannot be taken for the plain one.
_KNOWN_KEYS = {
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "block_count", "context_length", "embedding_length",
    "feed_forward_length", "rope.dimension_count", "rope.freq_base", "rope.scale_linear",
    "rope.scaling.factor", "rope.scaling.finetuned", "rope.scaling.original_context_length",
    "rope.scaling.type", "vocab_size",
}  # fmt: skip
#: Keys whose usual value says that a feature is not in use; another value is refused
_OFF_VALUES: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "logit_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "use_parallel_residual": (False,),
}
#: Tokens that end a turn in the chat formats of these architectures, where the vocabulary has them
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>")
_CONTROL = 3  # tokenizer.ggml.token_type of a special token

_PER_LAYER = {
    "attn_norm": "attn_norm", "attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_output": "o",
    "ffn_norm": "mlp_norm", "ffn_gate": "gate", "ffn_up": "up", "ffn_down": "down",
}  # fmt: skip


def load_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file of architecture "llama" or "qwen2".

    Raises:
        ModelError: the file is damaged, of another architecture, or uses something that is not implemented.
        OSError: it cannot be opened.
    """
    file = read_gguf(path)
    if _optional(file, "split.count", int, 1) > 1:
        raise ModelError(f"{path} is one part of several; join them with llama-gguf-split --merge")
    kind = _required(file, "general.architecture", str)
    if kind not in ("llama", "qwen2"):
        raise ModelError(f"{path}: architecture {shown(kind)} is not implemented; llama and qwen2 are")
    config = _config(file, kind)

    names = {"token_embd.weight": "embed.weight", "output_norm.weight": "final_norm.weight"}
    if not config.tied_head:
        names["output.weight"] = "head.weight"
    for i in range(config.num_layers):
        for theirs, ours in _PER_LAYER.items():
            for part in ("weight", "bias"):
                names[f"blk.{i}.{theirs}.{part}"] = f"layers.{i}.{ours}.{part}"
    refuse_unused(path, file.tensors, [*names, "rope_freqs.weight"])

    stored = {ours: file.tensors[theirs] for theirs, ours in names.items() if theirs in file.tensors}
    for name in ("embed.weight", "head.weight"):
        if name in stored and stored[name].shape[0] > config.vocab_size:
            stored[name] = stored[name].rows(0, config.vocab_size)
    if kind == "llama":
        for name, tensor in stored.items():
            if name.endswith((".q.weight", ".q.bias", ".k.weight", ".k.bias")):
                stored[name] = _halves_from_pairs(tensor, config.head_dim)
    tokenizer = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
    return Checkpoint(
        config=config,
        dtype="float32" if file.all_float32 else "bfloat16",
        path=path,
        eos_token_ids=_eos_token_ids(file, config.vocab_size),
        tokenizer=TokenizerSource("gguf", data=tokenizer) if "tokenizer.ggml.tokens" in tokenizer else None,
        stored=stored,
    )


def _config(file: GGUFFile, kind: str) -> ModelConfig:
    for key, value in file.metadata.items():
        if not key.startswith(f"{kind}."):
            continue
        field = key[len(kind) + 1 :]
        if field not in _KNOWN_KEYS and value not in _OFF_VALUES.get(field, ()):
            raise ModelError(f"{file.path}: {shown(key)} = {shown(value)} is not implemented")

    hidden_size = _required(file, f"{kind}.embedding_length", int)
    num_heads = _required(file, f"{kind}.attention.head_count", int)
    head_dim = _optional(file, f"{kind}.attention.key_length", int, hidden_size // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        length = _optional(file, f"{kind}.{key}", int, head_dim)
        if length != head_dim:
            raise ModelError(
                f"{file.path}: {kind}.{key} = {length} is not implemented; heads have {head_dim} elements"
            )
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path}: the tensor token_embd.weight is missing")
    tokens = _optional(file, "tokenizer.ggml.tokens", list, None)
    config = ModelConfig(
        kind=kind,
        vocab_size=len(tokens) if tokens else file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=_required(file, f"{kind}.feed_forward_length", int),
        num_layers=_required(file, f"{kind}.block_count", int),
        num_heads=num_heads,
        num_kv_heads=_optional(file, f"{kind}.attention.head_count_kv", int, num_heads),
        head_dim=head_dim,
        max_position=_required(file, f"{kind}.context_length", int),
        norm="rmsnorm",
        norm_eps=_required(file, f"{kind}.attention.layer_norm_rms_epsilon", float),
        norm_bias=False,
        activation="silu",
        gated_mlp=True,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        tied_head="output.weight" not in file.tensors,
        rope_inv_freq=None,
    )
    return replace(config, rope_inv_freq=_rope(file, kind, head_dim))


def _rope(file: GGUFFile, kind: str, head_dim: int) -> tuple[float, ...]:
    inv_freq = inverse_frequencies(head_dim, _optional(file, f"{kind}.rope.freq_base", float, 10000.0))
    factor = _optional(file, f"{kind}.rope.scale_linear", float, 1.0)  # the older spelling
    factor = _optional(file, f"{kind}.rope.scaling.factor", float, factor)
    scaling = _optional(file, f"{kind}.rope.scaling.type", str, "none" if factor in (0.0, 1.0) else "linear")
    if scaling not in ("none", "linear"):
        raise ModelError(
            f"{file.path}: {kind}.rope.scaling.type = {shown(scaling)} is not implemented; linear is"
        )
    if scaling == "linear":
        inv_freq = scale_linear(inv_freq, factor)
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None:
        if factors.dtype != "float32":
            raise ModelError(f"{file.path}: rope_freqs.weight has type {factors.dtype}; it must be float32")
        inv_freq = divide_frequencies(inv_freq, factors.read())
    return as_config_field(inv_freq)


def _halves_from_pairs(tensor: StoredTensor, head_dim: int) -> StoredTensor:
    """Rows of q or k from GGUF's order to ours, whole rows at a time, quantised or not.

    In a head of "llama" files, rows 2i and 2i + 1 are rotated together; here, rows i and i + head_dim // 2.
    """

    def read() -> npt.NDArray[Any]:
        data = tensor.read()
        pairs = data.reshape(-1, head_dim // 2, 2, *data.shape[1:])  # [head, i, element of the pair, …]
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(data.shape)

    return replace(tensor, read=read)


def _eos_token_ids(file: GGUFFile, vocab_size: int) -> tuple[int, ...]:
    """The file's end tokens, and the end-of-turn tokens of chat models; ascending."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = {_optional(file, f"tokenizer.ggml.{key}", int, None) for key in keys} - {None}
    if any(not 0 <= token_id < vocab_size for token_id in ids):
        raise ModelError(f"{file.path}: end tokens {sorted(ids)} go beyond the vocabulary of {vocab_size}")
    tokens: list[Any] = _optional(file, "tokenizer.ggml.tokens", list, [])
    types: list[Any] = _optional(file, "tokenizer.ggml.token_type", list, [])
    for token_id, (text, token_type) in enumerate(zip(tokens, types, strict=False)):
        if token_type == _CONTROL and text in _END_OF_TURN:
            ids.add(token_id)
    return tuple(sorted(ids))


def _required(file: GGUFFile, key: str, kind: type) -> Any:
    if key not in file.metadata:
        raise ModelError(f"{file.path}: the metadata has no {key}")
    return _optional(file, key, kind, None)


def _optional(file: GGUFFile, key: str, kind: type, default: Any) -> Any:
    metadata: Mapping[str, Any] = file.metadata
    if key not in metadata:
        return default
    value = metadata[key]
    if type(value) is not kind:
        raise ModelError(f"{file.path}: {key} is {shown(value)}; it must be of type {kind.__name__}")
    return value
