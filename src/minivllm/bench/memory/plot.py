"""A memory report as a picture: bars of the KV memory, requests at once, latency, sharing."""

from pathlib import Path
from typing import Any

from minivllm.bench.memory import paper
from minivllm.bench.memory.measure import MemoryReport
from minivllm.bench.memory.report import PARTS, all_figures
from minivllm.errors import ConfigError

_COLOURS = ("#2a9d5c", "#e9c46a", "#d1495b", "#b8bcc2")
_OURS, _PAPERS = "#26547c", "#a9bcd0"


def check_png(path: Path) -> None:
    """Find out before the work whether a picture can be written there in the end.

    Raises:
        ConfigError: there is no such directory, or matplotlib is not installed.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no directory {path.parent}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError("pictures need matplotlib: pip install '.[bench]'") from error


def write_png(report: MemoryReport, path: Path) -> None:
    """Draw and write it; ``check_png`` has been asked.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8.5), layout="constrained")  # without pyplot: no window, no global state
    axes = figure.subplots(2, 2)
    _draw_memory(axes[0, 0], report)
    _draw_running(axes[0, 1], report)
    if report.rates:
        _draw_rates(axes[1, 0], report)
    else:
        axes[1, 0].axis("off")
    _draw_sharing(axes[1, 1], report)
    what = f"real {report.setting.real}" if report.setting.real else "simulated steps"
    figure.suptitle(
        f"{report.schemes.title} requests in KV memory for {report.setting.slots:,} tokens "
        f"(blocks of {report.setting.block_size}; {what})"
    )
    figure.savefig(path, dpi=110, format="png")


def _draw_memory(axes: Any, report: MemoryReport) -> None:
    """Stacked bars: ours, and the paper's Figure 2 where the workload is its own."""
    bars: list[tuple[str, list[float]]] = []
    for name, figures in all_figures(report.schemes).items():
        bars.append((f"{name}\nhere", [100 * getattr(figures, part) for part, _ in PARTS]))
        if report.setting.workload == "sharegpt":
            published = paper.FIGURES[name]
            shares = [published.tokens, published.reserved, published.internal, published.external]
            bars.append((f"{name}\npaper", [share or 0.0 for share in shares]))
    bottoms = [0.0] * len(bars)
    for i, (_, part) in enumerate(PARTS):
        heights = [shares[i] for _, shares in bars]
        axes.bar([label for label, _ in bars], heights, 0.75, bottoms, label=part, color=_COLOURS[i])
        for x, (height, bottom) in enumerate(zip(heights, bottoms, strict=True)):
            if height >= 5:
                axes.text(x, bottom + height / 2, f"{height:.1f}", ha="center", va="center", fontsize=8)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_ylim(0, 118)
    axes.set_ylabel("% of the KV memory")
    axes.set_title("What the KV memory holds")
    axes.legend(ncols=2, fontsize=8, loc="upper center")
    axes.tick_params(axis="x", labelsize=8)


def _draw_running(axes: Any, report: MemoryReport) -> None:
    names = list(all_figures(report.schemes))
    ours = [figures.running for figures in all_figures(report.schemes).values()]
    papers = [paper.FIGURES[name].running[report.setting.workload] for name in names]
    _draw_pairs(axes, names, ours, papers)
    axes.set_title("Requests at once (the paper: OPT-13B on an A100)")


def _draw_rates(axes: Any, report: MemoryReport) -> None:
    rates = [comparison.rate for comparison in report.rates]
    for name in all_figures(report.rates[0]):
        its_own = [all_figures(comparison)[name].latency * 1e3 for comparison in report.rates]
        axes.plot(rates, its_own, marker="o", label=name)
    axes.set_yscale("log")
    ticks = [digit * 10**power for power in range(1, 6) for digit in (1, 2, 5)]
    axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    latencies = [figures.latency * 1e3 for c in report.rates for figures in all_figures(c).values()]
    axes.set_ylim(min(latencies) / 1.3, max(latencies) * 1.3)
    axes.set_xlabel("requests a second")
    axes.set_ylabel("ms for each output token")
    axes.set_title("Latency")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _draw_sharing(axes: Any, report: MemoryReport) -> None:
    names, ours, papers = [], [], []
    for kind, comparisons, published in (
        ("n =", report.samples, paper.SAVED_BY_SAMPLES[report.setting.workload]),
        ("beams", report.beams, paper.SAVED_BY_BEAMS[report.setting.workload]),
    ):
        for width, comparison in comparisons.items():
            names.append(f"{kind} {width}")
            ours.append(100 * comparison.paged.sharing)
            papers.append(float(published.get(width, "nan")))
    _draw_pairs(axes, names, ours, papers)
    axes.set_ylabel("% of the blocks")
    axes.set_title("Blocks saved by sharing")


def _draw_pairs(axes: Any, names: list[str], ours: list[float], papers: list[float]) -> None:
    places = range(len(names))
    for values, shift, label, colour in ((ours, -0.2, "here", _OURS), (papers, 0.2, "paper", _PAPERS)):
        bars = axes.bar([x + shift for x in places], values, 0.38, label=label, color=colour)
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
    axes.set_xticks(list(places), names)
    axes.legend(fontsize=8)
