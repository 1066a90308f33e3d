"""From the measurements of one point to rows of the CSV. Measures and writes nothing."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median, stdev

from minivllm.bench.cache_modes import Measurement, Point
from minivllm.bench.results import Row


@dataclass(frozen=True)
class Circumstances:
    """What all rows of one call of ``benchmark.py`` have in common; see the columns of that name."""

    benchmark_label: str
    prompt: str
    model: str
    parameters: int
    dtype: str
    torch_device: str  #: the native executor runs on "cpu" whatever this is
    cuda_available: bool
    threads: int
    seed: int
    version: str
    git_commit: str
    processor: str
    torch_version: str


def rows(
    timestamp_utc: str, circumstances: Circumstances, point: Point, measurements: Sequence[Measurement]
) -> list[Row]:
    """One row for each measurement. Their speed-ups are over ``no_kv_cache``, if that was measured too."""
    seconds = {m.setup.mode: mean(run.seconds for run in m.runs) for m in measurements}
    baseline = seconds.get("no_kv_cache")
    return [_row(timestamp_utc, circumstances, point, m, baseline) for m in measurements]


def _row(timestamp_utc: str, c: Circumstances, point: Point, m: Measurement, baseline: float | None) -> Row:
    setup, durations = m.setup, [run.seconds for run in m.runs]
    average = mean(durations)
    usage = m.runs[-1].usage  # every run uses the same
    return Row(
        timestamp_utc=timestamp_utc,
        benchmark_label=c.benchmark_label,
        execution_device="cpu" if setup.executor == "native" else c.torch_device,
        cuda_available=c.cuda_available,
        mode=setup.mode,
        prompt=c.prompt,
        prompt_tokens=point.prompt_tokens,
        new_tokens=point.new_tokens,
        total_tokens_processed=point.concurrency * point.length,
        total_blocks=setup.num_blocks,
        block_size=setup.block_size,
        warmup_runs=setup.warmup_runs,
        timed_runs=len(durations),
        avg_seconds=average,
        stdev_seconds=stdev(durations) if len(durations) > 1 else 0.0,
        min_seconds=min(durations),
        max_seconds=max(durations),
        median_seconds=median(durations),
        tokens_per_second=point.concurrency * point.new_tokens / average,
        speedup_vs_no_cache=None if baseline is None else baseline / average,
        run_durations_json=json.dumps([round(seconds, 6) for seconds in durations]),
        model=c.model,
        parameters=c.parameters,
        dtype=c.dtype,
        executor=setup.executor,
        threads=c.threads,
        concurrency=point.concurrency,
        seed=c.seed,
        version=c.version,
        git_commit=c.git_commit,
        processor=c.processor,
        instruction_set=m.instruction_set,
        torch_version="" if setup.executor == "native" else c.torch_version,
        kv_bytes_per_token=m.kv_bytes_per_token,
        kv_peak_bytes_used=None if usage is None else max(usage.used),
        kv_peak_bytes_reserved=None if usage is None else max(usage.reserved),
        kv_mean_bytes_used=None if usage is None else round(mean(usage.used)),
        kv_mean_bytes_reserved=None if usage is None else round(mean(usage.reserved)),
        kv_utilisation=None if usage is None else usage.utilisation,
        matching_tokens=m.matching_tokens,
    )
