"""``mini-vllm bench latency | throughput | prefix | serve | memory | plot``: options, nothing else."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from minivllm.bench.measure import Plan, measure, plan
from minivllm.bench.memory.measure import Setting
from minivllm.bench.memory.measure import measure as measure_memory
from minivllm.bench.memory.plot import check_png, write_png
from minivllm.bench.memory.report import print_report
from minivllm.bench.serving.cli import serve
from minivllm.config import Dtype, EngineConfig, KVCacheDtype, QuantizationName
from minivllm.models.pull import MODEL_ALIASES

app = typer.Typer(
    no_args_is_help=True,
    help="Measure speed beside the machine's limits, and beside other engines.",
)
app.command("serve")(serve)
notes = Console(stderr=True, highlight=False, soft_wrap=True)

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help=f"As for generate: an alias ({', '.join(MODEL_ALIASES)}), a path …"),
]
Runs = Annotated[int, typer.Option("--runs", help="Runs that count; one more before them warms up.")]
PromptLen = Annotated[int, typer.Option("--prompt-len", help="Tokens of each prompt.")]
OutputLen = Annotated[int, typer.Option("--output-len", help="Tokens generated for each prompt.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")]
Compare = Annotated[
    str,
    typer.Option(
        "--compare",
        help="Other engines to run in turn with ours, those that are installed: llama.cpp, openvino, vllm, "
        "transformers, separated by commas; with a colon the type of their weights, as in llama.cpp:Q8_0. "
        "Their Pythons: $MINIVLLM_PEERS_PYTHON, separated by colons.",
    ),
]


def _engine_option(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Engine")


DtypeOption = Annotated[Dtype, _engine_option("--dtype", help="Of the weights; auto: as the checkpoint's.")]
QuantizationOption = Annotated[
    QuantizationName,
    _engine_option("--quantization", help="Of the weights: auto (as the file has them), int8, int4, none."),
]
KVDtypeOption = Annotated[
    KVCacheDtype,
    _engine_option("--kv-cache-dtype", help="Of the cache, int8 too; auto: as --dtype."),
]
Threads = Annotated[int | None, _engine_option("--threads", help="Default: the cores this process may use.")]
MaxBatchedTokens = Annotated[
    int, _engine_option("--max-num-batched-tokens", help="Tokens computed in one step, at most.")
]


@app.command()
def latency(
    model: Model,
    prompt_len: PromptLen = 128,
    output_len: OutputLen = 256,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Requests at once.")] = 1,
    runs: Runs = 5,
    compare: Compare = "",
    as_json: AsJson = False,
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = "auto",
    kv_cache_dtype: KVDtypeOption = "auto",
    threads: Threads = None,
    max_num_batched_tokens: MaxBatchedTokens = 512,
) -> None:
    """Time to the first token, between tokens, and tokens a second from then on."""
    lengths = (prompt_len, 0, output_len)
    wanted = plan("latency", batch_size, batch_size, lengths, runs, compare)
    config = _config(model, wanted, dtype, quantization, kv_cache_dtype, threads, max_num_batched_tokens)
    _print(config, wanted, as_json)


@app.command()
def throughput(
    model: Model,
    num_prompts: Annotated[
        int, typer.Option("--num-prompts", help="Requests, all there from the start.")
    ] = 64,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", help="Requests at once, at most; default: all.")
    ] = None,
    prompt_len: PromptLen = 128,
    output_len: OutputLen = 128,
    runs: Runs = 3,
    compare: Compare = "",
    as_json: AsJson = False,
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = "auto",
    kv_cache_dtype: KVDtypeOption = "auto",
    threads: Threads = None,
    max_num_batched_tokens: MaxBatchedTokens = 512,
) -> None:
    """Tokens a second over the whole time, prompts included."""
    lengths = (prompt_len, 0, output_len)
    at_once = num_prompts if concurrency is None else min(concurrency, num_prompts)
    wanted = plan("throughput", num_prompts, at_once, lengths, runs, compare)
    config = _config(model, wanted, dtype, quantization, kv_cache_dtype, threads, max_num_batched_tokens)
    _print(config, wanted, as_json)


@app.command()
def prefix(
    model: Model,
    num_prompts: Annotated[int, typer.Option("--num-prompts", help="Requests, all at once.")] = 16,
    shared_len: Annotated[
        int, typer.Option("--shared-len", help="Tokens at the beginning that all prompts have in common.")
    ] = 1024,
    own_len: Annotated[int, typer.Option("--own-len", help="Tokens that each prompt has after that.")] = 32,
    output_len: OutputLen = 64,
    runs: Runs = 3,
    compare: Compare = "",
    as_json: AsJson = False,
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = "auto",
    kv_cache_dtype: KVDtypeOption = "auto",
    threads: Threads = None,
    max_num_batched_tokens: MaxBatchedTokens = 512,
) -> None:
    """Seconds until all of some requests with a common beginning, new to the cache, are answered."""
    lengths = (shared_len + own_len, shared_len, output_len)
    wanted = plan("prefix", num_prompts, num_prompts, lengths, runs, compare)
    config = _config(model, wanted, dtype, quantization, kv_cache_dtype, threads, max_num_batched_tokens)
    _print(config, wanted, as_json)


@app.command()
def plot(
    csv: Annotated[Path, typer.Argument(metavar="CSV", help="As benchmark.py writes it.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for the pictures.")] = Path("."),
) -> None:
    """Draw benchmark.py's results as PNG files. Needs pandas and matplotlib (the extra \\[bench])."""
    from minivllm.bench.plots import save_all

    for path in save_all(csv, output):
        typer.echo(str(path))


def _config(
    model: str,
    wanted: Plan,
    dtype: Dtype,
    quantization: QuantizationName,
    kv_cache_dtype: KVCacheDtype,
    threads: int | None,
    max_num_batched_tokens: int,
) -> EngineConfig:
    return EngineConfig(
        model=model,
        dtype=dtype,
        quantization=None if quantization == "none" else quantization,
        kv_cache_dtype=kv_cache_dtype,
        threads=threads,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=wanted.concurrency,
    )


def _print(config: EngineConfig, wanted: Plan, as_json: bool) -> None:
    with notes.status("starting") as status:
        report = measure(config, wanted, status.update)
    typer.echo(json.dumps(report.as_json()) if as_json else report.as_text())


@app.command()
def memory(
    workload: Annotated[str, typer.Option("--workload", help="sharegpt or alpaca: lengths like theirs.")] = (
        Setting.workload
    ),
    requests: Annotated[
        int | None, typer.Option("--requests", help="In a run; default: several times what fits at once.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", help="Requests a second, Poisson; default: twice what can be finished."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of lengths, arrivals and tokens.")] = Setting.seed,
    block_size: Annotated[
        int, typer.Option("--block-size", help="Tokens in a KV block.")
    ] = Setting.block_size,
    num_blocks: Annotated[
        int | None, typer.Option("--num-blocks", help="Of the pool; default: 15,728 tokens, the paper's.")
    ] = None,
    max_model_len: Annotated[
        int, typer.Option("--max-model-len", help='What "max" reserves for each request.')
    ] = Setting.max_model_len,
    max_num_batched_tokens: MaxBatchedTokens = Setting.max_num_batched_tokens,
    real: Annotated[
        str | None, typer.Option("--real", metavar="MODEL", help="Run this model, and not a simulation.")
    ] = None,
    quantization: QuantizationOption = "auto",
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Draw the bars, too (needs matplotlib).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What paging is worth: KV memory, requests at once and sharing, beside contiguous reservation."""
    setting = Setting(
        workload=workload,
        requests=requests,
        rate=rate,
        seed=seed,
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        real=real,
        quantization=quantization,
    )
    if png is not None:
        check_png(png)
    with notes.status("starting") as status:
        report = measure_memory(setting, status.update)
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    else:
        print_report(report, Console(highlight=False, soft_wrap=True))
    if png is not None:
        write_png(report, png)
