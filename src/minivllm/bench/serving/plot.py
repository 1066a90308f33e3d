"""A picture of a load: how its latencies are distributed, and tokens a second over time. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from minivllm.bench.serving.figures import Trace
from minivllm.bench.serving.load import ServeReport
from minivllm.errors import ConfigError

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise ConfigError("--plot needs matplotlib: pip install '.[bench]'") from error

_BINS = 60


def save_plot(report: ServeReport, traces: Sequence[Trace], path: Path) -> None:
    """Write the picture, in the format that the path's ending names.

    Raises:
        ConfigError: it cannot be written.
    """
    good = [trace for trace in traces if trace.error is None]
    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2)
    figure.suptitle(f"{report.model} ({report.endpoint})\n{report.workload}", fontsize=10)
    goals = report.goals
    first = [t.ttft for t in good if t.ttft is not None]
    _distribution(axes[0, 0], "time to the first token", first, goals.get("ttft"))
    _distribution(axes[0, 1], "between pieces", [gap for t in good for gap in t.itl], goals.get("itl"))
    _distribution(axes[1, 0], "whole answer", [t.e2e for t in good], goals.get("e2e"))
    _over_time(axes[1, 1], good)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the plot cannot be written to {path}: {error}") from None


def _distribution(axes: Axes, title: str, seconds: Sequence[float], goal: float | None) -> None:
    values = 1000 * np.sort(np.asarray(seconds))
    axes.plot(values, (np.arange(len(values)) + 1) / max(1, len(values)), drawstyle="steps-post")
    if goal is not None:
        axes.axvline(goal, color="#e08214", linestyle="--", label="goal")
        axes.legend(loc="lower right")
    axes.set(title=title, xlabel="ms", ylabel="share at most so long", ylim=(0, 1.02))
    axes.grid(alpha=0.3)


def _over_time(axes: Axes, traces: Sequence[Trace]) -> None:
    """A piece stands for its share of its answer's tokens."""
    start = min((t.sent_at for t in traces), default=0.0)
    times = [time - start for t in traces for time in t.piece_times]
    tokens = [t.output_tokens / len(t.piece_times) for t in traces for _ in t.piece_times]
    counts, edges = np.histogram(times, bins=_BINS, weights=tokens)
    axes.stairs(counts / np.diff(edges), edges, fill=True, color="#2166ac")
    axes.set(title="output", xlabel="seconds since the first request", ylabel="tokens a second")
    axes.grid(alpha=0.3)
