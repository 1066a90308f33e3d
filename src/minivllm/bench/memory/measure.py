"""The experiments: the same requests with paging and with contiguous reservation, in the same memory.

    schemes    how much of the KV memory holds tokens, how many requests run at once, how many finish a second
    rates      latency against the rate at which requests arrive
    samples    blocks saved by sharing among 2, 4, 6 samples of a prompt, and among as many beams
    prefixes   requests that all begin with the same 80 or 341 tokens

Whoever reserves is given what helps: its prompts are computed once for all samples and copied for free, and
its bookkeeping costs nothing.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from minivllm.bench.memory.contiguous import SCHEMES, run_contiguous
from minivllm.bench.memory.cost import CostModel, fit
from minivllm.bench.memory.paper import MAX_MODEL_LEN, SLOTS
from minivllm.bench.memory.simulate import SINGLE, Decoding, run_paged, simulated_engine
from minivllm.bench.memory.trace import Figures, Trace, figures
from minivllm.bench.memory.workload import TRANSLATION, WORKLOADS, Arrival, Workload, arrivals
from minivllm.config import EngineConfig, QuantizationName
from minivllm.engine.inference_engine import InferenceEngine
from minivllm.errors import ConfigError
from minivllm.factory import create_engine

#: SmolLM2-135M in bfloat16, whole steps of the engine on two cores of a Xeon with AMX that others used too;
#: 9 of 10 measured steps took from 0.9 to 1.4 times as long as this says. What prints the fit:
#: ``mini-vllm bench memory --real smollm2-135m --quantization none --requests 40``
COST = CostModel(step=9.8e-3, row=432e-6, context=2.79e-6)

WIDTHS = (2, 4, 6)
PREFIXES = (80, 341)
LOADS = (0.5, 0.75, 1.0, 1.25)  # in multiples of what the paged engine finishes

#: In a run: several times as many as the pool holds at once
_REQUESTS = {"sharegpt": 240, "alpaca": 1200, "translation": 400}

#: Of the numbers. The upper ends only refuse what would take hours, or more memory than there is.
_RANGES: dict[str, tuple[float, float]] = {
    "requests": (1, 100_000),
    "rate": (1e-6, 1_000_000),
    "seed": (0, 2**64 - 1),
    "block_size": (1, 2**20),
    "num_blocks": (1, 2**20),
    "max_model_len": (1, 2**20),
    "max_num_batched_tokens": (1, 2**20),
    "max_num_seqs": (1, 2**16),
}

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Setting:
    """What is run. Tokens in the KV memory: ``num_blocks`` × ``block_size``, for every scheme."""

    workload: str = "sharegpt"
    requests: int | None = None  #: None: enough to fill the pool for a while
    rate: float | None = None  #: requests a second; None: twice what the pool should be able to finish
    seed: int = 0
    block_size: int = 16
    num_blocks: int | None = None  #: None: as many tokens as the paper's pool has
    max_model_len: int = MAX_MODEL_LEN
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 1024  #: so many that memory is the limit
    real: str | None = None  #: a model to run instead of the simulation
    quantization: QuantizationName = "auto"  #: of its weights

    def __post_init__(self) -> None:
        if self.workload not in WORKLOADS:
            raise ConfigError(f"there is no workload {self.workload!r}; use {' or '.join(WORKLOADS)}")
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{name} is {value}; it must be from {low:,} to {high:,}")
        if self.real is None and self.quantization != "auto":
            raise ConfigError(
                f"quantization is {self.quantization!r}, but a simulation has no weights; add --real MODEL"
            )
        longest = WORKLOADS[self.workload].prompt.most + WORKLOADS[self.workload].output.most
        if self.max_model_len < longest:
            raise ConfigError(
                f"max_model_len is {self.max_model_len:,}; the workload has requests of up to {longest:,}"
            )
        if max(WIDTHS) > min(self.max_num_seqs, self.max_num_batched_tokens):
            raise ConfigError(
                f"max_num_seqs is {self.max_num_seqs} and max_num_batched_tokens "
                f"{self.max_num_batched_tokens}; {max(WIDTHS)} samples need as many of both"
            )
        piece = 1 << (self.max_model_len - 1).bit_length()
        if self.slots < max(WIDTHS) * piece:
            raise ConfigError(
                f"the pool holds {self.slots:,} tokens; {max(WIDTHS)} samples of max_model_len "
                f"{self.max_model_len:,} need {max(WIDTHS)} contiguous pieces of {piece:,}"
            )

    @property
    def blocks(self) -> int:
        """Of the pool."""
        return SLOTS // self.block_size if self.num_blocks is None else self.num_blocks

    @property
    def slots(self) -> int:
        """Tokens that the pool has memory for."""
        return self.blocks * self.block_size


@dataclass(frozen=True)
class Comparison:
    """Our engine and the contiguous schemes on the same requests."""

    title: str
    rate: float  #: requests a second
    paged: Figures
    contiguous: dict[str, Figures]  #: by scheme


@dataclass(frozen=True)
class MemoryReport:
    """All that was found, and what it depends on."""

    setting: Setting
    workload: str  #: in words
    cost: CostModel
    schemes: Comparison
    rates: list[Comparison]
    samples: dict[int, Comparison]
    beams: dict[int, Comparison]
    prefixes: dict[int, Comparison]

    def as_json(self) -> dict[str, Any]:
        """Everything, in plain types."""
        return asdict(self)


def measure(setting: Setting, progress: Progress) -> MemoryReport:
    """Run all experiments; with a real model those that do not ask for many runs.

    Raises:
        ConfigError: the model and the pool do not fit the setting.
        ModelError: there is no such model.
    """
    runner = _Runner(setting, progress)
    workload = WORKLOADS[setting.workload]
    count = setting.requests or _REQUESTS[setting.workload]
    rate = setting.rate or 2 * _expected_throughput(workload, setting.slots, runner.cost)

    def some(divisor: int) -> int:
        """Smaller runs where there are several, or each request has several sequences."""
        return max(1, count // divisor)

    schemes = runner.compare(workload, count, rate)
    rates = []
    if setting.real is None:
        for load in LOADS:
            rates.append(runner.compare(workload, some(4), load * schemes.paged.throughput))
    samples, beams = {}, {}
    for width in WIDTHS:
        samples[width] = runner.compare(workload, some(4), rate, Decoding(samples=width))
        beams[width] = runner.compare(workload, some(6), rate, Decoding(beams=width))
    prefixes = {}
    for length in PREFIXES:
        shared = replace(TRANSLATION, shared_len=length)
        rate = 2 * _expected_throughput(shared, setting.slots, runner.cost)
        prefixes[length] = runner.compare(shared, setting.requests or _REQUESTS["translation"], rate)
    return MemoryReport(setting, str(workload), runner.cost, schemes, rates, samples, beams, prefixes)


class _Runner:
    """Runs one comparison after the other, with the cost of steps as it was measured or is assumed."""

    def __init__(self, setting: Setting, progress: Progress) -> None:
        self.cost = COST
        self._setting = setting
        self._progress = progress
        self._real = None if setting.real is None else _real_engine(setting, setting.real)
        self._measured: list[tuple[int, int, float]] = []

    def compare(self, workload: Workload, count: int, rate: float, decoding: Decoding = SINGLE) -> Comparison:
        setting = self._setting
        title = f"{workload.name}, {decoding}" if decoding.width > 1 else workload.name
        if workload.shared_len:
            title = f"{workload.name}, {workload.shared_len} shared tokens"
        self._progress(f"{title}: {count} requests, {rate:.3g} a second")
        requests = arrivals(workload, count, rate, setting.seed)
        paged = figures("paged", self._paged(requests, workload, decoding), requests)
        contiguous: dict[str, Figures] = {}
        for scheme in SCHEMES:
            trace = run_contiguous(
                scheme,
                requests,
                slots=setting.slots,
                max_model_len=setting.max_model_len,
                max_num_batched_tokens=setting.max_num_batched_tokens,
                max_num_seqs=setting.max_num_seqs,
                cost=self.cost,
                width=decoding.width,
            )
            contiguous[scheme] = figures(scheme, trace, requests)
        return Comparison(title, rate, paged, contiguous)

    def _paged(self, requests: list[Arrival], workload: Workload, decoding: Decoding) -> Trace:
        setting = self._setting
        engine = self._real or simulated_engine(
            setting.blocks,
            setting.block_size,
            setting.max_model_len,
            setting.max_num_batched_tokens,
            setting.max_num_seqs,
        )
        engine.reset_prefix_cache()
        trace = run_paged(
            engine,
            requests,
            cost=None if self._real else self.cost,
            shared_len=workload.shared_len,
            decoding=decoding,
            seed=setting.seed,
        )
        if self._real is not None:
            self._measured += [(step.rows, step.context, step.seconds) for step in trace.steps]
            self.cost = fit(*zip(*self._measured, strict=True))
        return trace


def _real_engine(setting: Setting, model: str) -> InferenceEngine:
    return create_engine(
        EngineConfig(
            model=model,
            quantization=None if setting.quantization == "none" else setting.quantization,
            block_size=setting.block_size,
            num_blocks=setting.blocks,
            max_model_len=setting.max_model_len,
            max_num_batched_tokens=setting.max_num_batched_tokens,
            max_num_seqs=setting.max_num_seqs,
        )
    )


def _expected_throughput(workload: Workload, slots: int, cost: CostModel) -> float:
    """About the requests a second that a full pool can finish, each in it with half of its output."""
    own, output = workload.prompt.mean, workload.output.mean
    running = (slots - workload.shared_len) / (own + output / 2)
    rows = running * (1 + own / output)
    return running / (
        output * cost.seconds(int(rows), int(running * (workload.shared_len + own + output / 2)))
    )
