"""What ``benchmark.py`` compares: the same tokens generated without a KV cache, with one, and with pages.

    mode                  executor          the KV cache
    no_kv_cache           baseline          none: ``bench.baseline``
    kv_cache_no_paging    torch or native   contiguous: one block as long as the run for each request
    kv_cache              torch or native   paged
    kv_cache_native       native            paged

All answer one prompt, ``concurrency`` times: without a cache one request after the other, else together, and
no request finds anything that another one has computed (no prefix caching). In each round every mode has one
run, so that what drifts, drifts for all. Needs torch. Knows nothing of the command line or of result files.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Literal

from minivllm.bench.baseline import UncachedModel
from minivllm.bench.workloads import check_counts
from minivllm.config import EngineConfig, ExecutorName
from minivllm.engine.inference_engine import InferenceEngine
from minivllm.errors import ConfigError
from minivllm.factory import create_engine
from minivllm.models.pull import cache_directory
from minivllm.models.weights import Checkpoint
from minivllm.sampling_params import SamplingParams
from minivllm.text.tokenizer import load_tokenizer

Mode = Literal["no_kv_cache", "kv_cache_no_paging", "kv_cache", "kv_cache_native"]
Dtype = Literal["float32", "bfloat16"]
Tick = Callable[[int], None]  #: called within a run, with the tokens that have just been generated


@dataclass(frozen=True)
class Point:
    """One point of a sweep: what all modes do there."""

    prompt_tokens: int  #: of each request
    new_tokens: int  #: of each request
    concurrency: int  #: requests

    @property
    def length(self) -> int:
        """Tokens of one request."""
        return self.prompt_tokens + self.new_tokens

    def __str__(self) -> str:
        many = f" × {self.concurrency}" if self.concurrency > 1 else ""
        return f"{self.prompt_tokens} + {self.new_tokens} tokens{many}"


@dataclass(frozen=True)
class Setup:
    """A mode and all that it needs to run at some point."""

    mode: Mode
    executor: Literal["baseline", "torch", "native"]
    block_size: int | None = None  #: None without a cache
    num_blocks: int | None = None
    warmup_runs: int = 1
    timed_runs: int = 3

    def __str__(self) -> str:
        return (
            self.mode
            if self.block_size is None
            else f"{self.mode}, {self.executor}, blocks of {self.block_size}"
        )


@dataclass(frozen=True)
class Sweep:
    """What to run at every point."""

    modes: Sequence[Mode]  #: in this order; the first is what the others' tokens are compared with
    executor: ExecutorName = "torch"  #: of kv_cache_no_paging and kv_cache
    block_sizes: Sequence[int] = (16,)  #: of the paged modes, one setup each
    total_blocks: int = 128  #: of their pools
    non_paged_block_sizes: Sequence[int] = (0,)  #: of kv_cache_no_paging; 0: as long as the run
    warmup_runs: int = 1
    timed_runs: int = 3
    baseline_warmup_runs: int = 1
    baseline_timed_runs: int = 3

    def setups(self, point: Point) -> list[Setup]:
        """The setups of a point. All requests fit their pools at once, so that nobody waits.

        Raises:
            ConfigError: they do not.
        """
        result = []
        runs = (self.warmup_runs, self.timed_runs)
        for mode in self.modes:
            if mode == "no_kv_cache":
                baseline_runs = (self.baseline_warmup_runs, self.baseline_timed_runs)
                result.append(Setup(mode, "baseline", None, None, *baseline_runs))
            elif mode == "kv_cache_no_paging":
                for size in dict.fromkeys(size or point.length for size in self.non_paged_block_sizes):
                    if size < point.length:
                        raise ConfigError(
                            f"a request of {point.length:,} tokens does not fit one block of {size:,}; use a "
                            f"--non-paged-block-size of {point.length:,} or more"
                        )
                    result.append(Setup(mode, self.executor, size, point.concurrency, *runs))
            else:
                executor: ExecutorName = "native" if mode == "kv_cache_native" else self.executor
                for size in self.block_sizes:
                    needed = point.concurrency * -(-point.length // size)
                    if needed > self.total_blocks:
                        raise ConfigError(
                            f"{point} take {needed:,} blocks of {size}, but --total-blocks is "
                            f"{self.total_blocks:,}; use {needed:,} or more"
                        )
                    result.append(Setup(mode, executor, size, self.total_blocks, *runs))
        return result


@dataclass(frozen=True)
class KVUsage:
    """Bytes of the pool after each step of a run that left a request unfinished."""

    used: list[int] = field(default_factory=list)  #: by tokens
    reserved: list[int] = field(default_factory=list)  #: by blocks that a request holds

    @property
    def utilisation(self) -> float:
        """Used / reserved, over all steps."""
        return mean(self.used) / mean(self.reserved)


@dataclass(frozen=True)
class Run:
    """One run of a mode."""

    seconds: float  #: from adding the requests to the last token of the last one
    outputs: list[list[int]]  #: token ids of each request
    usage: KVUsage | None  #: None without a cache, or if one step was all


@dataclass(frozen=True)
class Measurement:
    """A mode's runs at one point."""

    setup: Setup
    runs: list[Run]  #: the timed ones, at least one
    kv_bytes_per_token: int | None
    instruction_set: str  #: of the native kernels
    matching_tokens: int  #: leading tokens that every request of every run has in common with the first mode


class Cached:
    """Our engine on one pool. Forgets everything between two runs."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine: InferenceEngine = create_engine(config)
        geometry = self.engine.kv_cache.geometry
        self.kv_bytes_per_token: int | None = geometry.bytes_per_block // geometry.block_size
        self.instruction_set = str(getattr(self.engine.executor, "isa", ""))

    def run(self, prompt: Sequence[int], point: Point, tick: Tick) -> Run:
        """All requests together."""
        engine, per_token = self.engine, self.kv_bytes_per_token or 0
        per_block = engine.kv_cache.geometry.bytes_per_block
        params = SamplingParams(temperature=0, max_tokens=point.new_tokens, ignore_eos=True)
        outputs: dict[str, list[int]] = {}
        usage = KVUsage()
        before = state = engine.metrics()
        start = time.perf_counter()
        ids = engine.add_requests([list(prompt)] * point.concurrency, [params] * point.concurrency)
        while len(outputs) < point.concurrency:
            for output in engine.step():
                outputs[output.request_id] = output.outputs[0].token_ids
            # Nothing is preempted (``Sweep.setups`` sees to that) or shared, so each row computed is one
            # token in the cache until its request ends; the last token of a request is never computed.
            last, state = state, engine.metrics()
            if state.num_running:
                ended = len(outputs) * (point.length - 1)
                usage.used.append((state.computed_tokens - before.computed_tokens - ended) * per_token)
                usage.reserved.append((state.num_blocks - state.num_free_blocks) * per_block)
            tick(state.generated_tokens - last.generated_tokens)
        seconds = time.perf_counter() - start
        answers = [outputs[request_id] for request_id in ids]
        check_counts([len(answer) for answer in answers], point.concurrency, point.new_tokens)
        return Run(seconds, answers, usage if usage.used else None)


class Uncached:
    """The baseline."""

    kv_bytes_per_token: int | None = None
    instruction_set = ""

    def __init__(self, model: UncachedModel) -> None:
        self.model = model

    def run(self, prompt: Sequence[int], point: Point, tick: Tick) -> Run:
        """One request after the other."""
        start = time.perf_counter()
        answers = [
            self.model.generate(prompt, point.new_tokens, lambda: tick(1)) for _ in range(point.concurrency)
        ]
        return Run(time.perf_counter() - start, answers, None)


@dataclass
class Bench:
    """A model, and how its modes run. The baseline is loaded when it is first needed, and kept."""

    path: Path
    checkpoint: Checkpoint
    dtype: Dtype
    threads: int
    device: str  #: of torch
    seed: int
    _baseline: UncachedModel | None = None

    def measure(
        self,
        prompt: Sequence[int],
        point: Point,
        setups: Sequence[Setup],
        note: Callable[[str], None] = lambda text: None,
        tick: Tick = lambda tokens: None,
    ) -> list[Measurement]:
        """Every setup's runs at one point, in rounds.

        Args:
            prompt: ``point.prompt_tokens`` token ids.
            point: what to generate.
            setups: who does; the first is what the others' tokens are compared with.
            note: gets a line before each thing that takes time.
            tick: see ``Tick``.
        """
        runners: list[Cached | Uncached] = []
        for setup in setups:
            note(f"loading {setup}")
            runners.append(self._runner(setup, point))
        runs: list[list[Run]] = [[] for _ in setups]
        rounds = max(setup.warmup_runs for setup in setups)
        for i in range(-rounds, max(setup.timed_runs for setup in setups)):
            for setup, runner, done in zip(setups, runners, runs, strict=True):
                if -setup.warmup_runs <= i < setup.timed_runs:
                    note(
                        f"{point}: {setup}, "
                        + ("warming up" if i < 0 else f"run {i + 1} of {setup.timed_runs}")
                    )
                    run = runner.run(prompt, point, tick)
                    done += [run] * (i >= 0)
        first = runs[0][0].outputs
        return [
            Measurement(
                setup, done, runner.kv_bytes_per_token, runner.instruction_set,
                min(_matching(a, b) for run in done for a, b in zip(run.outputs, first, strict=True)),
            )
            for setup, runner, done in zip(setups, runners, runs, strict=True)
        ]  # fmt: skip

    def _runner(self, setup: Setup, point: Point) -> Cached | Uncached:
        if setup.executor == "baseline":
            if self._baseline is None:
                self._baseline = UncachedModel(self.checkpoint, self.dtype, self.device)
            return Uncached(self._baseline)
        native = setup.executor == "native"
        config = EngineConfig(
            model=self.path,
            dtype=self.dtype,
            quantization=None,
            executor=setup.executor,
            device="cpu" if native else self.device,
            threads=self.threads if native else None,  # torch has its own setting
            block_size=setup.block_size,  # type: ignore[arg-type]  # a cache has blocks
            num_blocks=setup.num_blocks,
            max_num_seqs=point.concurrency,
            enable_prefix_caching=False,
            seed=self.seed,
        )
        return Cached(config)


def prompt_ids(checkpoint: Checkpoint, text: str, length: int | None) -> list[int]:
    """The tokens of the text; with ``length``: repeated, or cut, to so many.

    Raises:
        ConfigError: the model has no vocabulary, or the text has no tokens.
        ModelError, RequestError: the vocabulary is missing, or does not know a character.
    """
    source = checkpoint.tokenizer
    if source is None:
        raise ConfigError(
            f"{checkpoint.path} has no vocabulary to read a prompt with; put NanoGPT's meta.pkl beside it"
        )
    tokenizer = load_tokenizer(source.kind, source.path, source.data, cache_dir=cache_directory())
    ids = list(tokenizer.encode(text))
    if not ids:
        raise ConfigError("the prompt has no tokens; give a --prompt that is not empty")
    return ids if length is None else (ids * -(-length // len(ids)))[:length]


def _matching(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading entries are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
