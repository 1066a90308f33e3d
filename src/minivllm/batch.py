"""Batch: all that an executor needs to run one step, as plain integer arrays.

This is the whole boundary between bookkeeping and arithmetic: executors see no sequences or requests,
and nothing below them sees tensors.

    sequence          A: 3 prompt tokens, 2 cached           B: decode          C: chunk of a prompt
    token_ids       [ a2 ]                                  [ b7 ]             [ c0 c1 c2 c3 ]
    positions       [ 2 ]                                   [ 7 ]              [ 0 1 2 3 ]
    query_start     [ 0, 1, 2, 6 ]
    context_lens    [ 3, 8, 4 ]            tokens in the cache after this step's writes
    logit_rows      [ 0, 1 ]               rows that yield a token; C's prompt goes on

A row yields several tokens, and occurs several times in ``logit_rows``, where samples of one request begin.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

NO_SLOT = (
    -1
)  #: in ``slot_mapping``: the row's K and V are in the cache already, in a block that others may share

NO_ROWS: IntArray = np.empty(0, np.int32)
_NO_HIDDEN: npt.NDArray[np.float32] = np.empty((0, 0), np.float32)


@dataclass(frozen=True)
class Batch:
    """One step: T token rows of S sequences, which yield R tokens. int32, C-contiguous."""

    token_ids: IntArray  #: [T]
    positions: IntArray  #: [T] absolute position of each row in its sequence
    slot_mapping: (
        IntArray  #: [T] slot (block_id * block_size + offset) that K and V of the row go to, or NO_SLOT
    )
    query_start: IntArray  #: [S + 1] rows query_start[s] : query_start[s + 1] belong to sequence s
    context_lens: IntArray  #: [S] tokens of sequence s in the cache once this step has written
    block_tables: IntArray  #: [S, W] physical block ids in order; entries beyond the context are 0
    logit_rows: IntArray  #: [R] indices into the T rows, none less than the one before
    block_copies: IntArray  #: [C, 3] (source block, destination block, slots), done before any write
    hidden_rows: IntArray = field(default_factory=lambda: NO_ROWS)
    """[E] indices, ascending, of rows whose hidden states are asked for, whether they yield tokens or not"""


@dataclass(frozen=True)
class SamplingBatch:
    """How each of the R logit rows becomes a token. One entry a row unless said otherwise."""

    temperature: npt.NDArray[np.float32]
    top_k: IntArray  #: 0: all
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    repetition_penalty: npt.NDArray[np.float32]
    presence_penalty: npt.NDArray[np.float32]
    frequency_penalty: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    choice: IntArray  #: index of the sample within its request
    position: IntArray  #: index in its sequence of the token to be drawn
    num_logprobs: IntArray  #: -1: none; 0: the chosen token's; n: and the n likeliest
    given_token_ids: (
        IntArray  #: the token, where it is known and only its logprobs are asked for; -1: draw it
    )
    penalty_start: IntArray  #: [R + 1] row r's seen tokens are penalty_token_ids[start[r] : start[r + 1]]
    penalty_token_ids: IntArray  #: distinct tokens of prompt and output; empty for rows without penalties
    penalty_counts: IntArray  #: how often each occurs in the output (0: in the prompt only)
    bias_start: IntArray  #: [R + 1] likewise for the next two
    bias_token_ids: IntArray
    bias_values: npt.NDArray[np.float32]  #: added to the logit; -inf bans the token
    mask_row: IntArray  #: row of ``masks`` that says which tokens may be drawn; -1: all
    masks: npt.NDArray[np.uint32]
    """[M, W] bits, 32 · W of them at least the vocabulary; token t's is bit t % 32 of word t // 32. They may
    still be written while the model runs: see ``executors.base.Executor``."""


@dataclass(frozen=True)
class StepResult:
    """What an executor gives back for R logit rows and E hidden rows. K is the largest num_logprobs (≥ 0)."""

    token_ids: IntArray  #: [R]
    logprobs: npt.NDArray[np.float32]  #: [R] of the chosen token under the raw logits; NaN where none asked
    ranks: IntArray  #: [R] 1 = likeliest, under the raw logits; 0 where none asked
    top_token_ids: IntArray  #: [R, K] likeliest first, ties by lowest id; -1 beyond a row's num_logprobs
    top_logprobs: npt.NDArray[np.float32]  #: [R, K]; NaN beyond a row's num_logprobs
    hidden: npt.NDArray[np.float32] = field(default_factory=lambda: _NO_HIDDEN)
    """[E, hidden_size] of the batch's ``hidden_rows``: what the last norm gives, and the head reads"""
