"""``mini-vllm bench serve``: options and the table. aiohttp and matplotlib are loaded when needed."""

import asyncio
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from minivllm.bench.serving.figures import Latency, parse_goals
from minivllm.bench.serving.workload import Lengths, Workload

if TYPE_CHECKING:
    from minivllm.bench.serving.load import ServeReport

notes = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
NAMES: dict[Latency, str] = {
    "ttft": "time to first token (TTFT)",
    "tpot": "time per output token (TPOT)",
    "itl": "between pieces (ITL)",
    "e2e": "whole answer (E2E)",
}


def serve(
    base_url: Annotated[
        str, typer.Option("--base-url", help="The server's address.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option("--model", help="Default: the server's first one.")] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="OPENAI_API_KEY", help="If the server wants one.")
    ] = None,
    endpoint: Annotated[
        Literal["chat", "completions"], typer.Option("--endpoint", help="Which of OpenAI's.")
    ] = "completions",
    num_prompts: Annotated[int, typer.Option("--num-prompts", help="Requests in all.")] = 100,
    request_rate: Annotated[
        float,
        typer.Option("--request-rate", help="Requests a second, as a Poisson process; inf: all at once."),
    ] = math.inf,
    max_concurrency: Annotated[
        int | None,
        typer.Option("--max-concurrency", help="Requests under way, at most; default: any number."),
    ] = None,
    input_len: Annotated[int, typer.Option("--input-len", help="Tokens of a prompt, on average.")] = 128,
    output_len: Annotated[int, typer.Option("--output-len", help="Tokens generated, on average.")] = 128,
    lengths: Annotated[
        Lengths,
        typer.Option("--lengths", help="fixed, or spread as in shared conversations: log-normal."),
    ] = "fixed",
    seed: Annotated[int, typer.Option("--seed", help="Of arrivals, lengths and prompts.")] = 0,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Requests before those that count.")] = 4,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            "--goodput",
            help="Goals in ms, as in 'ttft:500 itl:50': count the requests that keep them all. Names: "
            "ttft, tpot, e2e, and itl, of which the longest counts. May be repeated.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the table.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the latencies' distributions into this PNG.")
    ] = None,
) -> None:
    """Put load on a server that speaks OpenAI's API, and tell latencies, throughput and goodput.

    Prompts are random words. Their number of tokens is approximate: it is fitted to the server's own counts
    of two prompts, where it tells them.
    """
    from minivllm.bench.serving.client import Client
    from minivllm.bench.serving.load import measure_server

    workload = Workload(num_prompts, request_rate, max_concurrency, input_len, output_len, lengths, seed)
    goals = parse_goals(goodput or [])
    if plot is not None:
        from minivllm.bench.serving.plot import save_plot
    client = Client(base_url, model, endpoint, api_key)
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=notes, transient=True) as progress:
        task = progress.add_task("", total=num_prompts)
        report, traces = asyncio.run(
            measure_server(client, workload, warmup, goals, lambda: progress.advance(task))
        )
    if plot is not None:
        save_plot(report, traces, plot)
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    else:
        _print(report)


def _print(report: "ServeReport") -> None:
    console, figures = Console(highlight=False, soft_wrap=True, markup=False), report.figures
    console.print(f"server     {report.base_url}, {report.model}, {report.endpoint}")
    console.print(f"workload   {report.workload}")
    for remark in _remarks(report):
        console.print(f"           {remark}")
    table = Table("ms", *("mean", "p50", "p90", "p99"))
    for name, spread in figures.latencies.items():
        if spread is not None:
            cells = (f"{value:,.1f}" for value in (spread.mean, spread.p50, spread.p90, spread.p99))
            table.add_row(NAMES[name], *cells)
    for column in table.columns[1:]:
        column.justify = "right"
    console.print(table)
    total = "" if figures.total_throughput is None else f", {figures.total_throughput:,.1f} with the prompts'"
    console.print(f"output     {figures.output_throughput:,.1f} tokens/s{total}")
    console.print(
        f"requests   {figures.request_throughput:,.2f} answered a second, {figures.concurrency:,.1f} under "
        f"way on average, {figures.seconds:,.1f} s in all"
    )
    if figures.goodput is not None:
        goals = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in report.goals.items())
        console.print(f"goodput    {figures.goodput:,.2f} requests a second with {goals}")
    console.print(f"errors     {figures.failed:,} of {figures.completed + figures.failed:,}")
    for message, count in list(figures.errors.items())[:5]:
        console.print(f"           {count:,} × {message}")


def _remarks(report: "ServeReport") -> list[str]:
    """What the sizes really were, and what is approximate about them."""
    figures, remarks = report.figures, []
    if figures.completed:
        output = f"{figures.output_tokens / figures.completed:,.1f}"
        prompt = "?" if figures.prompt_tokens is None else f"{figures.prompt_tokens / figures.completed:,.1f}"
        remarks.append(f"really {prompt} and {output} tokens on average")
    if not report.calibrated:
        remarks.append("the server counts no prompt tokens: a word is taken for one")
    if not figures.output_tokens_counted:
        remarks.append("the server counts no generated tokens: a piece of the stream is taken for one")
    if not report.ignore_eos:
        remarks.append("the server does not take ignore_eos: answers may end early")
    return remarks
