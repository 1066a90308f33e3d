"""SamplingParams: every field's limits, types and normal forms; every refusal names its field."""

import copy
import dataclasses
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest

from minivllm.errors import RequestError
from minivllm.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_TOKENS_LIMIT, SamplingParams

INF, NAN = math.inf, math.nan

REFUSED = {
    "max_tokens": [0, -1, 10**18, True, 1.0, "16", NAN, MAX_TOKENS_LIMIT + 1, 10**5000],
    "temperature": [-1, -1e-30, NAN, INF, -INF, 101, True, "1", None, 10**400, 1j],
    "top_k": [-2, 2**31, 1.5, True, None, "3"],
    "top_p": [0, 0.0, -0.1, 2, 1.0000001, NAN, INF, False, None, "0.9"],
    "min_p": [-0.1, 1.1, NAN, INF, True, None],
    "seed": [-1, 2**64, 1.0, True, "7", 10**5000],
    "stop": [
        "",
        ["a", ""],
        [1],
        ["x"] * (MAX_STOP_STRINGS + 1),
        ["x"] * 10_000,
        "x" * 2000,
        "a\ud800",
        ["fine", "\udfffb"],
        3,
        {"a": 1},
    ],
    "stop_token_ids": [[-1], [1.0], [True], ["1"], 5, list(range(5000)), [2**31]],
    "ignore_eos": [1, 0, None, "true"],
    "include_stop_str_in_output": [1, None],
    "skip_special_tokens": [0, None],
    "min_tokens": [-1, 1.0, True, None, 10**18, 17],  # 17 > max_tokens, which is 16
    "repetition_penalty": [0, -1, NAN, INF, 1e-9, 1000, True, None],
    "presence_penalty": [-2.1, 2.1, NAN, INF, True, None],
    "frequency_penalty": [-2.1, 2.1, NAN, -INF, True, None],
    "logit_bias": [
        {"5": 1.0},
        {1.0: 1.0},
        {True: 1.0},
        {-1: 1.0},
        {1: 101},
        {1: NAN},
        {1: INF},
        {1: "2"},
        {1: None},
        [(1, 1.0)],
        dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0),
    ],
    "logprobs": [-1, 21, True, 1.0, "1"],
}


@pytest.mark.parametrize(
    ("name", "index"), [(name, index) for name, values in REFUSED.items() for index in range(len(values))]
)
def test_refused_with_one_sentence_that_names_the_field(name: str, index: int) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: REFUSED[name][index]})
    assert caught.value.param == name
    message = str(caught.value)
    assert "\n" not in message and len(message) < 200
    assert name in message or "stop string" in message


@pytest.mark.parametrize(
    "accepted",
    [
        {"max_tokens": None, "min_tokens": 10**9},
        {"max_tokens": MAX_TOKENS_LIMIT},
        {"temperature": 0},
        {"temperature": 5e-324},
        {"temperature": 100},
        {"top_k": -1},
        {"top_p": 5e-324},
        {"min_p": 1},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"min_tokens": 16},
        {"repetition_penalty": 0.01},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"logprobs": 0},
        {"logprobs": 20},
        {"stop": ["x"] * MAX_STOP_STRINGS},
    ],
)
def test_accepted_at_the_limits(accepted: dict) -> None:
    params = SamplingParams(**accepted)
    for name, value in accepted.items():
        if name != "stop":
            assert getattr(params, name) == value


def test_none_is_empty_where_vllm_takes_it() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None)  # type: ignore[arg-type]
    assert params == SamplingParams()
    assert (params.stop, params.stop_token_ids, params.logit_bias) == ((), (), {})
    params.check_vocabulary(10, (3,))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            {"logit_bias": {"5": 1}},
            "a token id in logit_bias must be an integer from 0 to 2147483647, not '5'",
        ),
        ({"logit_bias": {5: "1"}}, "a bias in logit_bias must be a number from -100 to 100, not '1'"),
        (
            {"stop_token_ids": ["5"]},
            "each of stop_token_ids must be an integer from 0 to 2147483647, not '5'",
        ),
    ],
)
def test_what_is_in_a_field_is_not_called_the_field(wrong: dict, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**wrong)
    assert str(caught.value) == words


def test_normal_forms() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(7),
        top_p=Fraction(1, 2),
        seed=np.uint64(2**64 - 1),
        stop=["b", "a", "b"],
        stop_token_ids=[np.int32(4), 3, 4],
        logit_bias={np.int64(3): 1},
    )
    for name, value in {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.5,
        "seed": 2**64 - 1,
        "stop": ("b", "a"),
        "stop_token_ids": (4, 3),
        "logit_bias": {3: 1.0},
    }.items():
        assert getattr(params, name) == value
        assert isinstance(getattr(params, name), type(value))
    assert SamplingParams(stop="two words").stop == ("two words",)
    assert type(params.logit_bias[3]) is float


def test_a_callers_lists_are_not_shared() -> None:
    stop, ids, bias = ["a"], [1], {1: 1.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append("b"), ids.append(2), bias.update({2: 2.0})
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("a",), (1,), {1: 1.0})
    assert pickle.loads(pickle.dumps(params)) == params == copy.deepcopy(params)


def test_params_cannot_be_changed_so_they_can_be_hashed_and_shared() -> None:
    params = SamplingParams(logit_bias={1: 1.0, 2: 2.0})
    bias = params.logit_bias
    for change in (
        lambda: bias.__setitem__(1, np.nan),
        lambda: bias.update({5: 1.0}),
        lambda: bias.pop(1),
        lambda: bias.setdefault(9, 1.0),
        lambda: bias.__delitem__(1),
        lambda: bias.__ior__({5: 1.0}),
        bias.clear,
        bias.popitem,
    ):
        with pytest.raises(TypeError, match=r"cannot be changed; make new ones"):
            change()
    assert params == SamplingParams(logit_bias={2: 2.0, 1: 1.0})
    assert hash(params) == hash(SamplingParams(logit_bias={2: 2.0, 1: 1.0})) != hash(SamplingParams())
    for twin in (copy.copy(params), copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert twin == params and hash(twin) == hash(params)
    assert dataclasses.asdict(params)["logit_bias"] == {1: 1.0, 2: 2.0}
    assert dataclasses.replace(params, logit_bias={**bias, 3: 3.0}).logit_bias == {1: 1.0, 2: 2.0, 3: 3.0}


def test_vocabulary() -> None:
    SamplingParams(stop_token_ids=[9], logit_bias={9: 1.0}).check_vocabulary(10)
    for name, params in {
        "stop_token_ids": SamplingParams(stop_token_ids=[3, 10]),
        "logit_bias": SamplingParams(logit_bias={3: 1.0, 10: 1.0}),
    }.items():
        with pytest.raises(RequestError, match=r"token id 10.*ends at 9") as caught:
            params.check_vocabulary(10)
        assert caught.value.param == name


def test_min_tokens_must_leave_a_token_to_choose() -> None:
    params = SamplingParams(min_tokens=1, stop_token_ids=[0, 1])
    params.check_vocabulary(4, eos_token_ids=(2,))
    SamplingParams(min_tokens=1, stop_token_ids=[0, 1], ignore_eos=True).check_vocabulary(3, (2,))
    with pytest.raises(RequestError, match="every one of the 3 tokens") as caught:
        params.check_vocabulary(3, eos_token_ids=(2,))
    assert caught.value.param == "min_tokens"
