"""Hugging Face directories (config.json and safetensors) of GPT-2 and Llama kind.

config.json → ModelConfig, tensor names → canonical ones. What a field means, and what holds where it is
absent, is as in transformers' configuration classes. Bytes are ``safetensors_reader``'s. Knows nothing of
tokenizers beyond where they are.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from minivllm.errors import ModelError, shown
from minivllm.models.config import Activation, ModelConfig
from minivllm.models.json_file import Fields, read_json
from minivllm.models.rope import as_config_field, inverse_frequencies, scale_linear, scale_llama3
from minivllm.models.safetensors_reader import read_safetensors
from minivllm.models.weights import (
    Checkpoint,
    StoredTensor,
    TokenizerSource,
    refuse_unused,
    split_rows,
)

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
#: Fields that change the arithmetic and are not implemented, with the values that switch them off (as null
#: always does). Some belong to other model types; a file that sets one means what we would not compute.
_OFF_VALUES: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "is_encoder_decoder": (False,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "no_rope_layers": ([],),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "partial_rotary_factor": (1,),
    "qk_norm": (False,),
    "quantization_config": (),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rope_interleaved": (False,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
}
_LLAMA_KINDS = ("llama", "mistral", "qwen2")
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")


def load_hf(directory: Path) -> Checkpoint:
    """Open a directory with config.json and model.safetensors, whole or sharded.

    Raises:
        ModelError: the model type or one of its settings is not implemented, or a file is missing or damaged.
        OSError: a file cannot be read.
    """
    config_path = directory / "config.json"
    fields = Fields(read_json(config_path), str(config_path))
    kind = fields.string("model_type")
    if kind not in ("gpt2", *_LLAMA_KINDS):
        known = ", ".join(("gpt2", *_LLAMA_KINDS))
        raise ModelError(f"{config_path}: model_type {shown(kind)} is not implemented; {known} are")
    for name, off_values in _OFF_VALUES.items():
        if fields[name] is not None and fields[name] not in off_values:
            raise ModelError(f"{config_path}: {name} = {shown(fields[name])} is not implemented")

    config = _gpt2_config(fields) if kind == "gpt2" else _llama_config(fields, kind)
    tensors = _all_tensors(directory)
    stored = (_gpt2_tensors if kind == "gpt2" else _llama_tensors)(directory, config, tensors)
    has_tokenizer = any((directory / name).exists() for name in _TOKENIZER_FILES)
    return Checkpoint(
        config=config,
        dtype="float32" if all(tensor.dtype == "float32" for tensor in stored.values()) else "bfloat16",
        path=directory,
        eos_token_ids=_eos_token_ids(directory, fields, config.vocab_size),
        tokenizer=TokenizerSource("hf", path=directory) if has_tokenizer else None,
        stored=stored,
    )


def _activation(fields: Fields, name: str, default: str) -> Activation:
    value = fields.string(name, default)
    if value not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ModelError(f"{fields.where}: {name} = {shown(value)} is not implemented; {known} are")
    return _ACTIVATIONS[value]


def _gpt2_config(fields: Fields) -> ModelConfig:
    hidden_size, num_heads = fields.integer("n_embd"), fields.integer("n_head")
    if num_heads < 1 or hidden_size % num_heads:
        raise ModelError(f"{fields.where}: n_embd {hidden_size} is not a multiple of n_head {num_heads}")
    return ModelConfig(
        kind="gpt2",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("n_inner", 4 * hidden_size),
        num_layers=fields.integer("n_layer"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_position=fields.integer("n_positions"),
        norm="layernorm",
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        norm_bias=True,
        activation=_activation(fields, "activation_function", "gelu_new"),
        gated_mlp=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied_head=fields.boolean("tie_word_embeddings", True),
        rope_inv_freq=None,
    )


def _llama_config(fields: Fields, kind: str) -> ModelConfig:
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", *([num_heads] if kind == "llama" else []))
    max_position = fields.integer("max_position_embeddings")
    _refuse_window(fields, kind, max_position)
    attention_bias = kind == "llama" and fields.boolean("attention_bias", False)
    config = ModelConfig(
        kind=kind,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.integer("head_dim", hidden_size // max(num_heads, 1)),
        max_position=max_position,
        norm="rmsnorm",
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        norm_bias=False,
        activation=_activation(fields, "hidden_act", "silu"),
        gated_mlp=True,
        qkv_bias=attention_bias or kind == "qwen2",
        out_bias=attention_bias,
        mlp_bias=kind == "llama" and fields.boolean("mlp_bias", False),
        tied_head=fields.boolean("tie_word_embeddings", False),
        rope_inv_freq=None,
    )
    return replace(config, rope_inv_freq=_rope(fields, config.head_dim, max_position))


def _refuse_window(fields: Fields, kind: str, max_position: int) -> None:
    """A sliding window is harmless only if it is not in use, or as long as the context."""
    layer_types = fields["layer_types"] or []
    if type(layer_types) is not list or any(layer_type != "full_attention" for layer_type in layer_types):
        raise ModelError(f"{fields.where}: layer_types = {shown(layer_types)} is not implemented")
    # Mistral knows no switch; its window is 4096 where the field is absent, and none where it is null.
    in_use = kind == "mistral" or fields.boolean("use_sliding_window", kind != "qwen2")
    window = fields.values.get("sliding_window", None if kind == "llama" else 4096)
    if in_use and window is not None and not (type(window) is int and window >= max_position):
        raise ModelError(f"{fields.where}: sliding_window = {shown(window)} is not implemented")


def _rope(fields: Fields, head_dim: int, max_position: int) -> tuple[float, ...]:
    """From ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before)."""
    name = "rope_parameters" if fields["rope_parameters"] is not None else "rope_scaling"
    values = fields[name] if fields[name] is not None else {}
    if type(values) is not dict:
        raise ModelError(f"{fields.where}: {name} is {shown(values)}; it must be an object")
    rope = Fields(values, f"{fields.where}, {name}")
    if rope.number("partial_rotary_factor", 1.0) != 1:
        raise ModelError(f"{rope.where}: partial_rotary_factor = {shown(values)} is not implemented")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    inv_freq = inverse_frequencies(head_dim, theta)

    kind = rope.string("rope_type", rope.string("type", "default"))
    if kind == "linear":
        inv_freq = scale_linear(inv_freq, rope.number("factor"))
    elif kind == "llama3":
        inv_freq = scale_llama3(
            inv_freq,
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_context=rope.integer("original_max_position_embeddings", max_position),
        )
    elif kind != "default":
        raise ModelError(
            f"{rope.where}: rope_type {shown(kind)} is not implemented; default, linear, llama3 are"
        )
    return as_config_field(inv_freq)


def _all_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of model.safetensors, or of the shards that model.safetensors.index.json names."""
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if whole.exists():
        return read_safetensors(whole)
    if not index.exists():
        hint = ""
        if any(directory.glob("*.bin")):
            hint = "; its .bin files are pickles, which are not read: save the model as safetensors"
        raise ModelError(f"{directory} has neither model.safetensors nor {index.name}{hint}")

    files = read_json(index).get("weight_map")
    if type(files) is not dict or not files:
        raise ModelError(f"{index}: weight_map is {shown(files)}; it must name a file for each tensor")
    shards: dict[str, dict[str, StoredTensor]] = {}
    tensors: dict[str, StoredTensor] = {}
    for name, file in files.items():
        if (
            type(file) is not str
            or Path(file).name != file
            or "\0" in file
            or not file.endswith(".safetensors")
        ):
            raise ModelError(
                f"{index}: {shown(file)} is not the name of a safetensors file in that directory"
            )
        if file not in shards:
            shards[file] = read_safetensors(directory / file)
        if name in shards[file]:  # left out: a mask; missing: found out where it is needed
            tensors[name] = shards[file][name]
    return tensors


def _gpt2_tensors(
    directory: Path, config: ModelConfig, tensors: dict[str, StoredTensor]
) -> dict[str, StoredTensor]:
    prefix = "transformer."
    tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    layer = {
        "ln_1.weight": "attn_norm.weight",
        "ln_1.bias": "attn_norm.bias",
        "attn.c_proj.weight": "o.weight",
        "attn.c_proj.bias": "o.bias",
        "ln_2.weight": "mlp_norm.weight",
        "ln_2.bias": "mlp_norm.bias",
        "mlp.c_fc.weight": "up.weight",
        "mlp.c_fc.bias": "up.bias",
        "mlp.c_proj.weight": "down.weight",
        "mlp.c_proj.bias": "down.bias",
    }
    names = {"wte.weight": "embed.weight", "wpe.weight": "pos_embed.weight"}
    names |= {"ln_f.weight": "final_norm.weight", "ln_f.bias": "final_norm.bias"}
    ignored = {"lm_head.weight"} if config.tied_head else set()
    if not config.tied_head:
        names["lm_head.weight"] = "head.weight"
    stored: dict[str, StoredTensor] = {}
    for i in range(config.num_layers):
        names |= {f"h.{i}.{theirs}": f"layers.{i}.{ours}" for theirs, ours in layer.items()}
        ignored |= {f"h.{i}.attn.bias", f"h.{i}.attn.masked_bias"}  # causal masks
        for part in ("weight", "bias"):
            theirs = f"h.{i}.attn.c_attn.{part}"
            ignored.add(theirs)
            if theirs in tensors:
                qkv = _from_conv1d(theirs, tensors[theirs])
                thirds = split_rows(directory, theirs, qkv, [config.hidden_size] * 3)
                stored |= {f"layers.{i}.{x}.{part}": third for x, third in zip("qkv", thirds, strict=True)}
    refuse_unused(directory, tensors, [*names, *ignored])
    for theirs, ours in names.items():
        if theirs in tensors:
            stored[ours] = _from_conv1d(theirs, tensors[theirs])
    return stored


def _from_conv1d(name: str, tensor: StoredTensor) -> StoredTensor:
    """GPT-2's linear layers are stored [inputs, outputs]; all other tensors as they are."""
    return tensor.transposed() if ".c_" in name and name.endswith(".weight") else tensor


def _llama_tensors(
    directory: Path, config: ModelConfig, tensors: dict[str, StoredTensor]
) -> dict[str, StoredTensor]:
    layer = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "q",
        "self_attn.k_proj": "k",
        "self_attn.v_proj": "v",
        "self_attn.o_proj": "o",
        "post_attention_layernorm": "mlp_norm",
        "mlp.gate_proj": "gate",
        "mlp.up_proj": "up",
        "mlp.down_proj": "down",
    }
    biased = {"q": config.qkv_bias, "k": config.qkv_bias, "v": config.qkv_bias, "o": config.out_bias}
    biased |= {"gate": config.mlp_bias, "up": config.mlp_bias, "down": config.mlp_bias}
    names = {"model.embed_tokens.weight": "embed.weight", "model.norm.weight": "final_norm.weight"}
    ignored = {"lm_head.weight"}
    if not config.tied_head:
        names["lm_head.weight"] = "head.weight"
    for i in range(config.num_layers):
        ignored.add(f"model.layers.{i}.self_attn.rotary_emb.inv_freq")  # recomputed
        for theirs, ours in layer.items():
            names[f"model.layers.{i}.{theirs}.weight"] = f"layers.{i}.{ours}.weight"
            if biased.get(ours):
                names[f"model.layers.{i}.{theirs}.bias"] = f"layers.{i}.{ours}.bias"
    refuse_unused(directory, tensors, [*names, *ignored])
    return {ours: tensors[theirs] for theirs, ours in names.items() if theirs in tensors}


def _eos_token_ids(directory: Path, fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """End tokens of generation_config.json, else of config.json, else of tokenizer_config.json; ascending.

    Ids outside the vocabulary (left over from a larger one) can never be drawn and are left out.
    """
    generation_path = directory / "generation_config.json"
    value = read_json(generation_path).get("eos_token_id") if generation_path.exists() else None
    if value is None:
        value = fields["eos_token_id"]
    if value is None:
        value = _tokenizer_eos(directory)
    ids = value if type(value) is list else [] if value is None else [value]
    if any(type(token_id) is not int for token_id in ids):
        raise ModelError(
            f"{directory}: eos_token_id is {shown(value)}; it must be one token id or a list of them"
        )
    return tuple(sorted({token_id for token_id in ids if 0 <= token_id < vocab_size}))


def _tokenizer_eos(directory: Path) -> int | None:
    config_path, tokenizer_path = directory / "tokenizer_config.json", directory / "tokenizer.json"
    if not (config_path.exists() and tokenizer_path.exists()):
        return None
    token = read_json(config_path).get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    added = read_json(tokenizer_path).get("added_tokens")
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, dict) and entry.get("content") == text and type(entry.get("id")) is int:
            return entry["id"]  # type: ignore[no-any-return]
    return None
