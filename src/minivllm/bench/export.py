"""Writing a loaded checkpoint in the formats that other engines read, so that all run the same weights.

GGUF in float16, bfloat16, Q8_0 or Q4_0, with the ``gguf`` package; a directory of safetensors in bfloat16 as
Hugging Face has it. Llama and Qwen2 kinds only. The vocabulary is made up where the checkpoint brings none
from a GGUF: the files are for measuring speed by token ids. Used by ``bench`` and
benchmarks/make_random_model.py.
"""

import json
import math
import struct
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from minivllm.errors import ConfigError, ModelError
from minivllm.models.config import ModelConfig, tensor_shapes
from minivllm.models.rope import inverse_frequencies
from minivllm.models.weights import Checkpoint

try:
    import gguf
except ImportError as error:
    raise ConfigError("models for other engines are written with gguf: pip install '.[bench]'") from error

GGUFType = Literal["F16", "BF16", "Q8_0", "Q4_0"]
Floats = npt.NDArray[np.float32]

_GGUF_NAMES = {
    "attn_norm": "attn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
    "mlp_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
    "embed": "token_embd", "final_norm": "output_norm", "head": "output",
}  # fmt: skip
_HF_NAMES = {
    "attn_norm": "input_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj",
    "v": "self_attn.v_proj", "o": "self_attn.o_proj", "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    "embed": "embed_tokens", "final_norm": "norm", "head": "lm_head",
}  # fmt: skip


def write_gguf(checkpoint: Checkpoint, path: Path, kind: GGUFType) -> None:
    """Write the checkpoint to ``path``, matrices in that type, one tensor in memory at a time.

    With Q4_0 the embedding and the head are Q8_0, as in ggml's own mixtures they are kept more precisely.

    Raises:
        ModelError: the model is not of a kind that can be written.
    """
    config = checkpoint.config
    refuse_unwritable(config)
    writer = gguf.GGUFWriter(path, config.kind)
    for key, value in {
        "block_count": config.num_layers, "context_length": config.max_position,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads, "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim, "vocab_size": config.vocab_size,
    }.items():  # fmt: skip
        writer.add_uint32(f"{config.kind}.{key}", value)
    writer.add_float32(f"{config.kind}.attention.layer_norm_rms_epsilon", config.norm_eps)
    writer.add_float32(f"{config.kind}.rope.freq_base", rope_base(config))
    writer.add_file_type({"F16": 1, "BF16": 32, "Q8_0": 7, "Q4_0": 2}[kind])  # ggml's enum llama_ftype
    _add_vocabulary(writer, checkpoint)
    numbers = {name: _gguf_number(name, shape, kind) for name, shape in tensor_shapes(config).items()}
    for name, shape in tensor_shapes(config).items():
        stored_shape, dtype = _gguf_layout(shape, numbers[name])
        num_bytes = math.prod(stored_shape) * dtype.itemsize
        writer.add_tensor_info(_gguf_name(name), stored_shape, dtype, num_bytes, numbers[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in checkpoint.tensors():
        values = tensor.to_float32()
        if config.kind == "llama" and _part(tensor.name) in ("q", "k"):
            values = _pairs_from_halves(values, config.head_dim)
        writer.write_tensor_data(gguf.quants.quantize(values, numbers[tensor.name]))
    writer.close()


def write_hf(checkpoint: Checkpoint, directory: Path) -> None:
    """Write config.json and model.safetensors (bfloat16) to an existing directory.

    Raises:
        ModelError: the model is not of a kind that can be written.
    """
    config = checkpoint.config
    refuse_unwritable(config)
    fields = {
        "architectures": ["LlamaForCausalLM" if config.kind == "llama" else "Qwen2ForCausalLM"],
        "model_type": config.kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": rope_base(config),
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied_head,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(fields, indent=1))
    # The format: the header's length (uint64), the header, the tensors' bytes one after the other.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensor_shapes(config).items():
        start, end = end, end + 2 * math.prod(shape)
        header[_hf_name(name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in checkpoint.tensors():
            file.write(gguf.quants.quantize(tensor.to_float32(), gguf.GGMLQuantizationType.BF16).tobytes())


def refuse_unwritable(config: ModelConfig) -> None:
    """Refuse what these formats' plain Llama and Qwen2 do not have.

    Raises:
        ModelError: the model is of another kind, or has biases or a rotary scaling that this does not write.
    """
    plain = config.qkv_bias == (config.kind == "qwen2") and not config.out_bias and not config.mlp_bias
    if config.kind not in ("llama", "qwen2") or not plain or config.rope_inv_freq is None:
        raise ModelError(
            f"other engines cannot be given this {config.kind} model; only plain llama and qwen2 are written"
        )
    rope_base(config)


def rope_base(config: ModelConfig) -> float:
    """The base (theta) that the model's rotary frequencies are powers of.

    Raises:
        ModelError: they are scaled in a way that has no base.
    """
    assert config.rope_inv_freq is not None, "the caller has checked"
    if config.head_dim < 4:
        return 10000.0
    base = float(f"{config.rope_inv_freq[1] ** (-config.head_dim / 2):.6g}")
    if not np.allclose(inverse_frequencies(config.head_dim, base), config.rope_inv_freq, rtol=1e-4):
        raise ModelError(f"other engines cannot be given this {config.kind} model: its rotary is scaled")
    return base


def _part(name: str) -> str:
    """ "layers.3.q.weight" → "q"."""
    return name.split(".")[-2]


def _gguf_name(name: str) -> str:
    *layer, part, suffix = name.split(".")
    return ".".join([*(["blk", layer[1]] if layer else []), _GGUF_NAMES[part], suffix])


def _hf_name(name: str) -> str:
    *layer, part, suffix = name.split(".")
    if part == "head":
        return f"{_HF_NAMES[part]}.{suffix}"
    return ".".join(["model", *layer, _HF_NAMES[part], suffix])


def _gguf_number(name: str, shape: tuple[int, ...], kind: GGUFType) -> gguf.GGMLQuantizationType:
    if len(shape) == 1:
        return gguf.GGMLQuantizationType.F32
    if kind == "Q4_0" and _part(name) in ("embed", "head"):
        kind = "Q8_0"
    return gguf.GGMLQuantizationType[kind]


def _gguf_layout(
    shape: tuple[int, ...], number: gguf.GGMLQuantizationType
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The shape and dtype of the array that ``quantize`` makes."""
    if number is gguf.GGMLQuantizationType.F32:
        return shape, np.dtype(np.float32)
    if number is gguf.GGMLQuantizationType.F16:
        return shape, np.dtype(np.float16)
    return tuple(gguf.quant_shape_to_byte_shape(shape, number)), np.dtype(np.uint8)


def _pairs_from_halves(values: Floats, head_dim: int) -> Floats:
    """Rows of q or k in the order of GGUF's "llama": what is rotated together side by side."""
    halves = values.reshape(-1, 2, head_dim // 2, *values.shape[1:])  # [head, element of the pair, i, …]
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _add_vocabulary(writer: gguf.GGUFWriter, checkpoint: Checkpoint) -> None:
    """The checkpoint's own, if it came from a GGUF; else one of byte pairs that means nothing."""
    source = checkpoint.tokenizer
    if source is None or source.kind != "gguf" or source.data is None:
        letters = [chr(i + 256) for i in range(checkpoint.config.vocab_size)]
        letters[:3] = ["a", "b", "ab"][: len(letters)]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(letters)
        writer.add_token_types([1] * len(letters))
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        return
    for key, value in source.data.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
