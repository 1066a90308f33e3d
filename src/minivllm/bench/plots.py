"""Pictures of ``benchmark.py``'s CSV, for the notebook and ``mini-vllm bench plot``. Reads nothing else.

Each function takes the rows of ``read`` and gives a figure, with a sentence instead where the CSV has no rows
for it. Needs pandas and matplotlib.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from minivllm.bench.results import COLUMNS, read_rows
from minivllm.errors import ConfigError

try:
    import matplotlib.pyplot as plt
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise ConfigError("plots need pandas and matplotlib: pip install '.[bench]'") from error

_NUMBERS = (
    "prompt_tokens", "new_tokens", "block_size", "concurrency", "threads", "timed_runs", "avg_seconds",
    "stdev_seconds", "min_seconds", "max_seconds", "tokens_per_second", "speedup_vs_no_cache",
    "kv_mean_bytes_used", "kv_mean_bytes_reserved", "kv_utilisation", "matching_tokens",
)  # fmt: skip
#: mode → what a reader calls it, and its colour
_MODES = {
    "no_kv_cache": ("no KV cache", "#4d4d4d"),
    "kv_cache_no_paging": ("contiguous KV cache", "#e08214"),
    "kv_cache": ("paged KV cache", "#2166ac"),
    "kv_cache_native": ("paged KV cache", "#1a9850"),
}
_EXECUTORS = {"baseline": "PyTorch", "torch": "PyTorch", "native": "native"}
_SAME = ["model", "processor", "threads", "seed"]  # of rows that may share a picture
_POINT = ["dtype", "prompt_tokens", "new_tokens", "concurrency"]
_SETUP = ["mode", "executor", "block_size", *_POINT]


def read(csv: Path | str) -> pd.DataFrame:
    """The rows that can be compared with the last one: of its model, on its machine.

    Of several measurements of one setup it is the one beside the most other modes (a machine drifts: only
    what was measured together can be compared), and of these the latest. Columns are the CSV's, and
    ``series``, the name of the line that a row is on.

    Raises:
        ConfigError: the file is not such a CSV, or has no rows.
    """
    if not Path(csv).is_file():
        raise ConfigError(f"{csv} does not exist; benchmark.py writes it")
    rows = pd.DataFrame(read_rows(Path(csv)), columns=list(COLUMNS))
    rows = rows[rows["mode"].isin(_MODES) & rows["executor"].isin(_EXECUTORS)]
    if rows.empty:
        raise ConfigError(f"{csv} has no rows of the modes {', '.join(_MODES)}; benchmark.py writes them")
    for column in _NUMBERS:
        rows[column] = pd.to_numeric(rows[column], errors="coerce")
    rows = rows[(rows[_SAME] == rows[_SAME].iloc[-1]).all(axis=1)]
    rows.loc[(rows["mode"] == "kv_cache") & (rows["executor"] == "native"), "mode"] = "kv_cache_native"
    together = rows.groupby(["timestamp_utc", *_POINT])["mode"].transform("nunique")
    rows = rows.assign(beside_baseline=rows.speedup_vs_no_cache.notna(), together=together)
    rows = rows.sort_values(["beside_baseline", "together"], kind="stable")  # the latest last
    rows = rows.drop_duplicates(_SETUP, keep="last").sort_values(["prompt_tokens", "new_tokens"])
    return rows.assign(series=[_series(*row) for row in rows[["mode", "executor", "dtype"]].to_numpy()])


def caption(rows: pd.DataFrame) -> str:
    """Model and machine, in a line."""
    row = rows.iloc[-1]
    return f"{row.model} · {row.processor}, {row.threads} threads"


def runtime(rows: pd.DataFrame) -> Figure:
    """Seconds against generated length, a line for each mode: mean, and fastest to slowest run."""
    single = one_request(rows)
    prompts = _lengths(single, "prompt_tokens")
    figure, axes = _panels(rows, len(prompts), 2, "How long one request takes")
    for row_axes, prompt in zip(axes, prompts, strict=False):
        of_prompt = single[single.prompt_tokens == prompt]
        cached = of_prompt[of_prompt["mode"] != "no_kv_cache"]
        for panel, part, what in (
            (row_axes[0], of_prompt, "all"),
            (row_axes[1], cached, "with a KV cache only"),
        ):
            for name, line in part.groupby("series", sort=False):
                spread = [line.avg_seconds - line.min_seconds, line.max_seconds - line.avg_seconds]
                panel.errorbar(
                    line.new_tokens, line.avg_seconds, spread, label=name, capsize=3, **_style(line)
                )
            panel.set(title=f"prompt of {prompt} tokens: {what}", xlabel="generated tokens", ylabel="seconds")
            panel.set_xlim(left=0)
            panel.set_ylim(bottom=0)
    _legend(figure, axes[0][0], rows)
    return figure


def speedup(rows: pd.DataFrame) -> Figure:
    """How many times faster than without a cache, against generated length. float32."""
    single = one_request(_with_speedup(rows))
    prompts = _lengths(single, "prompt_tokens")
    figure, axes = _panels(rows, len(prompts), 1, "What the KV cache is worth to one request")
    for (panel,), prompt in zip(axes, prompts, strict=False):
        part = single[single.prompt_tokens == prompt]
        _speedup_lines(panel, part, "new_tokens")
        panel.set(title=f"prompt of {prompt} tokens", xlabel="generated tokens (logarithmic)")
    _legend(figure, axes[0][0], rows)
    return figure


def throughput(rows: pd.DataFrame) -> Figure:
    """Tokens a second by mode, at a few lengths."""
    single = one_request(rows)
    single = single[single.prompt_tokens == single.prompt_tokens.min()]
    modes = single.groupby("new_tokens").series.nunique()  # the lengths that most modes have, four of them
    lengths = [int(length) for length in modes.index[modes == modes.max()]]
    lengths = lengths if len(lengths) <= 4 else [lengths[round(i * (len(lengths) - 1) / 3)] for i in range(4)]
    figure, ((panel,),) = _panels(rows, 1 if lengths else 0, 1, "Tokens a second, one request")
    names = list(dict.fromkeys(single.series))
    width = 0.84 / max(1, len(names))
    for i, name in enumerate(names):
        line = single[single.series == name].set_index("new_tokens").tokens_per_second.reindex(lengths)
        places = [place - 0.42 + (i + 0.5) * width for place in range(len(lengths))]
        style = _style(single[single.series == name])
        bars = panel.bar(places, line, width * 0.94, color=style["color"], label=name)
        if style["ls"] != "-":
            for bar in bars:
                bar.set(hatch="//", edgecolor="white", lw=0)
        panel.bar_label(bars, [f"{v:.0f}" if v == v else "" for v in line], padding=2, fontsize=8)
    panel.set_xticks(range(len(lengths)), [f"{n} generated" for n in lengths])
    panel.set_ylabel("tokens a second")
    _legend(figure, panel, rows)
    return figure


def concurrency(rows: pd.DataFrame) -> Figure:
    """Speed-up of many requests at once over the same ones one after the other without a cache. float32."""
    many = _usual_blocks(_with_speedup(rows))
    lengths = _lengths(many[many.concurrency > 1], "new_tokens")[:2]
    prompt = many[many.concurrency > 1].prompt_tokens.min()
    figure, axes = _panels(
        rows, len(lengths), 1, "What it is worth to many requests at once", "rows of several requests"
    )
    for (panel,), length in zip(axes, lengths, strict=False):
        part = many[(many.new_tokens == length) & (many.prompt_tokens == prompt)].sort_values("concurrency")
        _speedup_lines(panel, part, "concurrency")
        panel.set(
            title=f"{length} tokens generated for each request", xlabel="requests at once (logarithmic)"
        )
    _legend(figure, axes[0][0], rows)
    return figure


def memory(rows: pd.DataFrame) -> Figure:
    """KV memory that the requests hold and that their tokens fill, on average over the run."""
    cached = rows[rows.kv_mean_bytes_reserved.notna() & (rows["dtype"] == "float32")]
    by_point = cached.groupby(["concurrency", "new_tokens", "prompt_tokens"])
    most_blocks = by_point.block_size.nunique()
    points = (
        list(dict.fromkeys([most_blocks.index.max(), most_blocks[::-1].idxmax()])) if len(most_blocks) else []
    )
    figure, axes = _panels(
        rows, len(points), 1, "KV memory that requests hold (light) and fill with tokens (dark)"
    )
    for (panel,), point in zip(axes, points, strict=False):
        part = by_point.get_group(point).sort_values(["mode", "block_size"])
        names = [_reservation(row) for row in part.itertuples()]
        part = part.assign(name=names).drop_duplicates("name")  # executors hold the same
        held, filled = part.kv_mean_bytes_reserved / 1e6, part.kv_mean_bytes_used / 1e6
        colors = [_MODES[mode][1] for mode in part["mode"]]
        panel.barh(part.name, held, color=colors, alpha=0.3, label="held")
        panel.barh(part.name, filled, color=colors)
        for i, (a, b) in enumerate(zip(held, filled, strict=True)):
            panel.text(a, i, f"  {b:.1f} of {a:.1f} MB, {b / a:.0%}", va="center", fontsize=9)
        requests, new_tokens, prompt = point
        who = "one request" if requests == 1 else f"{requests} requests at once"
        panel.set(title=f"{who}, {prompt} + {new_tokens} tokens each", xlabel="MB, mean over the run")
        panel.set_xlim(0, held.max() * 1.3)
        panel.invert_yaxis()
    figure.supxlabel(caption(rows), fontsize=8, color="#666666")
    return figure


PLOTS: Mapping[str, Callable[[pd.DataFrame], Figure]] = {
    "runtime": runtime,
    "speedup": speedup,
    "throughput": throughput,
    "concurrency": concurrency,
    "memory": memory,
}


def save_all(csv: Path, directory: Path) -> list[Path]:
    """Write every plot as ``directory/NAME.png``.

    Raises:
        ConfigError: as ``read``.
        OSError: they cannot be written.
    """
    rows = read(csv)
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, plot in PLOTS.items():
        figure = plot(rows)
        paths.append(directory / f"{name}.png")
        figure.savefig(paths[-1], dpi=100, metadata={"Software": None})
        plt.close(figure)
    return paths


def _series(mode: str, executor: str, dtype: str) -> str:
    return f"{_MODES[mode][0]}, {_EXECUTORS[executor]}" + ("" if dtype == "float32" else f", {dtype}")


def _style(line: pd.DataFrame) -> dict[str, Any]:
    """Colour by mode; contiguous hollow, as it may lie under paged; other dtypes dashed."""
    row = line.iloc[0]
    contiguous = row["mode"] == "kv_cache_no_paging"
    color = "#b35806" if contiguous and row["executor"] == "native" else _MODES[row["mode"]][1]
    return {
        "color": color,
        "marker": "o",
        "ms": 8 if contiguous else 5,
        "mfc": "none" if contiguous else color,
        "ls": "-" if row["dtype"] == "float32" else "--",
    }


def _with_speedup(rows: pd.DataFrame) -> pd.DataFrame:
    measured = rows.speedup_vs_no_cache.notna() & (rows["mode"] != "no_kv_cache")
    return rows[measured & (rows["dtype"] == "float32")]


def _usual_blocks(rows: pd.DataFrame) -> pd.DataFrame:
    """Paged rows of the block size that most have, and contiguous ones with as much reserved as is used."""
    paged = rows["mode"].isin(["kv_cache", "kv_cache_native"])
    usual = rows[paged].block_size.mode()
    exact = rows.block_size == rows.prompt_tokens + rows.new_tokens
    contiguous = (rows["mode"] == "kv_cache_no_paging") & exact
    return rows[(paged & rows.block_size.isin(usual[:1])) | contiguous | (rows["mode"] == "no_kv_cache")]


def one_request(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of a single request, of the block size that most have."""
    return _usual_blocks(rows[rows.concurrency == 1])


def _lengths(rows: pd.DataFrame, column: str) -> list[int]:
    return sorted(int(value) for value in rows[column].unique())


def _reservation(row: Any) -> str:
    if row.mode != "kv_cache_no_paging":
        return f"paged, blocks of {row.block_size:.0f}"
    exact = row.block_size == row.prompt_tokens + row.new_tokens
    return "contiguous, length known" if exact else f"contiguous, {row.block_size:.0f} reserved"


def _speedup_lines(panel: Axes, rows: pd.DataFrame, x: str) -> None:
    """A line for each series, with its values at the points, and the 1 × line."""
    panel.axhline(1, color="#4d4d4d", ls=":", lw=1.2)
    beside = panel.get_yaxis_transform()
    panel.text(0.995, 1, "1 ×: no KV cache", transform=beside, ha="right", va="bottom", fontsize=8)
    names = list(dict.fromkeys(rows.series))
    lowest = rows.groupby(x).speedup_vs_no_cache.min()
    for name in names:
        line = rows[rows.series == name]
        style = _style(line)
        panel.plot(line[x], line.speedup_vs_no_cache, label=name, **style)
        if name.startswith("contiguous"):  # it lies under the paged one
            continue
        below = line["mode"].iloc[0] == "kv_cache"
        for at, value in zip(line[x], line.speedup_vs_no_cache, strict=True):
            panel.annotate(
                f"{value:.1f} ×", (at, lowest[at] if below else value), xytext=(0, -9 if below else 7),
                textcoords="offset points",
                ha="center", va="top" if below else "bottom", fontsize=8, color=style["color"],
                bbox={"fc": "white", "ec": "none", "pad": 0.4, "alpha": 0.7},
            )  # fmt: skip
    panel.set_xscale("log")
    ticks = _lengths(rows, x)
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.minorticks_off()
    panel.set_ylabel("times faster")
    top = rows.speedup_vs_no_cache.max()
    panel.set_ylim(-0.1 * top, 1.18 * top)  # room for the labels below small values
    panel.set_yticks([tick for tick in panel.get_yticks() if 0 <= tick <= 1.18 * top])
    panel.margins(x=0.06)


def _panels(
    rows: pd.DataFrame, number: int, columns: int, title: str, missing: str = "such rows"
) -> tuple[Figure, list[list[Axes]]]:
    """A figure of ``number`` rows of panels; with 0 one that says that the CSV has nothing for it."""
    size = (10, 1.2 + 3.6 * max(1, number))
    figure, axes = plt.subplots(max(1, number), columns, figsize=size, squeeze=False, layout="constrained")
    figure.suptitle(title, fontsize=13, fontweight="bold")
    for panel in axes.flat:
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="both", alpha=0.2)
        if not number:
            panel.text(0.5, 0.5, f"the CSV has no {missing}", ha="center", va="center")
            panel.set_axis_off()
    return figure, [list(row) for row in axes]


def _legend(figure: Figure, panel: Axes, rows: pd.DataFrame) -> None:
    """Of one panel, below all of them; and of which model and machine it is."""
    handles, labels = panel.get_legend_handles_labels()
    legend = figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=4 if len(labels) == 4 else 3,
        fontsize=9,
        frameon=False,
        title=caption(rows),
    )
    legend.get_title().set(fontsize=8, color="#666666")
