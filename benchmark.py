"""What a KV cache is worth, and what paging is worth: the same tokens generated in four ways, timed.

    python benchmark.py                                  200 tokens after "Hi my name is", a row for each mode
    python benchmark.py --new-tokens 50 200 500          a sweep
    python benchmark.py --concurrency 16 --total-blocks 512 --baseline-timed-runs 1
    python benchmark.py --model out/ckpt.pt --prompt ROMEO:

The default model has the shape of GPT-2 124M in NanoGPT's format, and seeded random weights: speed depends on
the shape alone. Rows are appended to benchmark_results.csv; docs/kv-cache.md says what they mean, and
benchmark_results_viz.ipynb draws them. Needs the extra [bench].
"""

import argparse
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import minivllm
from minivllm.bench.baseline import cuda_available, torch_version, use_threads
from minivllm.bench.cache_modes import Bench, Mode, Point, Setup, Sweep, prompt_ids
from minivllm.bench.cache_rows import Circumstances, rows
from minivllm.bench.machine import processor_name
from minivllm.bench.random_nanogpt import random_nanogpt
from minivllm.bench.results import Row, append_rows, check_file, read_rows
from minivllm.config import EngineConfig
from minivllm.errors import ConfigError, MiniVLLMError, counted, shown
from minivllm.executors.native import available_threads
from minivllm.models.config import tensor_shapes
from minivllm.models.pull import cache_directory
from minivllm.models.registry import load_checkpoint, resolve_model

ROOT = Path(__file__).resolve().parent
console = Console(stderr=True, highlight=False, soft_wrap=True)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Options that take several values make a sweep over all combinations."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    # fmt: off
    add("--output", type=Path, default=ROOT / "benchmark_results.csv", help="CSV to append to")
    add("--label", default="kv-cache", help="written into each row (%(default)s)")
    add("--resume", action="store_true",
        help="leave out the points that the CSV has under this label with all modes")
    add("--model", help="a NanoGPT ckpt.pt, alias or path; default: the shape of GPT-2 124M, random weights")
    add("--prompt", default="Hi my name is", help="text to continue (%(default)s)")
    add("--prompt-tokens", type=_count, nargs="+", default=[None], metavar="N",
        help="lengths of the prompt: the text, repeated or cut to N tokens; default: as it is")
    add("--new-tokens", type=_count, nargs="+", default=[200], metavar="N", help="tokens to generate (200)")
    add("--concurrency", type=_count, nargs="+", default=[1], metavar="N",
        help="requests: together with a KV cache, one after the other without (1)")
    add("--modes", nargs="+", default=list(get_args(Mode)), choices=get_args(Mode), metavar="MODE",
        help="of %(choices)s; default: all")
    add("--executor", default="torch", choices=["torch", "native"],
        help="of kv_cache_no_paging and kv_cache (%(default)s)")
    add("--total-blocks", type=_count, default=128, metavar="N", help="of the paged cache (%(default)s)")
    add("--block-size", type=_count, nargs="+", default=[16], metavar="N", help="tokens in a block (16)")
    add("--non-paged-block-size", type=_natural, nargs="+", default=[0], metavar="N",
        help="tokens that kv_cache_no_paging reserves for a request; 0: as many as the run has (0)")
    add("--warmup-runs", type=_natural, default=1, metavar="N", help="runs that do not count (%(default)s)")
    add("--timed-runs", type=_count, default=3, metavar="N", help="runs that count (%(default)s)")
    add("--baseline-warmup-runs", type=_natural, metavar="N",
        help="of no_kv_cache; default: as --warmup-runs")
    add("--baseline-timed-runs", type=_count, metavar="N", help="of no_kv_cache; default: as --timed-runs")
    add("--dtype", default="float32", choices=["float32", "bfloat16"],
        help="of weights and KV cache (%(default)s)")
    add("--threads", type=_count, default=available_threads(), metavar="N",
        help="of every mode (here %(default)s)")
    add("--device", default="auto", choices=["auto", "cpu", "cuda"],
        help="of the baseline and the torch executor; auto: cuda where there is one")
    add("--seed", type=_natural, default=0, metavar="N", help="of the default model's weights (%(default)s)")
    # fmt: on
    parsed = parser.parse_args(arguments)
    for name in ("warmup_runs", "timed_runs"):
        if getattr(parsed, f"baseline_{name}") is None:
            setattr(parsed, f"baseline_{name}", getattr(parsed, name))
    return parsed


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a whole number") from None


def _natural(text: str) -> int:
    if (number := _whole(text)) < 0:
        raise argparse.ArgumentTypeError(f"{number} is less than 0")
    return number


def _count(text: str) -> int:
    if (number := _whole(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def run(options: argparse.Namespace) -> list[Row]:
    """Measure what the options ask for, and append it point by point.

    Raises:
        MiniVLLMError: a wish that cannot be fulfilled, before anything is measured.
    """
    check_file(options.output)
    EngineConfig(options.model or "default", threads=options.threads)  # refuses what exhausts the system
    use_threads(options.threads)
    path = _model_path(options)
    checkpoint = load_checkpoint(path)
    shape = checkpoint.config
    if options.device == "cuda" and not cuda_available():
        raise ConfigError("--device is cuda, but torch finds no CUDA device; use --device cpu")
    device = "cuda" if cuda_available() and options.device != "cpu" else "cpu"
    bench = Bench(path, checkpoint, options.dtype, options.threads, device, options.seed)
    circumstances = Circumstances(
        benchmark_label=options.label,
        prompt=options.prompt,
        model=path.parent.name if path.name == "ckpt.pt" else path.name,
        parameters=sum(map(math.prod, tensor_shapes(shape).values())),
        dtype=options.dtype,
        torch_device=device,
        cuda_available=cuda_available(),
        threads=options.threads,
        seed=options.seed,
        version=minivllm.__version__,
        git_commit=git_commit(),
        processor=processor_name(),
        torch_version=torch_version(),
    )
    sweep = Sweep(
        modes=tuple(dict.fromkeys(options.modes)),
        executor=options.executor,
        block_sizes=options.block_size,
        total_blocks=options.total_blocks,
        non_paged_block_sizes=options.non_paged_block_size,
        warmup_runs=options.warmup_runs,
        timed_runs=options.timed_runs,
        baseline_warmup_runs=options.baseline_warmup_runs,
        baseline_timed_runs=options.baseline_timed_runs,
    )
    prompts = [prompt_ids(checkpoint, options.prompt, length) for length in options.prompt_tokens]
    points = {
        Point(len(prompt), new_tokens, concurrency): prompt
        for concurrency, prompt, new_tokens in product(options.concurrency, prompts, options.new_tokens)
    }
    for point in points:  # every wish is checked before the first is fulfilled
        sweep.setups(point)
        if point.length > shape.max_position:
            raise ConfigError(f"{point} do not fit the model's context of {shape.max_position:,} tokens")
    if options.resume:
        done = setups_done(options.output, circumstances)
        missing = {
            point: prompt
            for point, prompt in points.items()
            if any(_key(point, setup) not in done for setup in sweep.setups(point))
        }
        if left_out := len(points) - len(missing):
            console.print(f"{counted(left_out, 'point')} left out: every mode is in {options.output} already")
        points = missing

    written: list[Row] = []
    for i, (point, prompt) in enumerate(points.items()):
        setups = sweep.setups(point)
        runs = sum(setup.warmup_runs + setup.timed_runs for setup in setups)
        tokens = runs * point.concurrency * point.new_tokens
        with progress_bar(f"point {i + 1} of {len(points)}", tokens) as (note, tick):
            measurements = bench.measure(prompt, point, setups, note, tick)
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        fresh = rows(now, circumstances, point, measurements)
        append_rows(options.output, fresh)
        written += fresh
    return written


def _model_path(options: argparse.Namespace) -> Path:
    """Where the model lies; the default one is made when it is first asked for."""
    if options.model is not None:
        path = resolve_model(options.model)
        return path / "ckpt.pt" if (path / "ckpt.pt").is_file() else path
    directory = cache_directory() / "benchmark"
    directory.mkdir(parents=True, exist_ok=True)
    with console.status(f"the default model, in {directory} (0.5 GB)"):
        return random_nanogpt(directory, options.seed) / "ckpt.pt"


def git_commit() -> str:
    """The commit of this checkout, "-dirty" if code that is measured differs from it; else empty."""
    code = ["benchmark.py", "csrc", "src"]

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)

    try:
        commit = git("rev-parse", "--short=12", "HEAD").stdout.strip()
        changed = git("status", "--porcelain", "--", *code).stdout.strip()
    except OSError:  # no git
        return ""
    return commit + ("-dirty" if commit and changed else "")


def setups_done(output: Path, circumstances: Circumstances) -> set[tuple[str, ...]]:
    """What the CSV has under this label, of this model, prompt and dtype on this machine, as ``_key``s."""
    c = circumstances
    wanted = (c.benchmark_label, c.prompt, c.model, c.dtype, str(c.threads), str(c.seed), c.processor)
    names = ("benchmark_label", "prompt", "model", "dtype", "threads", "seed", "processor")
    key = ("prompt_tokens", "new_tokens", "concurrency", "mode", "executor", "block_size")
    return {
        tuple(row[name] for name in key)
        for row in read_rows(output)
        if tuple(row[name] for name in names) == wanted
    }


def _key(point: Point, setup: Setup) -> tuple[str, ...]:
    """A setup at a point in the CSV's own words."""
    at = (point.prompt_tokens, point.new_tokens, point.concurrency)
    return (*map(str, at), setup.mode, setup.executor, str(setup.block_size or ""))


@contextmanager
def progress_bar(title: str, tokens: int) -> Iterator[tuple[Callable[[str], None], Callable[[int], None]]]:
    """A bar over tokens, for ``Bench.measure``: what to call for a note, and with each token.

    It is drawn at most every two seconds, and by no thread of its own: it must not be measured too.
    """
    text = TextColumn("{task.description}")
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), text)
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("", total=tokens)
        drawn = time.perf_counter()

        def tick(count: int) -> None:
            nonlocal drawn
            progress.advance(task, count)
            if time.perf_counter() > drawn + 2:
                progress.refresh()
                drawn = time.perf_counter()

        def note(text: str) -> None:
            progress.update(task, description=text)
            progress.refresh()

        yield note, tick


def table(written: Sequence[Row]) -> Table:
    """The rows for people."""
    result = Table(box=None)
    for name in ("mode", "executor"):
        result.add_column(name, no_wrap=True)
    for name in (
        "prompt",
        "new",
        "requests",
        "block",
        "seconds",
        "± stdev",
        "tokens/s",
        "speed-up",
        "KV used",
    ):
        result.add_column(name, justify="right", no_wrap=True)
    result.add_column("same tokens", justify="right", no_wrap=True)
    for row in written:
        usage = "" if row.kv_utilisation is None else f"{row.kv_utilisation:.0%}"
        result.add_row(
            row.mode, row.executor, str(row.prompt_tokens), str(row.new_tokens), str(row.concurrency),
            str(row.block_size or ""), f"{row.avg_seconds:.3f}", f"{row.stdev_seconds:.3f}",
            f"{row.tokens_per_second:.1f}",
            "" if row.speedup_vs_no_cache is None else f"{row.speedup_vs_no_cache:.2f} ×", usage,
            f"{row.matching_tokens} of {row.new_tokens}",
        )  # fmt: skip
    return result


def main() -> None:
    """Measure, append, and print a table."""
    options = parse_arguments()
    try:
        written = run(options)
    except MiniVLLMError as error:
        sys.exit(f"benchmark.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    Console(highlight=False, width=max(console.width, 120)).print(table(written))
    console.print(f"{counted(len(written), 'row')} appended to {options.output}")
    if different := sum(row.matching_tokens != row.new_tokens for row in written):
        reason = "bfloat16 rounds near ties apart" if options.dtype == "bfloat16" else "a near tie, or a bug"
        console.print(f"[yellow]{different} of them generated other tokens than the first mode: {reason}")


if __name__ == "__main__":
    main()
