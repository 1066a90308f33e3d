"""Executors driven by hand, without engine or scheduler: one sequence, its batches, random checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minivllm.batch import Batch, StepResult
from minivllm.executors.base import Executor
from minivllm.models.config import ModelConfig, tensor_shapes
from minivllm.models.weights import Checkpoint, StoredTensor
from minivllm.sampler import sampling_batch
from minivllm.sampling_params import SamplingParams
from minivllm.sequence import Sequence

GREEDY = SamplingParams(temperature=0, logprobs=20)


@dataclass
class Stepper:
    """One sequence in its own blocks of an executor's pool, computed ``chunk`` tokens a step at most."""

    executor: Executor
    block_size: int
    block_table: list[int]  #: physical blocks in order, enough for every token to come
    chunk: int
    num_computed: int = 0

    def step(self, token_ids: list[int]) -> StepResult:
        """Compute what is not computed of ``token_ids`` (the sequence so far); draw the next greedily."""
        while True:
            start, end = self.num_computed, min(self.num_computed + self.chunk, len(token_ids))
            done = end == len(token_ids)
            sequence = Sequence(0, "r", token_ids, len(token_ids), GREEDY, seed=0, max_num_tokens=10_000)
            batch = one_sequence_batch(token_ids[start:end], start, self.block_table, self.block_size, done)
            result = self.executor.execute(batch, sampling_batch([sequence] if done else []))
            self.num_computed = end
            if done:
                return result


def one_sequence_batch(
    token_ids: list[int], start: int, block_table: list[int], block_size: int, draws: bool
) -> Batch:
    """The batch of tokens start : start + len(token_ids) of one sequence.

    Args:
        draws: the last row yields a token, and its hidden state is asked for.
    """
    positions = np.arange(start, start + len(token_ids), dtype=np.int32)
    table = np.array(block_table, np.int32)
    last = np.array([len(token_ids) - 1] if draws else [], np.int32)
    return Batch(
        token_ids=np.array(token_ids, np.int32),
        positions=positions,
        slot_mapping=table[positions // block_size] * np.int32(block_size) + positions % np.int32(block_size),
        query_start=np.array([0, len(token_ids)], np.int32),
        context_lens=np.array([start + len(token_ids)], np.int32),
        block_tables=table[None],
        logit_rows=last,
        block_copies=np.empty((0, 3), np.int32),
        hidden_rows=last,
    )


def merged(batches: list[Batch]) -> Batch:
    """One batch of the batches' sequences, in order."""
    firsts = np.cumsum([0, *(len(batch.token_ids) for batch in batches)]).astype(np.int32)
    width = max(batch.block_tables.shape[1] for batch in batches)
    tables = [np.pad(b.block_tables, ((0, 0), (0, width - b.block_tables.shape[1]))) for b in batches]
    starts = [b.query_start[:-1] + first for b, first in zip(batches, firsts, strict=False)]
    return Batch(
        token_ids=np.concatenate([batch.token_ids for batch in batches]),
        positions=np.concatenate([batch.positions for batch in batches]),
        slot_mapping=np.concatenate([batch.slot_mapping for batch in batches]),
        query_start=np.concatenate([*starts, firsts[-1:]]),
        context_lens=np.concatenate([batch.context_lens for batch in batches]),
        block_tables=np.concatenate(tables),
        logit_rows=np.concatenate([b.logit_rows + first for b, first in zip(batches, firsts, strict=False)]),
        block_copies=np.concatenate([batch.block_copies for batch in batches]),
        hidden_rows=np.concatenate(
            [b.hidden_rows + first for b, first in zip(batches, firsts, strict=False)]
        ),
    )


def make_checkpoint(config: ModelConfig, tensors: Mapping[str, np.ndarray[Any, Any]]) -> Checkpoint:
    """A checkpoint of float32 arrays by canonical name."""
    stored = {name: StoredTensor(a.shape, "float32", lambda a=a: a) for name, a in tensors.items()}
    return Checkpoint(config, "float32", Path("memory"), eos_token_ids=(), tokenizer=None, stored=stored)


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Random weights by canonical name, biases and norms included, large enough for lively texts."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        scale = 0.3 if len(shape) == 1 else 1.5 * shape[1] ** -0.5
        values = rng.normal(0, scale, shape) + (1.0 if "norm.weight" in name else 0.0)
        tensors[name] = values.astype(np.float32)
    return tensors


def assert_follows(
    stepper: Stepper, prompt: list[int], tokens: list[int], logits: np.ndarray[Any, Any], tolerance: float
) -> None:
    """The stepper draws the reference's tokens and gives its logprobs.

    Args:
        stepper: fresh.
        prompt: the prompt.
        tokens: the reference's greedy continuation.
        logits: [len(tokens), vocabulary] of the reference, from which it took each token.
        tolerance: absolute, on the logprobs of the 20 likeliest tokens.

    Only where the reference's two best logits lie within 1e-5 of each other may another token be drawn; the
    rest is compared with the reference's token forced.
    """
    sequence = list(prompt)
    largest = logits.max(axis=1, keepdims=True).astype(np.float64)
    logprobs = logits - (largest + np.log(np.exp(logits - largest).sum(axis=1, keepdims=True)))
    for i, token in enumerate(tokens):
        result = stepper.step(sequence)
        top = result.top_token_ids[0]
        np.testing.assert_allclose(
            result.top_logprobs[0], logprobs[i, top], rtol=0, atol=tolerance, err_msg=f"token {i}"
        )
        # None of the others is likelier than those that are said to be the likeliest.
        others = np.delete(logprobs[i], top)
        assert others.size == 0 or others.max() <= result.top_logprobs[0, -1] + tolerance
        if result.token_ids[0] != token:
            second, first = np.sort(logits[i])[-2:]
            assert first - second <= 1e-5, f"token {i} is {result.token_ids[0]}, not {token}"
        sequence.append(token)
