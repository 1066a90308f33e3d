"""SmolLM2 through the torch executor gives the tokens of transformers on the same dequantised weights.

The reference reads the GGUF by the ``gguf`` package and shares no code with our loader.
"""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import find_real_model
from helpers_step import Stepper, assert_follows

from minivllm.kv_cache.kv_pool import KVGeometry, KVPool
from minivllm.models.registry import load_checkpoint

pytestmark = [pytest.mark.torch, pytest.mark.transformers, pytest.mark.real_model]
if all(importlib.util.find_spec(module) for module in ("torch", "transformers")):
    import gguf
    import torch
    import transformers

    from minivllm.executors.torch_ import TorchExecutor

MAX_TOKENS = 24
#: On logits of up to 30, summed in different orders over 30 layers.
TOLERANCE = 1e-3
LLAMA_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def transformers_llama(path: Path) -> Any:
    reader = gguf.GGUFReader(path)

    def field(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    heads, kv_heads = field("attention.head_count"), field("attention.head_count_kv")
    state = {
        "model.embed_tokens.weight": tensors["token_embd.weight"],
        "model.norm.weight": tensors["output_norm.weight"],
    }
    for i in range(field("block_count")):
        for theirs, ours in LLAMA_NAMES.items():
            weight = tensors[f"blk.{i}.{theirs}.weight"]
            if theirs in ("attn_q", "attn_k"):
                # GGUF rotates pairs of neighbouring rows; transformers rows j and j + head_dim / 2.
                pairs = weight.reshape(heads if theirs == "attn_q" else kv_heads, -1, 2, weight.shape[1])
                weight = pairs.swapaxes(1, 2).reshape(weight.shape)
            state[f"model.layers.{i}.{ours}.weight"] = weight
    vocabulary, hidden = tensors["token_embd.weight"].shape
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=field("context_length"),
        rms_norm_eps=float(field("attention.layer_norm_rms_epsilon")),
        rope_theta=float(field("rope.freq_base")),
        tie_word_embeddings="output.weight" not in tensors,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(
        {name: torch.from_numpy(np.array(value)) for name, value in state.items()}, strict=False
    )
    assert missing in ([], ["lm_head.weight"]) and not unexpected
    return model


def test_greedy_texts_are_those_of_transformers() -> None:
    path = find_real_model()
    assert path is not None
    checkpoint = load_checkpoint(path)
    config = checkpoint.config
    pool = KVPool.reserve(
        KVGeometry(config.num_layers, 16, config.num_kv_heads, 16, config.head_dim, "float32")
    )
    executor = TorchExecutor(checkpoint, pool, "float32")
    model = transformers_llama(path)
    torch.set_num_threads(1)  # two that wait for each other on a busy machine are far slower than one
    rng = np.random.default_rng(0)
    with torch.inference_mode():
        for length in (1, 17, 60):
            prompt = rng.integers(0, config.vocab_size, length).tolist()
            whole = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, length, dtype=torch.int64),
                max_new_tokens=MAX_TOKENS,
                min_new_tokens=MAX_TOKENS,
                do_sample=False,
            )
            logits = model(whole).logits[0, length - 1 : -1, : config.vocab_size].numpy()
            table = rng.permutation(16).tolist()
            stepper = Stepper(executor, 16, table, chunk=16)
            assert_follows(stepper, prompt, whole[0, length:].tolist(), logits, TOLERANCE)
