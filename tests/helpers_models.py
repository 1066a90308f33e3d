"""Tiny checkpoints in every format, written by the formats' own libraries; and ways to damage files."""

import json
import string
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from helpers_quants import quantized
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from minivllm.errors import ModelError
from minivllm.models.registry import load_checkpoint

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB, CONTEXT = 64, 96, 2, 4, 2, 16, 40, 128
#: No damaged file may make the loader allocate more; all the files here are far smaller.
MEMORY_LIMIT = 64 * 2**20

LLAMA_LAYER = {
    "input_layernorm.weight": (HIDDEN,),
    "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
    "post_attention_layernorm.weight": (HIDDEN,),
    "mlp.gate_proj.weight": (INNER, HIDDEN),
    "mlp.up_proj.weight": (INNER, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INNER),
}
LLAMA_CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
GPT2_CONFIG = {
    "model_type": "gpt2",
    "vocab_size": VOCAB,
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": CONTEXT,
    "eos_token_id": 2,
}
#: Hugging Face's names → GGUF's, and ours
GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUR_NAMES = {
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

Tensors = dict[str, np.ndarray[Any, Any]]
#: The tokens of ``write_tiny_model``.
CHARACTERS = ["<eos>", *(string.ascii_lowercase + " .,:;!?-'()0123")][:VOCAB]


def random_tensors(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def llama_tensors(tied: bool = True, qkv_bias: bool = False, all_bias: bool = False) -> Tensors:
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for i in range(LAYERS):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in LLAMA_LAYER.items()}
        for name, (*outputs, _) in ((n, s) for n, s in LLAMA_LAYER.items() if "proj" in n):
            if all_bias or (qkv_bias and "o_proj" not in name and "self_attn" in name):
                shapes[f"model.layers.{i}.{name}".replace(".weight", ".bias")] = tuple(outputs)
    return random_tensors(shapes)


def wide_llama(scale: int) -> tuple[Tensors, dict[str, Any]]:
    """A Llama ``scale`` times as wide, its weights as small as that needs; and what its GGUF says of it."""
    tensors = random_tensors(
        {
            name: tuple(size if size == VOCAB else scale * size for size in x.shape)
            for name, x in llama_tensors().items()
        }
    )
    for x in tensors.values():
        x *= 1.5 / np.sqrt(x.shape[1]) if x.ndim == 2 else 1
    return tensors, {"llama.embedding_length": scale * HIDDEN, "llama.feed_forward_length": scale * INNER}


def our_llama_name(name: str) -> str:
    name = name.replace("model.embed_tokens", "embed").replace("model.norm", "final_norm")
    name = name.replace("lm_head", "head").removeprefix("model.")
    for theirs, ours in OUR_NAMES.items():
        name = name.replace(theirs, ours)
    return name


def gpt2_tensors() -> Tensors:
    """As transformers names and shapes them: Conv1D weights are [inputs, outputs]."""
    shapes = {"wte.weight": (VOCAB, HIDDEN), "wpe.weight": (CONTEXT, HIDDEN)}
    shapes |= {"ln_f.weight": (HIDDEN,), "ln_f.bias": (HIDDEN,)}
    for i in range(LAYERS):
        linears = {"attn.c_attn": (HIDDEN, 3 * HIDDEN), "attn.c_proj": (HIDDEN, HIDDEN)}
        linears |= {"mlp.c_fc": (HIDDEN, 4 * HIDDEN), "mlp.c_proj": (4 * HIDDEN, HIDDEN)}
        for name, shape in linears.items():
            shapes |= {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[1:]}
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"h.{i}.{norm}.weight": (HIDDEN,), f"h.{i}.{norm}.bias": (HIDDEN,)}
    return random_tensors(shapes)


def write_hf(directory: Path, config: dict[str, Any], tensors: Tensors, dtype: str = "float32") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    target = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    kept = {
        name: value.astype(target) if value.dtype == np.float32 else value for name, value in tensors.items()
    }
    save_file(
        {name: np.ascontiguousarray(value) for name, value in kept.items()}, directory / "model.safetensors"
    )
    return directory


def gguf_name(name: str) -> str:
    name = name.replace("model.layers.", "blk.").replace("model.embed_tokens", "token_embd")
    name = name.replace("model.norm", "output_norm").replace("lm_head", "output")
    for theirs, ours in GGUF_NAMES.items():
        name = name.replace(theirs, ours)
    return name


def gguf_pairs(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """q's or k's rows as the Llama converter of llama.cpp orders them: a head's halves interleaved."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    tensors: Tensors,
    kind: str = "llama",
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    more: Tensors | None = None,
) -> Path:
    """A GGUF of the tensors that ``llama_tensors`` names; ``metadata`` replaces values, None removes one."""
    writer = gguf.GGUFWriter(path, kind)
    values: dict[str, Any] = {
        f"{kind}.block_count": LAYERS,
        f"{kind}.context_length": CONTEXT,
        f"{kind}.embedding_length": HIDDEN,
        f"{kind}.feed_forward_length": INNER,
        f"{kind}.attention.head_count": HEADS,
        f"{kind}.attention.head_count_kv": KV_HEADS,
        f"{kind}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{kind}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCAB)],
        "tokenizer.ggml.token_type": [1] * VOCAB,
        "tokenizer.ggml.eos_token_id": 2,
        **(metadata or {}),
    }
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    add[bool] = writer.add_bool
    for key, value in values.items():
        if value is not None:
            add[type(value)](key, value)
    for name, value in tensors.items():
        name = gguf_name(name)
        if kind == "llama" and "attn_q." in name:
            value = gguf_pairs(value, HEADS)
        if kind == "llama" and "attn_k." in name:
            value = gguf_pairs(value, KV_HEADS)
        if value.ndim == 2 and quantization != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, quantized(value, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(name, value)
    for name, value in (more or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def loaded(path: Path) -> Tensors:
    """Every tensor of a checkpoint, in float32, by canonical name."""
    result = {}
    for tensor in load_checkpoint(path).tensors():
        # A copy: not a view of a file that a test may damage.
        result[tensor.name] = tensor.to_float32().copy()
        assert result[tensor.name].shape == tensor.shape and result[tensor.name].dtype == np.float32
        assert tensor.data.flags.c_contiguous and tensor.data.flags.aligned
    return result


def assert_same(actual: Tensors, expected: Tensors) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


def assert_refused(path: Path, *words: str) -> str:
    """Loading fails with one ModelError, one line long, that contains the words."""
    with pytest.raises(ModelError) as caught:
        load_checkpoint(path)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700
    for word in words:
        assert word in message, message
    return message


def prefix_lengths(size: int, header: int) -> Iterator[int]:
    """Every length in the first bytes, then a sample over the header and over the whole."""
    yield from range(min(48, size))
    yield from range(48, min(header, size), max(1, header // 60))
    yield from range(header, size, max(1, (size - header) // 20))
    yield size - 1


def assert_prefixes_refused(file: Path, header: int, load: Callable[[], object]) -> None:
    """``load`` says ModelError, and nothing else, for ``file`` cut at many lengths."""
    whole = file.read_bytes()
    for length in prefix_lengths(len(whole), header):
        file.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            load()
    file.write_bytes(whole)


def load_or_refuse(load: Callable[[], object]) -> bool:
    """Whether ``load`` succeeds. It may say ModelError, but nothing else, and must not allocate much."""
    tracemalloc.start()
    try:
        load()
        return True
    except ModelError:
        return False
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MEMORY_LIMIT, f"{peak} bytes were allocated"


def write_tiny_model(directory: Path) -> Path:
    """A tiny random Llama with a tokenizer of single characters and a chat template."""
    write_hf(directory, LLAMA_CONFIG | {"eos_token_id": 0}, llama_tensors())
    backend = Tokenizer(models.BPE({c.replace(" ", "Ġ"): i for i, c in enumerate(CHARACTERS)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    backend.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}. {% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return directory
