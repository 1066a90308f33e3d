"""The sampler against a naive one in plain Python, published random numbers, and the settings' promises."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.batch import SamplingBatch
from minivllm.sampler import empty_result, philox4x32, sample, sample_rows, sampling_batch, uniform
from minivllm.sampling_params import SamplingParams
from minivllm.sequence import Sequence


def make_sequence(
    params: SamplingParams,
    prompt: list[int] | tuple[int, ...] = (0,),
    output: list[int] | tuple[int, ...] = (),
    seed: int = 0,
    choice: int = 0,
    end_token_ids: frozenset[int] = frozenset(),
) -> Sequence:
    return Sequence(
        seq_id=0,
        request_id="r",
        token_ids=[*prompt, *output],
        num_prompt_tokens=len(prompt),
        params=params,
        seed=seed,
        max_num_tokens=1000,
        choice=choice,
        end_token_ids=end_token_ids,
        output_counts=dict(Counter(output)),
    )


def draw(logits: list[float], sequence: Sequence) -> int:
    return int(sample(np.array([logits], np.float32), sampling_batch([sequence])).token_ids[0])


# --- random numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(  # the known answers that are published with Random123
    ("counter", "key", "words"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(counter: tuple, key: tuple, words: tuple) -> None:
    assert philox4x32(counter, key) == words


def test_uniform_is_built_from_the_first_two_words() -> None:
    expected = ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53
    assert uniform(seed=0, position=0, choice=0) == expected


def test_uniform_depends_on_every_number_and_on_all_bits_of_the_seed() -> None:
    draws = {
        uniform(seed, position, choice, draw)
        for seed in (0, 1, 1 << 31, 1 << 32, 1 << 63)
        for position in range(4)
        for choice in range(4)
        for draw in range(2)
    }
    assert len(draws) == 5 * 4 * 4 * 2
    assert all(0.0 <= u < 1.0 for u in draws)


# --- against the naive sampler ----------------------------------------------------------------------


def naive_token(logits: list[float], sequence: Sequence) -> int:
    """The definition once more, with Python's floats, lists and loops."""
    params = sequence.params
    prompt, output = (
        sequence.token_ids[: sequence.num_prompt_tokens],
        sequence.token_ids[sequence.num_prompt_tokens :],
    )
    repetition, presence, frequency, temperature, top_p, min_p = (
        float(np.float32(v))
        for v in (
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            params.temperature,
            params.top_p,
            params.min_p,
        )
    )
    x = [float(np.float32(value)) for value in logits]
    for token_id in range(len(x)):
        x[token_id] += float(np.float32(params.logit_bias.get(token_id, 0.0)))
        if len(output) < params.min_tokens and token_id in sequence.end_token_ids:
            x[token_id] = -math.inf
        if token_id in prompt or token_id in output:
            x[token_id] = x[token_id] / repetition if x[token_id] > 0 else x[token_id] * repetition
            x[token_id] -= frequency * output.count(token_id)
            if token_id in output:
                x[token_id] -= presence
    if temperature == 0:
        return max(range(len(x)), key=lambda i: (x[i], -i))
    top = max(value / temperature for value in x)
    weight = {i: math.exp(value / temperature - top) for i, value in enumerate(x)}
    kept = sorted((i for i in weight if weight[i] >= min_p), key=lambda i: (-x[i], i))
    if params.top_k > 0:
        kept = kept[: params.top_k]
    if top_p < 1:
        total, reached, prefix = sum(weight[i] for i in kept), 0.0, []
        for i in kept:
            prefix.append(i)
            reached += weight[i]
            if reached >= top_p * total:
                break
        kept = prefix
    total = 0.0
    for i in sorted(kept):
        total += weight[i]
    target, reached = uniform(sequence.seed, len(sequence.token_ids), sequence.choice) * total, 0.0
    for i in sorted(kept):
        reached += weight[i]
        if reached > target:
            return i
    raise AssertionError("no token reached")


VOCABULARY = 8
token_ids = st.integers(0, VOCABULARY - 1)
# A coarse grid makes ties common.
logit = st.one_of(st.integers(-3, 3).map(float), st.floats(-30, 30, width=32), st.just(-math.inf))


@st.composite
def params_strategy(choose: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        max_tokens=100,
        temperature=choose(st.sampled_from([0.0, 1e-30, 0.3, 1.0, 5.0])),
        top_k=choose(st.sampled_from([-1, 0, 1, 2, 5, 100])),
        top_p=choose(st.sampled_from([1e-6, 0.3, 0.9, 1.0])),
        min_p=choose(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
        min_tokens=choose(st.sampled_from([0, 2])),
        repetition_penalty=choose(st.sampled_from([0.5, 1.0, 1.7])),
        presence_penalty=choose(st.sampled_from([-1.5, 0.0, 0.7])),
        frequency_penalty=choose(st.sampled_from([-0.4, 0.0, 0.3])),
        logit_bias=choose(
            st.dictionaries(token_ids, st.sampled_from([-100.0, -1.0, 2.5, 100.0]), max_size=3)
        ),
    )


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_agrees_with_the_naive_sampler(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 3))
    sequences, logits = [], []
    for _ in range(rows):
        sequences.append(
            make_sequence(
                data.draw(params_strategy()),
                prompt=data.draw(st.lists(token_ids, min_size=1, max_size=4)),
                output=data.draw(st.lists(token_ids, max_size=4)),
                seed=data.draw(st.integers(0, 2**64 - 1)),
                choice=data.draw(st.integers(0, 3)),
                end_token_ids=data.draw(st.frozensets(token_ids, max_size=3)),
            )
        )
        # The last token is always possible: it can be neither -inf nor an end token.
        logits.append([*data.draw(st.lists(logit, min_size=VOCABULARY, max_size=VOCABULARY)), 0.25])
    result = sample(np.array(logits, np.float32), sampling_batch(sequences))
    expected = [naive_token(row, sequence) for row, sequence in zip(logits, sequences, strict=True)]
    assert result.token_ids.tolist() == expected


def test_draws_follow_the_softmax() -> None:
    logits = np.array([0.0, 1.0, 2.0, -1.0, 0.5], np.float32)
    params = SamplingParams(temperature=0.7)
    sequences = [make_sequence(params, prompt=[0] * 3, seed=seed) for seed in range(20_000)]
    result = sample(np.tile(logits, (len(sequences), 1)), sampling_batch(sequences))
    weights = np.exp(logits / 0.7)
    expected = weights / weights.sum()
    found = np.bincount(result.token_ids, minlength=5) / len(sequences)
    # Five standard deviations; the seeds are fixed, so this never flickers.
    assert np.all(np.abs(found - expected) < 5 * np.sqrt(expected * (1 - expected) / len(sequences)))


# --- what the settings promise ----------------------------------------------------------------------


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert draw([1.0, 3.0, 3.0, 2.0], make_sequence(SamplingParams(temperature=0))) == 1


def drawn(logits: list[float], **settings_: object) -> set[int]:
    """Every token that 200 seeds draw."""
    params = SamplingParams(**settings_)  # type: ignore[arg-type]
    sequences = [make_sequence(params, seed=seed) for seed in range(200)]
    result = sample(np.tile(np.array(logits, np.float32), (200, 1)), sampling_batch(sequences))
    return set(result.token_ids.tolist())


def test_top_k_cuts_ties_by_lowest_id() -> None:
    assert drawn([0.0, 1.0, 1.0, 1.0], top_k=2) == {1, 2}
    assert drawn([0.0, 0.1, 0.2], top_k=0) == drawn([0.0, 0.1, 0.2], top_k=-1) == {0, 1, 2}


def test_top_p_keeps_the_token_that_reaches_it_and_no_more() -> None:
    equal = [0.0] * 4  # a quarter each
    assert drawn(equal, top_p=0.5) == {0, 1}
    assert drawn(equal, top_p=0.51) == {0, 1, 2}
    assert drawn(equal, top_p=1e-9) == {0}
    assert drawn([0.0, 5.0, 0.0], top_p=0.9) == {1}


def test_top_p_is_of_what_min_p_and_top_k_leave() -> None:
    # Alone, the first of four equals is 1/4; of the two that top_k leaves, it is 1/2.
    assert drawn([0.0] * 4, top_p=0.5, top_k=2) == {0}
    assert drawn([0.0, math.log(0.1), math.log(0.1)], top_p=0.95, min_p=0.5) == {0}


def test_min_p_is_relative_to_the_likeliest() -> None:
    logits = [0.0, math.log(0.5), math.log(0.26), math.log(0.24)]
    assert drawn(logits, min_p=0.25) == {0, 1, 2}
    assert drawn(logits, min_p=1.0) == {0}


@pytest.mark.parametrize("temperature", [1e-50, 1e-45, 1e-38, 1e-10])
def test_a_tiny_temperature_is_greedy_without_overflow(temperature: float) -> None:
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        assert drawn([-3e38, 3e38, 2.9e38, -math.inf], temperature=temperature) == {1}


def test_penalties_by_hand() -> None:
    def chosen(logits: list[float], **settings_: float) -> int:
        params = SamplingParams(temperature=0, **settings_)  # type: ignore[arg-type]
        return draw(logits, make_sequence(params, prompt=[0], output=[1, 1]))

    assert chosen([2.0, 1.0, 1.5]) == 0
    assert chosen([2.0, 1.0, 1.5], repetition_penalty=2.0) == 2  # 1.0, 0.5, 1.5: the prompt counts
    assert chosen([-1.0, -9.0, -1.5], repetition_penalty=2.0) == 2  # -2, -18, -1.5: away from zero
    assert chosen([1.0, 2.0, 1.5], presence_penalty=0.7) == 2  # 1.0, 1.3, 1.5: output only, once
    assert chosen([1.8, 2.0, 1.5], presence_penalty=0.4, repetition_penalty=1.0) == 0
    assert chosen([1.0, 2.0, 1.5], frequency_penalty=0.4) == 2  # 1.0, 1.2, 1.5: twice


def test_end_tokens_are_banned_until_min_tokens() -> None:
    params = SamplingParams(temperature=0, min_tokens=2, max_tokens=9, logit_bias={2: 100})
    ends = frozenset({1, 2})
    logits = [0.0, 9.0, 9.0]
    assert draw(logits, make_sequence(params, end_token_ids=ends)) == 0
    assert draw(logits, make_sequence(params, output=[0], end_token_ids=ends)) == 0
    assert draw(logits, make_sequence(params, output=[0, 0], end_token_ids=ends)) == 2


# --- logprobs ---------------------------------------------------------------------------------------


def test_logprobs_and_ranks_are_of_the_raw_logits() -> None:
    # 1/8, 1/2, 1/8, 1/4; bias and temperature move the choice, never the reported numbers.
    logits = np.log(np.array([[1, 4, 1, 2]], np.float32) / 8) + np.float32(7)
    params = SamplingParams(temperature=0, logprobs=3, logit_bias={2: 100}, repetition_penalty=2.0)
    result = sample(logits, sampling_batch([make_sequence(params)]))
    assert result.token_ids.tolist() == [2]
    np.testing.assert_allclose(result.logprobs, [math.log(1 / 8)], rtol=1e-6)
    assert result.ranks.tolist() == [4]  # behind 1, 3, and token 0, its equal with a lower id
    assert result.top_token_ids.tolist() == [[1, 3, 0]]
    np.testing.assert_allclose(result.top_logprobs, [np.log([1 / 2, 1 / 4, 1 / 8])], rtol=1e-6)


def test_rows_get_as_many_logprobs_as_they_asked_for() -> None:
    rows = [make_sequence(SamplingParams(temperature=0, logprobs=n)) for n in (None, 0, 2, 20)]
    result = sample(np.tile(np.array([0.0, 2.0, 1.0], np.float32), (4, 1)), sampling_batch(rows))
    assert result.top_token_ids.shape == result.top_logprobs.shape == (4, 20)
    assert [row[row >= 0].tolist() for row in result.top_token_ids] == [[], [], [1, 2], [1, 2, 0]]
    np.testing.assert_array_equal(np.isnan(result.top_logprobs), result.top_token_ids == -1)
    np.testing.assert_array_equal(np.isnan(result.logprobs), [True, False, False, False])
    assert result.ranks.tolist() == [0, 1, 1, 1]


def test_logprobs_of_huge_logits_do_not_overflow() -> None:
    params = SamplingParams(temperature=0, logprobs=2)
    result = sample(np.array([[3e38, -1e37, -math.inf]], np.float32), sampling_batch([make_sequence(params)]))
    assert result.logprobs.tolist() == [0.0]
    assert result.top_token_ids.tolist() == [[0, 1]]


@pytest.mark.parametrize("bad", [[1.0, math.nan], [-math.inf, -math.inf], [1.0, math.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_named(bad: list[float], temperature: float) -> None:
    rows = [make_sequence(SamplingParams(temperature=temperature))] * 2
    with pytest.raises(RuntimeError, match="logit row 1"):
        sample(np.array([[1.0, 2.0], bad], np.float32), sampling_batch(rows))


def test_a_row_with_every_token_banned_is_named() -> None:
    params = SamplingParams(min_tokens=1)
    with pytest.raises(RuntimeError, match=r"logit row 0.*banned"):
        draw([1.0, 2.0], make_sequence(params, end_token_ids=frozenset({0, 1})))


# --- batches ----------------------------------------------------------------------------------------


def mixed_batch() -> tuple[np.ndarray, list[Sequence]]:
    rng = np.random.default_rng(0)
    variants = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.8, top_p=0.9, logprobs=5),
        SamplingParams(repetition_penalty=1.3, top_k=10, logprobs=0),
        SamplingParams(presence_penalty=0.5, frequency_penalty=0.5, logit_bias={3: 2.0, 4: -5.0}),
        SamplingParams(min_p=0.1, min_tokens=9, logprobs=2),
    ]
    sequences = [
        make_sequence(
            variants[i % 5],
            prompt=rng.integers(0, 50, 6).tolist(),
            output=rng.integers(0, 50, i % 7).tolist(),
            seed=i,
            end_token_ids=frozenset({1, 2}),
        )
        for i in range(23)
    ]
    return rng.normal(0, 3, (23, 50)).astype(np.float32), sequences


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits, sequences = mixed_batch()
    whole = sample(logits, sampling_batch(sequences))
    for i, sequence in enumerate(sequences):
        alone = sample(logits[i : i + 1], sampling_batch([sequence]))
        assert alone.token_ids[0] == whole.token_ids[i]
        np.testing.assert_array_equal(alone.logprobs[0], whole.logprobs[i])
        assert alone.ranks[0] == whole.ranks[i]


def test_slices_of_rows_give_the_whole() -> None:
    logits, sequences = mixed_batch()
    batch = sampling_batch(sequences)
    whole, sliced = sample(logits, batch), empty_result(batch)
    for first in range(0, len(logits), 4):
        sample_rows(logits[first : first + 4], first, batch, sliced)
    for name, value in vars(whole).items():
        np.testing.assert_array_equal(getattr(sliced, name), value, err_msg=name)


def test_sampling_batch_lays_out_its_rows() -> None:
    plain = make_sequence(SamplingParams(temperature=0), prompt=[1, 2], seed=2**64 - 1)
    seen = make_sequence(
        SamplingParams(repetition_penalty=2.0, top_k=-1, logprobs=3),
        prompt=[5, 6, 5],
        output=[6, 7, 7],
        choice=2,
    )
    output_only = make_sequence(SamplingParams(presence_penalty=1.0), prompt=[5, 6], output=[7, 7])
    banned = make_sequence(
        SamplingParams(min_tokens=3, logit_bias={4: 1.5}), output=[1], end_token_ids=frozenset({9})
    )
    batch = sampling_batch([plain, seen, output_only, banned])
    assert batch.seed.tolist() == [2**64 - 1, 0, 0, 0]
    assert batch.position.tolist() == [2, 6, 4, 2]
    assert batch.choice.tolist() == [0, 2, 0, 0]
    assert batch.top_k.tolist() == [0, 0, 0, 0]
    assert batch.num_logprobs.tolist() == [-1, 3, -1, -1]
    assert batch.penalty_start.tolist() == [0, 0, 3, 4, 4]
    pairs = list(zip(batch.penalty_token_ids.tolist(), batch.penalty_counts.tolist(), strict=True))
    assert sorted(pairs[:3]) == [(5, 0), (6, 1), (7, 2)]
    assert pairs[3:] == [(7, 2)]
    assert batch.bias_start.tolist() == [0, 0, 0, 0, 2]
    assert dict(zip(batch.bias_token_ids.tolist(), batch.bias_values.tolist(), strict=True)) == {
        4: 1.5,
        9: -math.inf,
    }


def test_given_tokens_get_raw_logprobs_and_nothing_else() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (3, 50)).astype(np.float32)
    params = SamplingParams(
        temperature=2, repetition_penalty=3, logit_bias={7: -100}, min_tokens=2, logprobs=1, prompt_logprobs=5
    )
    sequence = make_sequence(params, prompt=[3, 7, 9, 7])
    batch = sampling_batch([sequence] * 3, [1, 2, 4])
    assert batch.given_token_ids.tolist() == [7, 9, -1]
    assert batch.num_logprobs.tolist() == [5, 5, 1]
    assert batch.penalty_start.tolist() == [0, 0, 0, 3] and batch.bias_start.tolist()[:3] == [0, 0, 0]
    result = sample(logits, batch)
    assert result.token_ids.tolist()[:2] == [7, 9] and result.token_ids[2] != 7
    logprobs = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(result.logprobs[:2], [logprobs[0, 7], logprobs[1, 9]], rtol=1e-6)
    for row, token_id in ((0, 7), (1, 9)):
        assert result.ranks[row] == 1 + (logits[row] > logits[row, token_id]).sum()
        assert result.top_token_ids[row].tolist() == np.argsort(-logits[row])[:5].tolist()
    with pytest.raises(RuntimeError, match="logit row 1 has no token to choose"):
        sample(np.array([logits[0], np.full(50, np.nan), logits[2]], np.float32), batch)


def test_dtypes_are_those_of_the_boundary() -> None:
    float32 = {
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "bias_values",
    }
    for sequences in ([], [make_sequence(SamplingParams())]):
        batch: SamplingBatch = sampling_batch(sequences)
        for name, array in vars(batch).items():
            unsigned = {"seed": np.uint64, "masks": np.uint32}
            expected = np.float32 if name in float32 else unsigned.get(name, np.int32)
            assert array.dtype == expected, name
            assert array.flags.c_contiguous and array.ndim == (2 if name == "masks" else 1)
        assert sample(np.zeros((len(sequences), 4), np.float32), batch).token_ids.shape == (len(sequences),)
