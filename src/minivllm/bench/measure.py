"""The three benchmarks: load an engine, run a workload beside the machine's limits and other engines, report.

Rounds: in each, the read bandwidth, then our engine, then each of the others. So what drifts, drifts for all.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import numpy as np

from minivllm.bench.compare import Peer, parse_peers, running_peers
from minivllm.bench.limits import (
    Format,
    LeastTime,
    MachineRates,
    ModelCosts,
    Shape,
    decode_time,
    prefill_time,
    workload_time,
)
from minivllm.bench.machine import Machine
from minivllm.bench.report import Figure, PeerFigures, Report
from minivllm.bench.workloads import Run, random_prompts, run_engine
from minivllm.config import EngineConfig
from minivllm.errors import ConfigError, counted
from minivllm.executors.native import NativeExecutor, matrix_formats
from minivllm.factory import create_engine
from minivllm.models.config import tensor_shapes
from minivllm.models.registry import load_checkpoint, resolve_model
from minivllm.models.weights import Checkpoint

Kind = Literal["latency", "throughput", "prefix"]
Progress = Callable[[str], None]

_MAX_REQUESTS = 2**16  # as many as may run at once
_MAX_LENGTH = 2**24  # tokens; what the model can take is asked when it is loaded
_MAX_RUNS = 10_000


@dataclass(frozen=True)
class Plan:
    """What to run. ``waves`` follow each other: requests that do not fit at once wait."""

    kind: Kind
    waves: Sequence[Shape]
    runs: int
    compare: str = ""  #: as ``compare.parse_peers`` takes it
    seed: int = 0

    @property
    def requests(self) -> int:
        """Of all waves."""
        return sum(wave.requests for wave in self.waves)

    @property
    def concurrency(self) -> int:
        """Requests at once, at most."""
        return max(wave.requests for wave in self.waves)

    @property
    def shape(self) -> Shape:
        """All requests, as if they came at once."""
        first = self.waves[0]
        return Shape(self.requests, first.prompt_len, first.output_len, first.shared_len)

    def __str__(self) -> str:
        shape = self.shape
        shared = f" of which {shape.shared_len:,} are shared" if shape.shared_len else ""
        at_once = "" if self.concurrency == self.requests else f", {self.concurrency} at once"
        return (
            f"{counted(self.requests, 'request')}{at_once}: {counted(shape.prompt_len, 'prompt token')}"
            f"{shared}, {shape.output_len:,} generated"
        )


def plan(
    kind: Kind, requests: int, concurrency: int, lengths: tuple[int, int, int], runs: int, compare: str
) -> Plan:
    """A checked plan. ``lengths``: of the prompt, of what all prompts share, of the output, in tokens.

    Raises:
        ConfigError: a number is too small, or so large that it must be a mistake. It is named by its option.
    """
    prompt_len, shared_len, output_len = lengths
    for name, value, least, most in (
        ("--batch-size" if kind == "latency" else "--num-prompts", requests, 1, _MAX_REQUESTS),
        ("--concurrency", concurrency, 1, _MAX_REQUESTS),
        ("--shared-len", shared_len, 0, _MAX_LENGTH),
        ("--own-len" if kind == "prefix" else "--prompt-len", prompt_len - shared_len, 1, _MAX_LENGTH),
        ("--output-len", output_len, 1 if kind == "latency" else 2, _MAX_LENGTH),
        ("--runs", runs, 1, _MAX_RUNS),
    ):
        if not least <= value <= most:
            raise ConfigError(f"{name} is {value:,}; it must be from {least:,} to {most:,}")
    full, rest = divmod(requests, concurrency)
    waves = [Shape(n, prompt_len, output_len, shared_len) for n in [concurrency] * full + [rest] * (rest > 0)]
    return Plan(kind, waves, runs, compare)


def measure(config: EngineConfig, plan: Plan, progress: Progress = lambda text: None) -> Report:
    """Run a plan.

    Raises:
        ConfigError, ModelError: as ``factory.create_engine``; or the workload does not fit the engine.
        RuntimeError: our engine gave another number of tokens than it was asked for.
    """
    checkpoint = load_checkpoint(resolve_model(config.model))
    progress(f"loading {config.model}")
    engine = create_engine(config)
    executor = engine.executor
    if not isinstance(executor, NativeExecutor):
        raise ConfigError("the machine's limits are those of the native executor; use executor='native'")
    shape = plan.shape
    if shape.prompt_len + shape.output_len > engine.max_model_len:
        raise ConfigError(
            f"the workload has {shape.prompt_len:,} + {shape.output_len:,} tokens a request, but "
            f"max_model_len is {engine.max_model_len:,}"
        )
    formats = _formats(checkpoint, config)
    main_format = _main_format(formats, checkpoint)
    progress("measuring the machine")
    machine = Machine(executor.threads)
    rng = np.random.default_rng(plan.seed)
    max_len = shape.prompt_len + shape.output_len
    specs = parse_peers(plan.compare, main_format)
    with running_peers(specs, checkpoint, executor.threads, plan.concurrency, max_len, progress) as (
        peers,
        absent,
    ):
        ours: list[Run] = []
        theirs: dict[Peer, list[tuple[float, Run]]] = {peer: [] for peer in peers}
        bandwidths: list[float] = []
        for i in range(-1, plan.runs):  # the first one warms up
            progress("warming up" if i < 0 else f"run {i + 1} of {plan.runs}")
            bandwidths += [machine.read_bandwidth()] * (i >= 0)
            engine.reset_prefix_cache()  # a run is a first one, in memory that the one before it has touched
            run = run_engine(engine, random_prompts(rng, engine.vocab_size, shape), shape.output_len)
            ours += [run] * (i >= 0)
            for peer in list(theirs):
                try:
                    pair = _run_peer(peer, plan, rng, engine.vocab_size)
                except RuntimeError as error:  # the others go on
                    absent.append(f"{peer.spec} failed: {error}")
                    del theirs[peer]
                else:
                    theirs[peer] += [pair] * (i >= 0)
        bandwidths.append(machine.read_bandwidth())

        geometry = engine.kv_cache.geometry
        costs = ModelCosts.of(
            checkpoint.config,
            formats,
            executor.model_bytes,
            "bfloat16" if geometry.dtype == "int8" else geometry.dtype,
            geometry.bytes_per_block // geometry.block_size,
        )
        rates = machine.rates(median(bandwidths), executor.isa)
        figures = _figures(plan, ours, costs, rates)
        return Report(
            workload=str(plan),
            model=f"{checkpoint.path.name}, {_num_weights(checkpoint) / 1e6:,.1f} M weights",
            weights=f"{main_format}, {executor.model_bytes / 2**20:,.1f} MiB; cache {geometry.dtype}",
            engine=f"native, {executor.isa}, {executor.threads} threads",
            processor=machine.processor,
            peaks=machine.peaks,
            bandwidths=bandwidths,
            limit=_sum(workload_time(wave, costs, rates) for wave in plan.waves),
            figures=figures,
            peers=[
                PeerFigures(str(peer.spec), peer.info, _peer_figures(plan, runs))
                for peer, runs in theirs.items()
            ],
            absent=absent,
        )


def _run_peer(peer: Peer, plan: Plan, rng: np.random.Generator, vocab_size: int) -> tuple[float, Run]:
    """Seconds for the first tokens alone (latency only), and the whole run."""
    shape = plan.shape
    first = 0.0
    if plan.kind == "latency":
        first = peer.generate(random_prompts(rng, vocab_size, shape), 1, shape.shared_len).seconds
    return first, peer.generate(random_prompts(rng, vocab_size, shape), shape.output_len, shape.shared_len)


def _figures(plan: Plan, runs: list[Run], costs: ModelCosts, rates: MachineRates) -> list[Figure]:
    """Of our engine. The names that ``_peer_figures`` has too are compared."""
    shape = plan.shape
    tokens, later = shape.requests * shape.output_len, shape.requests * (shape.output_len - 1)
    whole = _sum(workload_time(wave, costs, rates) for wave in plan.waves).seconds
    if plan.kind == "prefix":
        return [Figure("all answers", "s", [r.seconds for r in runs], whole)]
    if plan.kind == "throughput":
        seconds = [r.seconds for r in runs]
        total = tokens + shape.requests * shape.prompt_len
        return [
            Figure("generated", "tok/s", [tokens / s for s in seconds], tokens / whole),
            Figure("prompts too", "tok/s", [total / s for s in seconds], total / whole),
        ]
    firsts = [max(times[0] for times in r.token_times) for r in runs]
    prefill = prefill_time(shape, costs, rates).seconds
    prompt_tokens = shape.requests * shape.prompt_len
    figures = [
        Figure("first token", "ms", [1e3 * s for s in firsts], 1e3 * prefill),
        Figure("prompt", "tok/s", [prompt_tokens / s for s in firsts], prompt_tokens / prefill),
    ]
    if later:
        gaps = [np.concatenate([np.diff(times) for times in r.token_times]) * 1e3 for r in runs]
        decode = decode_time(shape, costs, rates).seconds
        figures += [
            Figure(
                "between tokens",
                "ms",
                [float(np.median(g)) for g in gaps],
                1e3 * decode / (shape.output_len - 1),
            ),
            Figure("between tokens, p99", "ms", [float(np.percentile(g, 99)) for g in gaps]),
            Figure(
                "decode",
                "tok/s",
                [later / (r.seconds - first) for r, first in zip(runs, firsts, strict=True)],
                later / decode,
            ),
        ]
    return figures


def _peer_figures(plan: Plan, runs: list[tuple[float, Run]]) -> list[Figure]:
    shape = plan.shape
    if plan.kind == "prefix":
        return [Figure("all answers", "s", [r.seconds for _, r in runs])]
    if plan.kind == "throughput":
        tokens = shape.requests * shape.output_len
        return [Figure("generated", "tok/s", [tokens / r.seconds for _, r in runs])]
    prompt_tokens, later = shape.requests * shape.prompt_len, shape.requests * (shape.output_len - 1)
    figures = [Figure("prompt", "tok/s", [prompt_tokens / first for first, _ in runs])]
    if later:
        figures.append(Figure("decode", "tok/s", [later / (r.seconds - first) for first, r in runs]))
    return figures


def _formats(checkpoint: Checkpoint, config: EngineConfig) -> dict[str, Format]:
    """The format that each matrix is packed in."""
    dtype = checkpoint.dtype if config.dtype == "auto" else config.dtype
    return matrix_formats(checkpoint, dtype, config.weight_quantization)


def _main_format(formats: Mapping[str, Format], checkpoint: Checkpoint) -> Format:
    """The one that most weights of the layers have."""
    shapes = tensor_shapes(checkpoint.config)
    weights: Counter[Format] = Counter()
    for name, format in formats.items():
        if name.startswith("layers."):
            weights[format] += math.prod(shapes[name])
    return weights.most_common(1)[0][0]


def _num_weights(checkpoint: Checkpoint) -> int:
    return sum(map(math.prod, tensor_shapes(checkpoint.config).values()))


def _sum(times: Iterable[LeastTime]) -> LeastTime:
    return sum(times, start=LeastTime(0.0, 0.0))
