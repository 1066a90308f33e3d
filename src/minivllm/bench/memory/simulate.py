"""Our own engine on the same requests: the real loop, scheduler, block tables and allocator; time is counted.

The executor is either the real model, whose steps are timed, or an invention of tokens, whose steps cost what
a ``CostModel`` says. Either way what is in the pool is read off each step's Batch, that is, off what
attention would read, and not asked of those whose work it is.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from minivllm.batch import Batch, IntArray, SamplingBatch, StepResult
from minivllm.bench.memory.cost import CostModel
from minivllm.bench.memory.trace import Step, Trace
from minivllm.bench.memory.workload import Arrival
from minivllm.block_allocator import create_block_allocator
from minivllm.engine.inference_engine import InferenceEngine
from minivllm.errors import ConfigError
from minivllm.kv_cache.kv_cache import KVCache
from minivllm.kv_cache.kv_pool import KVGeometry
from minivllm.sampling_params import BeamSearchParams, SamplingParams
from minivllm.scheduler import Scheduler

VOCAB_SIZE = 32_000  # of the simulated model

Execute = Callable[[Batch, SamplingBatch], StepResult]


@dataclass(frozen=True)
class Decoding:
    """How many sequences each request has: one, several samples, or the beams of a search."""

    samples: int = 1
    beams: int = 0  #: 0: no beam search

    @property
    def width(self) -> int:
        """Sequences."""
        return self.beams or self.samples

    def params(self, output_len: int) -> SamplingParams | BeamSearchParams:
        """A request that ends after just so many tokens."""
        if self.beams:
            return BeamSearchParams(beam_width=self.beams, max_tokens=output_len, ignore_eos=True)
        return SamplingParams(n=self.samples, max_tokens=output_len, ignore_eos=True)

    def __str__(self) -> str:
        """In a report."""
        return f"beams of {self.beams}" if self.beams else f"n = {self.samples}"


SINGLE = Decoding()


class RecordingExecutor:
    """An executor that remembers of every step what attention reads. See ``executors.base.Executor``."""

    device = "cpu"

    def __init__(self, execute: Execute, name: str, geometry: KVGeometry) -> None:
        self.name = name
        self.steps: list[tuple[int, int, int, int, int]] = []
        """Of each: rows, context, and what ``occupancy`` tells."""
        self._execute = execute
        self._geometry = geometry

    def execute(
        self,
        batch: Batch,
        sampling: SamplingBatch,
        before_sampling: Callable[[], object] | None = None,
    ) -> StepResult:
        """Let the other one do it."""
        if before_sampling is not None:
            before_sampling()
        used = occupancy(batch.block_tables, batch.context_lens, self._geometry)
        self.steps.append((len(batch.token_ids), int(batch.context_lens.sum()), *used))
        return self._execute(batch, sampling)

    def identity(self) -> dict[str, str]:
        """Its cache is not for keeping."""
        raise ConfigError("a benchmark's prefix cache cannot be saved")

    def read_blocks(self, block_ids: IntArray) -> npt.NDArray[np.uint8]:
        """As ``identity``."""
        raise ConfigError("a benchmark's prefix cache cannot be saved")

    def write_blocks(self, block_ids: IntArray, values: npt.NDArray[np.uint8]) -> None:
        """As ``identity``."""
        raise ConfigError("a benchmark's prefix cache cannot be loaded")


def occupancy(tables: IntArray, context_lens: IntArray, geometry: KVGeometry) -> tuple[int, int, int]:
    """Slots that hold a token, the blocks they are in, and the blocks that it would take without sharing.

    Not counted is who has blocks and is not in the batch: samples that wait for a sibling when they resume.

    Args:
        tables: [S, W] block ids in order.
        context_lens: [S] tokens of each sequence in the cache.
    """
    size = geometry.block_size
    first = np.arange(tables.shape[1], dtype=np.int32) * size  # [W] position of each block's first token
    filled = np.clip(context_lens[:, None] - first, 0, size)  # [S, W] tokens of the sequence in the block
    held = filled > 0
    most = np.zeros(geometry.num_blocks, np.int32)  # by block
    np.maximum.at(most, tables[held], filled[held])
    return int(most.sum()), int(np.count_nonzero(most)), int(np.count_nonzero(held))


def simulated_step(batch: Batch, sampling: SamplingBatch) -> StepResult:
    """Tokens that look random and are a function of the request's seed, the choice and the position.

    The likeliest tokens, which a beam search asks for, depend on the row's own token too, so that beams part.
    Each is as much less likely than the one before it as an exponentially distributed number of mean 1 says:
    an invention, on which it depends how long beams have the same ancestors. A real model shows.
    """
    own = _mixed(batch.token_ids[batch.logit_rows].astype(np.uint64) + sampling.position.astype(np.uint64))
    drawn = _mixed(
        _mixed(_mixed(sampling.seed) + sampling.choice.astype(np.uint64))
        + sampling.position.astype(np.uint64)
    )
    most = int(sampling.num_logprobs.max(initial=0))
    likeliest = _mixed((drawn ^ own)[:, None] + np.arange(most, dtype=np.uint64))  # [R, K]
    uniform = (likeliest >> np.uint64(11)).astype(np.float64) / 2**53
    top_logprobs = np.log1p(-uniform).cumsum(axis=1).astype(np.float32)
    rows = len(drawn)
    return StepResult(
        token_ids=(drawn % np.uint64(VOCAB_SIZE)).astype(np.int32),
        logprobs=np.zeros(rows, np.float32),
        ranks=np.ones(rows, np.int32),
        top_token_ids=(likeliest % np.uint64(VOCAB_SIZE)).astype(np.int32),
        top_logprobs=top_logprobs,
    )


def _mixed(values: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finish: every bit of the result depends on every bit of the value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(values ^ (values >> np.uint64(31)))


def simulated_engine(
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    prefix_caching: bool = True,
) -> InferenceEngine:
    """An engine whose model does not exist. Its pool has no memory either."""
    geometry = KVGeometry(1, num_blocks, 1, block_size, 1, "float32")
    kv_cache = KVCache(geometry, create_block_allocator(num_blocks, block_size), prefix_caching)
    return InferenceEngine(
        executor=RecordingExecutor(simulated_step, "simulated", geometry),
        kv_cache=kv_cache,
        scheduler=Scheduler(kv_cache, max_num_batched_tokens, max_num_seqs),
        tokenizer=None,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(),
        max_model_len=max_model_len,
    )


def run_paged(
    engine: InferenceEngine,
    requests: list[Arrival],
    *,
    cost: CostModel | None,
    shared_len: int = 0,
    decoding: Decoding = SINGLE,
    seed: int = 0,
) -> Trace:
    """Play the requests: prompts of random tokens, of which the first ``shared_len`` are the same for all.

    Args:
        engine: idle. It keeps what it has cached.
        cost: of a step; None: as long as it takes.
        decoding: of each request.
    """
    recorder = engine.executor
    if not isinstance(recorder, RecordingExecutor):  # the real model
        recorder = RecordingExecutor(engine.executor.execute, engine.executor.name, engine.kv_cache.geometry)
        engine.executor = recorder
    recorder.steps.clear()
    geometry = engine.kv_cache.geometry
    prompts = _prompts(requests, shared_len, engine.vocab_size, seed)
    trace = Trace(geometry.num_slots, engine.scheduler.max_num_batched_tokens)
    before = engine.metrics().preemptions
    by_id: dict[str, int] = {}
    clock, num_added = 0.0, 0
    while num_added < len(requests) or engine.has_unfinished_requests():
        if not engine.has_unfinished_requests():
            clock = max(clock, requests[num_added].time)
        while num_added < len(requests) and requests[num_added].time <= clock:
            request = requests[num_added]
            params = decoding.params(request.output_len)
            by_id[engine.add_requests([next(prompts)], [params])[0]] = num_added
            num_added += 1
        unfinished = num_added - len(trace.ends)
        started = time.perf_counter()
        outputs = engine.step()
        seconds = time.perf_counter() - started
        rows, context, tokens, blocks, unshared = recorder.steps[-1]
        if cost is not None:
            seconds = cost.seconds(rows, context)
        waiting = engine.metrics().num_waiting // decoding.width
        # What a block of a running request has left, its own tokens will not always fill: all of it is lost.
        internal = blocks * geometry.block_size - tokens
        trace.starts.append(clock)
        trace.steps.append(
            Step(seconds, rows, context, unfinished - waiting, waiting, tokens, 0, internal, unshared, blocks)
        )
        clock += seconds
        trace.ends.update({by_id.pop(output.request_id): clock for output in outputs})
    trace.preemptions = engine.metrics().preemptions - before
    return trace


def _prompts(requests: list[Arrival], shared_len: int, vocab_size: int, seed: int) -> Iterator[list[int]]:
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, vocab_size, shared_len).tolist()
    for request in requests:
        yield shared + rng.integers(0, vocab_size, request.prompt_len - shared_len).tolist()
