"""Everything that shares blocks at once, in pools too small for it: no bit of any answer is different."""

import random
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
from helpers_engine import Setup, assert_idle, run

from minivllm.engine.outputs import RequestOutput
from minivllm.sampling_params import BeamSearchParams, SamplingParams

STEM = [random.Random(0).randrange(1, 256) for _ in range(60)]
Wish = SamplingParams | BeamSearchParams


def random_wish(rng: random.Random) -> Wish:
    if rng.random() < 0.25:
        return BeamSearchParams(
            rng.randrange(2, 5), rng.randrange(1, 25), length_penalty=rng.choice([0, 1, 2])
        )
    return SamplingParams(
        n=rng.choice([1, 1, 2, 4]),
        max_tokens=rng.randrange(1, 60),
        ignore_eos=rng.random() < 0.7,
        temperature=rng.choice([0, 0.9]),
        seed=rng.randrange(3),
        repetition_penalty=rng.choice([1, 1.2]),
        logprobs=rng.choice([None, 2]),
        prompt_logprobs=rng.choice([None, None, 3]),
    )


def random_prompt(rng: random.Random) -> list[int]:
    return STEM[: rng.randrange(1, 60)] + [rng.randrange(1, 256) for _ in range(rng.choice([0, 0, 1, 9]))]


@lru_cache
def plain(dtype: str, prompt: tuple[int, ...], wish: Wish) -> Any:
    """What an engine answers that has nothing else to do, and room."""
    engine = Setup(
        model="native", dtype=dtype, eos=(3, 4), num_blocks=200, budget=200, prefix_caching=False
    ).engine()
    (request_id,) = engine.add_requests([prompt], [wish])
    return comparable(run(engine)[request_id])


def comparable(output: RequestOutput) -> Any:
    return replace(output, request_id="", num_cached_tokens=0, seed=0, admitted_at=None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(6))
def test_nothing_that_is_shared_changes_an_answer(seed: int, dtype: str) -> None:
    rng = random.Random(seed)
    block_size = [1, 2, 5, 8, 16, 16][seed % 6]
    engine = Setup(
        model="native",
        dtype=dtype,
        eos=(3, 4),
        block_size=block_size,
        # Enough for the widest request: 4 sequences of up to 59 tokens, after a prompt of up to 68.
        num_blocks=68 // block_size + 4 * -(-(59 + block_size - 1) // block_size),
        budget=[16, 40, 100][seed % 3],
        threads=1 + seed % 2,
        prefix_caching=seed % 6 != 4,
    ).engine()
    requests: dict[str, tuple[tuple[int, ...], Wish]] = {}
    outputs: dict[str, RequestOutput] = {}
    aborted = set()
    while len(requests) < 30 or engine.has_unfinished_requests():
        if len(requests) < 30 and rng.random() < 0.9:
            prompt, wish = random_prompt(rng), random_wish(rng)
            salt = rng.choice([None, None, "a"])
            (request_id,) = engine.add_requests([prompt], [wish], cache_salt=salt, priority=rng.randrange(2))
            requests[request_id] = tuple(prompt), wish
        outputs |= {output.request_id: output for output in engine.step()}
        engine.kv_cache.check_integrity()
        if rng.random() < 0.02:
            engine.reset_prefix_cache()
            engine.kv_cache.check_integrity()
        if rng.random() < 0.02 and requests.keys() - outputs.keys():
            request_id = rng.choice(sorted(requests.keys() - outputs.keys()))
            if engine.abort(request_id):
                aborted.add(request_id)
            engine.kv_cache.check_integrity()
    assert_idle(engine)
    assert engine.metrics().preemptions > 0
    assert outputs.keys() | aborted == requests.keys()
    for request_id, output in outputs.items():
        assert comparable(output) == plain(dtype, *requests[request_id])
