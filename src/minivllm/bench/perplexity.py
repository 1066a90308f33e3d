"""Perplexity of a model under each quantisation, on a fixed text: what fewer bits cost.

    python -m minivllm.bench.perplexity smollm2-135m --formats none,auto,int8,int4

The text is the start of Python's own language reference, which every interpreter carries (``pydoc_data``),
cut into windows that the model sees one by one. Knows nothing of the engine: it drives the executor by hand,
and reads each token's logprob by forcing it (logprobs are of the raw logits).
"""

import argparse
import math
from itertools import product
from pydoc_data.topics import topics

import numpy as np

from minivllm.batch import Batch, SamplingBatch
from minivllm.config import Quantization
from minivllm.executors.native import NativeExecutor
from minivllm.kv_cache.kv_pool import KVDtype, KVGeometry, KVPool
from minivllm.models.registry import load_checkpoint, resolve_model
from minivllm.models.weights import Checkpoint, WeightDtype
from minivllm.text.tokenizer import load_tokenizer

WINDOW = 512  #: tokens that the model sees at a time
NUM_TOKENS = 20_000


def text_tokens(checkpoint: Checkpoint, num_tokens: int = NUM_TOKENS) -> list[int]:
    """The first tokens of the text.

    Raises:
        ValueError: the checkpoint has no tokenizer.
    """
    source = checkpoint.tokenizer
    if source is None:
        raise ValueError(f"{checkpoint.path} has no tokenizer")
    text = "\n".join(topics[name] for name in sorted(topics))[: num_tokens * 8]
    return load_tokenizer(source.kind, source.path, source.data).encode(text)[:num_tokens]


def perplexity(
    checkpoint: Checkpoint,
    tokens: list[int],
    dtype: WeightDtype,
    quantization: Quantization | None,
    threads: int | None = None,
    kv_dtype: KVDtype | None = None,
) -> float:
    """exp of the mean negative logprob of every token but the first of each window.

    Args:
        kv_dtype: of the cache; None: ``dtype``.
        others: as in ``NativeExecutor``.
    """
    config = checkpoint.config
    kv_dtype = kv_dtype or dtype
    geometry = KVGeometry(config.num_layers, 1, config.num_kv_heads, WINDOW, config.head_dim, kv_dtype)
    executor = NativeExecutor(checkpoint, KVPool.reserve(geometry), dtype, threads, quantization)
    total, count = 0.0, 0
    for start in range(0, len(tokens) - 1, WINDOW):
        window = np.array(tokens[start : start + WINDOW], np.int32)
        if len(window) < 2:
            break
        result = executor.execute(_batch(window[:-1]), _given(window[1:]))
        assert np.array_equal(result.token_ids, window[1:])
        total -= float(result.logprobs.sum(dtype=np.float64))
        count += len(window) - 1
    return math.exp(total / count)


def _batch(tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Batch:
    """One sequence from its beginning, in block 0; every row yields a token."""
    rows = np.arange(len(tokens), dtype=np.int32)
    return Batch(
        token_ids=tokens,
        positions=rows,
        slot_mapping=rows,
        query_start=np.array([0, len(tokens)], np.int32),
        context_lens=np.array([len(tokens)], np.int32),
        block_tables=np.zeros((1, 1), np.int32),
        logit_rows=rows,
        block_copies=np.empty((0, 3), np.int32),
    )


def _given(tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> SamplingBatch:
    """Rows that report the logprobs of these tokens."""
    rows = len(tokens)
    zeros, starts = np.zeros(rows, np.int32), np.zeros(rows + 1, np.int32)
    nothing = np.empty(0, np.int32)
    return SamplingBatch(
        temperature=np.zeros(rows, np.float32),
        top_k=zeros,
        top_p=np.ones(rows, np.float32),
        min_p=np.zeros(rows, np.float32),
        repetition_penalty=np.ones(rows, np.float32),
        presence_penalty=np.zeros(rows, np.float32),
        frequency_penalty=np.zeros(rows, np.float32),
        seed=np.zeros(rows, np.uint64),
        choice=zeros,
        position=zeros,
        num_logprobs=zeros,
        given_token_ids=tokens,
        penalty_start=starts,
        penalty_token_ids=nothing,
        penalty_counts=nothing,
        bias_start=starts,
        bias_token_ids=nothing,
        bias_values=np.empty(0, np.float32),
    )


def main() -> None:
    """Print one line for each format, the first being what the others are held against."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--kv-cache-dtypes", default="auto", help="auto: as --dtype; or as in EngineConfig")
    parser.add_argument("--formats", default="none,auto", help="of none, auto, int8, int4")
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS)
    options = parser.parse_args()
    checkpoint = load_checkpoint(resolve_model(options.model))
    tokens = text_tokens(checkpoint, options.tokens)
    first = None
    for name, cache in product(options.formats.split(","), options.kv_cache_dtypes.split(",")):
        quantization, kv_dtype = None if name == "none" else name, None if cache == "auto" else cache
        value = perplexity(checkpoint, tokens, options.dtype, quantization, kv_dtype=kv_dtype)
        first = first or value
        print(f"{name:5} {cache:9} {value:8.4f}  {100 * (value / first - 1):+.2f} %", flush=True)


if __name__ == "__main__":
    main()
