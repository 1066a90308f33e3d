"""Running a workload on an engine, ours or another, and what comes of its clock readings.

Prompts are random token ids, new for each run, so that no cache helps from one run to the next; decoding is
greedy and ignores end tokens; the number of tokens that come back is checked.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from minivllm.bench.limits import Shape
from minivllm.engine.inference_engine import InferenceEngine
from minivllm.sampling_params import SamplingParams

Prompts = list[list[int]]


@dataclass(frozen=True)
class Run:
    """What one run of a workload showed. Times are seconds since the requests were added."""

    seconds: float  #: until the last token
    token_times: list[list[float]]  #: of each request, the time of each of its tokens


def random_prompts(rng: np.random.Generator, vocab_size: int, shape: Shape) -> Prompts:
    """Prompts of that shape: random token ids, with a random beginning in common where the shape says so."""

    def ids(count: int) -> list[int]:
        return [int(i) for i in rng.integers(0, vocab_size, count)]

    shared = ids(shape.shared_len)
    return [shared + ids(shape.prompt_len - shape.shared_len) for _ in range(shape.requests)]


def run_engine(
    engine: InferenceEngine,
    prompts: Prompts,
    output_len: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """Give our engine the prompts at once and see each token come.

    Raises:
        RuntimeError: another number of tokens came than was asked for.
    """
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    start = clock()
    ids = engine.add_requests(prompts, [params] * len(prompts), stream=True)
    times: dict[str, list[float]] = {request_id: [] for request_id in ids}
    finished = 0
    while finished < len(ids):
        outputs = engine.step()
        now = clock() - start
        for output in outputs:
            times[output.request_id] += [now] * len(output.outputs[0].token_ids)
            finished += output.finished
    check_counts([len(t) for t in times.values()], len(prompts), output_len)
    return Run(max(t[-1] for t in times.values()), list(times.values()))


def check_counts(counts: Sequence[int], requests: int, output_len: int) -> None:
    """Every request has to have got all its tokens.

    Raises:
        RuntimeError: it has not.
    """
    if list(counts) != [output_len] * requests:
        raise RuntimeError(f"{requests} × {output_len} tokens were asked for, but {list(counts)} came")
