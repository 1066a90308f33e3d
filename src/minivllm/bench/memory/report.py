"""A memory report in the terminal: bars of the KV memory, tables beside the paper's. Measures nothing."""

from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from minivllm.bench.memory import paper
from minivllm.bench.memory.measure import Comparison, MemoryReport
from minivllm.bench.memory.trace import Figures

PARTS = (  # share, what it is
    ("tokens", "tokens"),
    ("reserved", "reserved"),
    ("internal", "lost"),
    ("external", "free"),
)
_STYLES = (("█", "green"), ("▓", "yellow"), ("▒", "red"), ("░", "bright_black"))
_MOST_BAR, _LEAST_BAR, _OTHER_COLUMNS = 40, 10, 72  # characters


def print_report(report: MemoryReport, console: Console) -> None:
    """Everything, for people."""
    setting = report.setting
    console.print(f"workload   {report.workload}; seed {setting.seed}")
    console.print(
        f"KV memory  {setting.slots:,} tokens for every scheme (the paper's: {paper.SLOTS:,}); ours in "
        f"{setting.blocks:,} blocks of {setting.block_size}; max_model_len {setting.max_model_len:,}"
    )
    model = f"the real model {setting.real}, for ours; the others'" if setting.real else "simulated"
    console.print(f"steps      {model}: {report.cost}")
    bar = max(_LEAST_BAR, min(_MOST_BAR, console.width - _OTHER_COLUMNS))
    console.print(_memory(report.schemes, setting.workload, bar))
    console.print(_running(report.schemes, setting.workload))
    if report.rates:
        console.print(_rates(report.rates))
    console.print(_sharing("samples", report.samples, paper.SAVED_BY_SAMPLES[setting.workload]))
    console.print(_sharing("beams", report.beams, paper.SAVED_BY_BEAMS[setting.workload]))
    console.print(_prefixes(report.prefixes))


def all_figures(comparison: Comparison) -> dict[str, Figures]:
    """Ours first."""
    return {"paged": comparison.paged, **comparison.contiguous}


def _memory(comparison: Comparison, workload: str, bar: int) -> RenderableType:
    full = "while requests wait for memory" if comparison.paged.saturated else "not full: nobody waited"
    title = f"KV memory, {comparison.title}, {comparison.rate:.3g} requests a second, {full}"
    table = Table(title=title, title_justify="left", box=None)
    parts = (f"{mark} {part}" for (_, part), (mark, _) in zip(PARTS, _STYLES, strict=True))
    for heading in ("", "", *parts, "paper: tokens"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, figures in all_figures(comparison).items():
        shares = [getattr(figures, part) for part, _ in PARTS]
        cells = [f"{share:.1%}" for share in shares]
        published = f"{paper.FIGURES[name].tokens} %" if workload == "sharegpt" else ""
        table.add_row(name, _bar(shares, bar), *cells, published)
    note = (
        "Reserved: empty, its holder will fill it. Lost: empty, its holder has no use for it. "
        "Free: held by nobody, or lost between pieces of the wrong size."
    )
    return Group("", table, note, *(["The paper's: Figure 2."] if workload == "sharegpt" else []))


def _bar(shares: list[float], characters: int) -> Text:
    text, begin = Text(), 0.0
    for share, (mark, colour) in zip(shares, _STYLES, strict=True):
        length = round((begin + share) * characters) - round(begin * characters)
        text.append(mark * length, style=colour)
        begin += share
    return text


def _running(comparison: Comparison, workload: str) -> RenderableType:
    table = Table(title="Requests at once and finished", title_justify="left", box=None)
    for heading in ("", "at once", "paged: ×", "paper", "paper: ×", "finished/s", "paged: ×", "paper: ×"):
        table.add_column(heading, justify="right" if heading else "left")
    ours, theirs = comparison.paged, paper.FIGURES["paged"].running[workload]
    for name, figures in all_figures(comparison).items():
        published = paper.FIGURES[name].running[workload]
        table.add_row(
            name,
            _at_once(figures),
            "" if name == "paged" else f"{ours.running / figures.running:.2f}",
            f"{published:.2f}",
            "" if name == "paged" else f"{theirs / published:.2f}",
            f"{figures.throughput:.2f}",
            "" if name == "paged" else f"{ours.throughput / figures.throughput:.2f}",
            paper.RATES.get(name, "") if workload == "sharegpt" else "",
        )
    note = (
        f"Preempted: {ours.preemptions}. The paper's: Figure 13, OPT-13B on an A100; "
        "request rates that it sustains, section 6.2."
    )
    return Group("", table, note)


def _at_once(figures: Figures) -> str:
    return f"{figures.running:.1f}" if figures.saturated else f"{figures.running:.1f}+"


def _rates(comparisons: list[Comparison]) -> RenderableType:
    title = "Latency, ms for each output token (mean of a request's time by its tokens)"
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("requests/s", justify="right")
    names = list(all_figures(comparisons[0]))
    for name in names:
        table.add_column(name, justify="right")
    for comparison in comparisons:
        row = all_figures(comparison)
        cells = (f"{row[name].latency * 1e3:,.0f}" for name in names)
        table.add_row(f"{comparison.rate:.3g}", *cells)
    return Group("", table)


def _sharing(
    kind: str, comparisons: Mapping[int, Comparison], published: Mapping[int, str]
) -> RenderableType:
    table = Table(title=f"Blocks saved by sharing among {kind}", title_justify="left", box=None)
    headings = (
        kind,
        "saved",
        "paper",
        "at once: paged",
        "max",
        "pow2",
        "oracle",
        "finished/s: paged",
        "oracle",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for width, comparison in comparisons.items():
        running = map(_at_once, all_figures(comparison).values())
        paper_says = f"{published[width]} %" if width in published else ""
        finished = (f"{f.throughput:.2f}" for f in (comparison.paged, comparison.contiguous["oracle"]))
        table.add_row(str(width), f"{comparison.paged.sharing:.1%}", paper_says, *running, *finished)
    note = (
        "The paper's: Figure 15 (Alpaca), section 6.3 (ShareGPT: least and most). +: more would have fitted."
    )
    return Group("", table, note)


def _prefixes(comparisons: Mapping[int, Comparison]) -> RenderableType:
    table = Table(title="Prompts with a common beginning", title_justify="left", box=None)
    headings = ("shared tokens", "finished/s: paged", "oracle", "×", "paper: ×", "at once: paged", "oracle")
    for heading in headings:
        table.add_column(heading, justify="right")
    for length, comparison in comparisons.items():
        ours, oracle = comparison.paged, comparison.contiguous["oracle"]
        table.add_row(
            str(length),
            f"{ours.throughput:.2f}",
            f"{oracle.throughput:.2f}",
            f"{ours.throughput / oracle.throughput:.2f}",
            f"{paper.PREFIX_SPEEDUP[length]:.2f}",
            _at_once(ours),
            _at_once(oracle),
        )
    return Group("", table, "The paper's: LLaMA-13B translating WMT16, Figure 16.")
