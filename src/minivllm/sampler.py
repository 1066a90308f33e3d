"""The sampler: how one row of logits becomes a token and its logprobs. This file is the definition.

Each row is drawn by a pure function of its logits and its own entries of the SamplingBatch; rows never see
each other. The C++ sampler and every executor are held to what is written here. Knows nothing of models,
blocks or devices.

    logits, float32
      ├─► raw logprobs and ranks (what a client sees)                     float64 from here on
      └─► mask ─► + bias ─► penalties ─► temperature 0? the largest, lowest id first
                                      └► / temperature ─► min_p ─► top_k ─► top_p ─► draw
"""

import re
from collections.abc import Mapping
from collections.abc import Sequence as AnySequence

import numpy as np
import numpy.typing as npt

from minivllm.batch import IntArray, SamplingBatch, StepResult
from minivllm.sampling_params import SamplingParams
from minivllm.sequence import Sequence

FloatArray = npt.NDArray[np.float64]


def sampling_batch(
    sequences: AnySequence[Sequence],
    positions: AnySequence[int] | None = None,
    masks: tuple[IntArray, npt.NDArray[np.uint32]] | None = None,
) -> SamplingBatch:
    """The arrays for the rows of a step that yield a token: row r is one of ``sequences[r]``.

    Called every step, so rows without penalties and biases cost no more than their numbers.

    Args:
        sequences: whose rows these are.
        positions: index in its sequence of the token that each row yields. One that is there already is not
            drawn: its logprobs are asked for. None: every row draws the token after the last.
        masks: ``mask_row`` and ``masks``; None: every row may draw every token.
    """
    if positions is None:
        positions = [len(sequence.token_ids) for sequence in sequences]
    # A numpy call costs more than a number, so numbers of one type are converted together.
    floats = (
        np.array([_floats(sequence.params) for sequence in sequences], np.float32).reshape(-1, 6).T.copy()
    )
    integers = np.array(list(map(_integers, sequences, positions)), np.int32).reshape(-1, 5).T.copy()
    temperature, top_p, min_p, repetition, presence, frequency = floats
    top_k, choice, position, num_logprobs, given_token_ids = integers
    mask_row, mask_bits = _without_masks(len(sequences)) if masks is None else masks
    penalty_start, penalised, counts = _laid_out(list(map(_penalty_counts, sequences, positions)))
    bias_start, biased, values = _laid_out(list(map(_biases, sequences, positions)))
    return SamplingBatch(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        seed=np.array([sequence.seed for sequence in sequences], np.uint64),
        choice=choice,
        position=position,
        num_logprobs=num_logprobs,
        given_token_ids=given_token_ids,
        penalty_start=penalty_start,
        penalty_token_ids=penalised,
        penalty_counts=np.array(counts, np.int32),
        bias_start=bias_start,
        bias_token_ids=biased,
        bias_values=np.array(values, np.float32),
        mask_row=mask_row,
        masks=mask_bits,
    )


def _without_masks(rows: int) -> tuple[IntArray, npt.NDArray[np.uint32]]:
    return np.full(rows, -1, np.int32), np.empty((0, 0), np.uint32)


def _floats(params: SamplingParams) -> tuple[float, ...]:
    return (
        params.temperature,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )


def _integers(sequence: Sequence, position: int) -> tuple[int, ...]:
    params = sequence.params
    wanted, given = params.logprobs if sequence.num_candidates is None else sequence.num_candidates, -1
    if position < len(sequence.token_ids):
        wanted, given = params.prompt_logprobs, sequence.token_ids[position]
    return max(params.top_k, 0), sequence.choice, position, -1 if wanted is None else wanted, given


def sample(logits: npt.NDArray[np.float32], batch: SamplingBatch) -> StepResult:
    """Draw a token for each row.

    Args:
        logits: [R, vocabulary], float32.
        batch: R rows.

    Raises:
        RuntimeError: a row has NaN or +inf, or nothing above -inf: the model's arithmetic is broken.
    """
    result = empty_result(batch)
    sample_rows(logits, 0, batch, result)
    return result


def row_without_token(error: Exception) -> int | None:
    """The logit row that an executor's error says has no token to choose; None for other errors."""
    found = re.match(r"logit row (\d+) has no token to choose", str(error))
    return int(found[1]) if found and isinstance(error, RuntimeError) else None


def empty_result(batch: SamplingBatch) -> StepResult:
    """A result for the rows of the batch in which nothing is drawn yet."""
    rows, most = len(batch.num_logprobs), int(batch.num_logprobs.max(initial=0))
    return StepResult(
        token_ids=np.full(rows, -1, np.int32),
        logprobs=np.full(rows, np.nan, np.float32),
        ranks=np.zeros(rows, np.int32),
        top_token_ids=np.full((rows, most), -1, np.int32),
        top_logprobs=np.full((rows, most), np.nan, np.float32),
    )


def sample_rows(
    logits: npt.NDArray[np.float32], first_row: int, batch: SamplingBatch, result: StepResult
) -> None:
    """``sample`` for a slice of the batch: logits [n, vocabulary] of its rows from ``first_row`` on.

    Writes those rows of ``result``, so that the logits of a whole batch need never exist at once.
    """
    for row, row_logits in enumerate(logits, start=first_row):
        raw = row_logits.astype(np.float64)
        token_id = int(batch.given_token_ids[row])
        if token_id < 0:
            token_id = sample_row(raw, batch, row)
        elif not np.isfinite(raw.max()):
            raise _no_token(row, raw.max())
        result.token_ids[row] = token_id

        count = int(batch.num_logprobs[row])
        if count < 0:
            continue
        largest = raw.max()
        logprobs = raw - (largest + np.log(np.exp(raw - largest).sum()))
        top = _likeliest(raw, count)
        result.logprobs[row] = logprobs[token_id]
        ahead = np.count_nonzero(raw > raw[token_id]) + np.count_nonzero(raw[:token_id] == raw[token_id])
        result.ranks[row] = 1 + ahead
        result.top_token_ids[row, : len(top)] = top
        result.top_logprobs[row, : len(top)] = logprobs[top]


def sample_row(raw: FloatArray, batch: SamplingBatch, row: int) -> int:
    """The token id drawn for one row of logits [vocabulary]."""
    largest = raw.max()  # NaN if any is
    if not np.isfinite(largest):
        raise _no_token(row, largest)

    x = _biased_and_penalised(_masked(raw, batch, row), batch, row)
    if x.max() == -np.inf:
        raise RuntimeError(f"logit row {row} has no token to choose: every token of the vocabulary is banned")
    temperature = float(batch.temperature[row])
    if temperature == 0.0:
        return int(x.argmax())  # the first of equals, so the lowest id
    x = x / temperature
    x -= x.max()  # now 0 is the likeliest, and exp(x) the weight of a token relative to it

    # A token that is out of the race has x = -inf from then on.
    if (min_p := float(batch.min_p[row])) > 0.0:
        x[np.exp(x) < min_p] = -np.inf
    if 0 < (top_k := int(batch.top_k[row])) < len(x):
        x = _only(x, _likeliest(x, top_k))
    if (top_p := float(batch.top_p[row])) < 1.0:
        order = _likeliest(x, len(x))
        cumulative = np.cumsum(np.exp(x[order]))
        last = np.searchsorted(cumulative, top_p * cumulative[-1], side="left")  # first that reaches it
        x = _only(x, order[: last + 1])

    # cumulative[-1] exceeds uniform * cumulative[-1], so an index is always found; a token of weight 0 never.
    cumulative = np.cumsum(np.exp(x))
    seed, position, choice = int(batch.seed[row]), int(batch.position[row]), int(batch.choice[row])
    target = uniform(seed, position, choice) * cumulative[-1]
    return int(np.searchsorted(cumulative, target, side="right"))  # the first with cumulative > target


def _no_token(row: int, largest: float) -> RuntimeError:
    return RuntimeError(f"logit row {row} has no token to choose: its largest logit is {largest}")


def uniform(seed: int, position: int, choice: int, draw: int = 0) -> float:
    """The random number in [0, 1), a multiple of 2**-53, that belongs to these four numbers and to no state.

    So a token does not depend on what else ran in the batch, nor on how often the sequence was preempted.
    """
    x0, x1, _, _ = philox4x32((draw, position, choice, 0), (seed & 0xFFFFFFFF, seed >> 32))
    return ((x0 >> 5) * 2**26 + (x1 >> 6)) / 2**53


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: four random 32-bit words for each counter and key.

    Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & 0xFFFFFFFF,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def _masked(raw: FloatArray, batch: SamplingBatch, row: int) -> FloatArray:
    """The logits, with -inf for tokens that the row's mask does not allow; ``raw`` if it has none."""
    if (mask_row := int(batch.mask_row[row])) < 0:
        return raw
    words = batch.masks[mask_row].astype("<u4")  # least significant bit and byte first, on any machine
    allowed = np.unpackbits(words.view(np.uint8), count=len(raw), bitorder="little").astype(bool)
    return np.where(allowed, raw, -np.inf)


def _biased_and_penalised(raw: FloatArray, batch: SamplingBatch, row: int) -> FloatArray:
    """The logits after bias, then repetition, frequency and presence penalties; ``raw`` if there are none."""
    biased = slice(batch.bias_start[row], batch.bias_start[row + 1])
    seen = slice(batch.penalty_start[row], batch.penalty_start[row + 1])
    if biased.start == biased.stop and seen.start == seen.stop:
        return raw
    x = raw.copy()
    x[batch.bias_token_ids[biased]] += batch.bias_values[biased]  # ids are distinct within a row

    ids, counts = batch.penalty_token_ids[seen], batch.penalty_counts[seen]
    repetition = float(batch.repetition_penalty[row])
    penalised = np.where(x[ids] > 0.0, x[ids] / repetition, x[ids] * repetition)
    penalised -= float(batch.frequency_penalty[row]) * counts
    penalised -= float(batch.presence_penalty[row]) * (counts > 0)
    x[ids] = penalised
    return x


def _likeliest(x: FloatArray, count: int) -> npt.NDArray[np.intp]:
    """Ids of the ``count`` largest values, the largest first, equals by lowest id."""
    if count == 0:
        return np.empty(0, np.intp)
    count = min(count, len(x))
    candidates = np.arange(len(x))
    if count < len(x):  # sort only those at or above the count-th largest
        candidates = np.flatnonzero(x >= np.partition(x, len(x) - count)[len(x) - count])
    return candidates[np.argsort(-x[candidates], kind="stable")][:count]


def _only(x: FloatArray, ids: npt.NDArray[np.intp]) -> FloatArray:
    """The values at ``ids``, and -inf elsewhere."""
    kept = np.full_like(x, -np.inf)
    kept[ids] = x[ids]
    return kept


def _penalty_counts(sequence: Sequence, position: int) -> dict[int, int]:
    """Token id → occurrences in the output, for the tokens that this sequence's penalties touch."""
    params = sequence.params
    if position < len(sequence.token_ids):
        return {}
    if params.repetition_penalty != 1.0:  # the only one that touches tokens of the prompt
        return {**dict.fromkeys(sequence.token_ids, 0), **sequence.output_counts}
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        return sequence.output_counts
    return {}


def _biases(sequence: Sequence, position: int) -> dict[int, float]:
    """Token id → what is added to its logit; -inf for tokens that may not end the text yet."""
    params = sequence.params
    if position < len(sequence.token_ids):
        return {}
    biases: dict[int, float] = {**params.logit_bias} if params.logit_bias else {}
    if sequence.num_output_tokens < params.min_tokens:
        biases.update(dict.fromkeys(sequence.end_token_ids, -np.inf))
    return biases


def _laid_out(rows: AnySequence[Mapping[int, float]]) -> tuple[IntArray, IntArray, list[float]]:
    """The rows' entries end to end: where each row starts [R + 1], the keys, and the values."""
    starts = np.zeros(len(rows) + 1, np.int32)
    if not any(rows):
        return starts, np.empty(0, np.int32), []
    np.cumsum([len(row) for row in rows], out=starts[1:])
    keys = [key for row in rows for key in row]
    return starts, np.array(keys, np.int32), [value for row in rows for value in row.values()]
