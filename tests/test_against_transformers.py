"""Greedy texts against implementations that are not ours: transformers' GPT-2 and Llama, and plain NanoGPT.

Small models with every structure of the real ones, saved as real ones are, read by our loaders. Each of ten
prompts is continued by 64 tokens: they must be the reference's, and the logprobs of the 20 likeliest tokens
at every step lie within ``TOLERANCE`` of its log-softmax, all in float32.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_step import Stepper, assert_follows

from minivllm import LLM, SamplingParams
from minivllm.config import ExecutorName
from minivllm.executors.base import Executor
from minivllm.executors.native import NativeExecutor
from minivllm.kv_cache.kv_pool import KVGeometry, KVPool
from minivllm.models.registry import load_checkpoint
from minivllm.models.weights import Checkpoint

pytestmark = [pytest.mark.torch, pytest.mark.transformers]
if all(importlib.util.find_spec(module) for module in ("torch", "transformers")):
    import torch
    import transformers
    from oracle_nanogpt import NanoGPT

    from minivllm.executors.torch_ import TorchExecutor

VOCABULARY = 600
CONTEXT = 256
MAX_TOKENS = 64
#: Both sum the same float32 products in different orders; on logits of up to 7 they differ by about 1e-5.
TOLERANCE = 5e-5
PROMPT_LENGTHS = (1, 2, 3, 7, 15, 16, 17, 33, 64, 150)
#: Block size, tokens computed in a step.
PAGING = ((16, 512), (16, 16), (1, 5), (256, 64), (7, 30))

Reference = Callable[[list[int]], tuple[list[int], "torch.Tensor"]]


def transformers_reference(model: Any) -> Reference:
    """``generate``, and the logits of one pass over what it generated."""

    def greedy(prompt: list[int]) -> tuple[list[int], "torch.Tensor"]:
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MAX_TOKENS,
            min_new_tokens=MAX_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        logits = model(whole).logits[0, len(prompt) - 1 : -1]
        return whole[0, len(prompt) :].tolist(), logits

    return greedy


def random_weights(model: Any) -> Any:
    """Random weights, biases and norms included, large enough for lively texts (the default is 0.02)."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                center, scale = (1.0, 0.3) if name.endswith("weight") else (0.0, 0.1)
                parameter.copy_(center + scale * torch.randn(parameter.shape, generator=generator))
            else:
                inputs = model.config.hidden_size
                parameter.copy_(1.5 * inputs**-0.5 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def gpt2(path: Path) -> Reference:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=CONTEXT,
        n_embd=96,
        n_layer=2,
        n_head=6,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = random_weights(transformers.GPT2LMHeadModel(config))
    model.save_pretrained(path)
    return transformers_reference(model)


def llama(path: Path, **settings: Any) -> Reference:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=6,
        bos_token_id=None,
        eos_token_id=None,
        **{"num_key_value_heads": 2, "rms_norm_eps": 1e-5, **settings},
    )
    model = random_weights(transformers.LlamaForCausalLM(config))
    model.save_pretrained(path)
    return transformers_reference(model)


def nanogpt(path: Path, bias: bool) -> Reference:
    arguments = {
        "n_layer": 2,
        "n_head": 6,
        "n_embd": 96,
        "block_size": CONTEXT,
        "bias": bias,
        "vocab_size": VOCABULARY,
        "dropout": 0.0,
    }
    oracle = NanoGPT.random(arguments)
    path.mkdir()
    torch.save({"model": oracle.state, "model_args": arguments}, path / "ckpt.pt")
    return lambda prompt: oracle.greedy(prompt, MAX_TOKENS)


MODELS: dict[str, Callable[[Path], Reference]] = {
    "gpt2": gpt2,
    "llama": lambda path: llama(path, rope_theta=100_000.0),
    "llama-tied": lambda path: llama(
        path, tie_word_embeddings=True, num_key_value_heads=1, head_dim=32, rms_norm_eps=1e-3
    ),
    "nanogpt": lambda path: nanogpt(path, bias=True),
    "nanogpt-no-bias": lambda path: nanogpt(path, bias=False),
}


@pytest.fixture(scope="module", params=MODELS)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Checkpoint, list[tuple[list[int], list[int], np.ndarray[Any, Any]]]]:
    """The model as our loader reads it, and for each prompt: the prompt, its continuation, its logits."""
    path = tmp_path_factory.mktemp("models") / request.param
    rng = np.random.default_rng(0)
    torch.set_num_threads(1)  # the matrices are too small for more
    with torch.inference_mode():
        reference = MODELS[request.param](path)
        texts = []
        for length in PROMPT_LENGTHS:
            prompt = rng.integers(0, VOCABULARY, length).tolist()
            tokens, logits = reference(prompt)
            texts.append((prompt, tokens, logits.numpy()))
    # Texts that repeat a few tokens for ever would show little.
    assert np.mean([len(set(tokens)) for _, tokens, _ in texts]) > 15
    return load_checkpoint(path / "ckpt.pt" if (path / "ckpt.pt").exists() else path), texts


def torch_executor(checkpoint: Checkpoint, pool: KVPool) -> Executor:
    return TorchExecutor(checkpoint, pool, "float32")


def native_executor(checkpoint: Checkpoint, pool: KVPool) -> Executor:
    return NativeExecutor(checkpoint, pool, "float32", threads=2)


@pytest.mark.parametrize("make", [torch_executor, native_executor], ids=["torch", "native"])
def test_greedy_texts_and_logprobs(case: Any, make: Callable[[Checkpoint, KVPool], Executor]) -> None:
    """Five of the prompts, step by step, each with another block size and chunk."""
    checkpoint, texts = case
    for (block_size, chunk), (prompt, tokens, logits) in zip(PAGING, texts[1::2], strict=True):
        pool = KVPool.reserve(geometry(checkpoint, block_size))
        table = np.random.default_rng(chunk).permutation(pool.geometry.num_blocks).tolist()
        stepper = Stepper(make(checkpoint, pool), block_size, table, chunk)
        assert_follows(stepper, prompt, tokens, logits, TOLERANCE)


@pytest.mark.parametrize("executor", ["torch", "native"])
def test_greedy_texts_through_the_engine(case: Any, executor: ExecutorName) -> None:
    """All ten at once, in chunks, in a pool that cannot hold them all: some are preempted and recomputed."""
    checkpoint, texts = case
    llm = LLM(
        checkpoint.path,
        dtype="float32",
        executor=executor,
        device="cpu",
        block_size=8,
        num_blocks=40,
        max_num_batched_tokens=48,
    )
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    outputs = llm.generate([prompt for prompt, _, _ in texts], params, use_tqdm=False)
    assert llm.engine.scheduler.num_preemptions > 0
    for output, (_, tokens, logits) in zip(outputs, texts, strict=True):
        best = np.sort(logits, axis=1)[:, -2:]
        assert (best[:, 1] - best[:, 0]).min() > 1e-5  # so that there is nothing to excuse
        assert list(output.outputs[0].token_ids) == tokens


def geometry(checkpoint: Checkpoint, block_size: int) -> KVGeometry:
    config, num_blocks = checkpoint.config, -(-CONTEXT // block_size)
    return KVGeometry(
        config.num_layers, num_blocks, config.num_kv_heads, block_size, config.head_dim, "float32"
    )
