"""benchmark.py: its modes agree, its CSV keeps every row, and its pictures can be drawn."""

import csv
import importlib.util
import json
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from test_cli import mini_vllm

from minivllm.bench.results import COLUMNS, Row, append_rows, check_file, read_rows
from minivllm.errors import ConfigError, MiniVLLMError
from minivllm.models.registry import load_checkpoint

ROOT = Path(__file__).parent.parent
#: In this order, as those who know the original project look for them
ORIGINAL_COLUMNS = (
    "timestamp_utc,benchmark_label,execution_device,cuda_available,mode,prompt,prompt_tokens,new_tokens,"
    "total_tokens_processed,total_blocks,block_size,warmup_runs,timed_runs,avg_seconds,stdev_seconds,"
    "min_seconds,max_seconds,median_seconds,tokens_per_second,speedup_vs_no_cache,run_durations_json"
)
MODES = ["no_kv_cache", "kv_cache_no_paging", "kv_cache", "kv_cache_native"]
TINY = {
    "n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 128, "bias": True, "vocab_size": 200,
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    from minivllm.bench.random_nanogpt import random_nanogpt

    return random_nanogpt(tmp_path_factory.mktemp("tiny"), seed=3, model_args=TINY) / "ckpt.pt"


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    """The script as a module. Its calls of torch's set_num_threads end with the tests here."""
    torch = pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("benchmark", ROOT / "benchmark.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


def run(benchmark: ModuleType, model: Path, output: Path, *arguments: str) -> None:
    # One thread: on a machine that others use, torch's threads wait for each other at every small operation.
    common = ["--threads", "1", "--model", str(model), "--output", str(output)]
    benchmark.run(benchmark.parse_arguments([*common, *arguments]))


def written(output: Path) -> list[dict[str, str]]:
    with output.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def results(benchmark: ModuleType, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CSV with a little of everything that the pictures show."""
    output = tmp_path_factory.mktemp("results") / "results.csv"
    quick = ("--warmup-runs", "0", "--timed-runs", "2")
    lengths = ("--new-tokens", "8", "20", "--concurrency", "1", "3", "--block-size", "4", "16")
    for arguments in (lengths, ("--prompt-tokens", "30", "--dtype", "bfloat16", "--new-tokens", "8")):
        run(benchmark, tiny, output, *quick, *arguments)
    return output


@pytest.mark.torch
def test_modes_agree_token_for_token(tiny: Path, tmp_path: Path) -> None:
    output = tmp_path / "results.csv"
    wish = ("--new-tokens", "100", "--concurrency", "1", "2", "--warmup-runs", "1", "--timed-runs", "2")
    command = [sys.executable, ROOT / "benchmark.py", "--threads", "1", "--model", tiny, "--output", output]
    runs = ("--baseline-warmup-runs", "0", "--baseline-timed-runs", "1")
    done = subprocess.run([*command, *wish, *runs], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    rows = written(output)
    assert [row["mode"] for row in rows] == MODES * 2
    assert {row["matching_tokens"] for row in rows} == {"100"}
    assert "kv_cache_native" in done.stdout and "8 rows appended" in done.stderr
    for row in rows:
        baseline = row["mode"] == "no_kv_cache"
        durations = json.loads(row["run_durations_json"])
        assert len(durations) == int(row["timed_runs"]) == (1 if baseline else 2)
        assert row["warmup_runs"] == ("0" if baseline else "1")
        average, concurrency = float(row["avg_seconds"]), int(row["concurrency"])
        assert average == pytest.approx(sum(durations) / len(durations), rel=1e-3)
        assert float(row["tokens_per_second"]) == pytest.approx(100 * concurrency / average, rel=1e-4)
        first = next(r for r in rows if r["concurrency"] == row["concurrency"])
        assert float(row["speedup_vs_no_cache"]) == pytest.approx(
            float(first["avg_seconds"]) / average, rel=1e-3
        )
        assert (row["prompt"], row["prompt_tokens"], row["new_tokens"]) == ("Hi my name is", "13", "100")
        assert int(row["total_tokens_processed"]) == 113 * concurrency
        assert (row["executor"], row["block_size"], row["total_blocks"]) == {
            "no_kv_cache": ("baseline", "", ""),
            "kv_cache_no_paging": ("torch", "113", str(concurrency)),
            "kv_cache": ("torch", "16", "128"),
            "kv_cache_native": ("native", "16", "128"),
        }[row["mode"]]


@pytest.mark.torch
def test_memory_is_what_the_tokens_and_blocks_take(results: Path) -> None:
    per_token = 2 * 2 * 32 * 4  # K and V, layers, width, float32
    rows = [row for row in written(results) if row["kv_bytes_per_token"] and row["dtype"] == "float32"]
    assert {row["block_size"] for row in rows} == {"4", "16", "21", "33"}
    for row in rows:
        requests, size = int(row["concurrency"]), int(row["block_size"])
        # After each step but the last, which frees all: the prompt is there, then one token more each time.
        lengths = range(13, 13 + int(row["new_tokens"]) - 1)
        used = [requests * n * per_token for n in lengths]
        reserved = [requests * -(-n // size) * size * per_token for n in lengths]
        assert int(row["kv_bytes_per_token"]) == per_token
        assert int(row["kv_peak_bytes_used"]) == max(used)
        assert int(row["kv_peak_bytes_reserved"]) == max(reserved)
        assert int(row["kv_mean_bytes_used"]) == round(sum(used) / len(used))
        assert int(row["kv_mean_bytes_reserved"]) == round(sum(reserved) / len(reserved))
        assert float(row["kv_utilisation"]) == pytest.approx(sum(used) / sum(reserved), rel=1e-4)


@pytest.mark.torch
def test_the_baseline_is_nanogpt(tiny: Path) -> None:
    """Against an implementation that shares no code with it, and NanoGPT's own names."""
    import torch
    from oracle_nanogpt import NanoGPT

    from minivllm.bench.baseline import UncachedModel

    checkpoint = torch.load(tiny, weights_only=True)
    assert checkpoint["model_args"] == TINY
    expected, logits = NanoGPT(TINY, checkpoint["model"]).greedy([72, 105, 32], 60)
    model = UncachedModel(load_checkpoint(tiny), "float32")
    ticks: list[int] = []
    assert model.generate([72, 105, 32], 60, lambda: ticks.append(1)) == expected
    assert len(ticks) == 60 and len(set(expected)) > 10  # it does not only repeat itself
    torch.testing.assert_close(model.logits(torch.tensor([72, 105, 32])), logits[0], rtol=1e-4, atol=1e-5)


@pytest.mark.torch
def test_the_baseline_runs_other_models_too(tmp_path: Path) -> None:
    """Rotary positions, grouped heads and a gate: the native executor says the same."""
    from helpers_models import LLAMA_CONFIG, llama_tensors, write_hf

    from minivllm.bench.baseline import UncachedModel
    from minivllm.config import EngineConfig
    from minivllm.factory import create_engine
    from minivllm.sampling_params import SamplingParams

    path = write_hf(tmp_path, LLAMA_CONFIG, llama_tensors())
    engine = create_engine(EngineConfig(model=path, dtype="float32", num_blocks=8))
    engine.add_request([5, 6, 7], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    while not (outputs := engine.step()):
        pass
    answer = UncachedModel(load_checkpoint(path), "float32").generate([5, 6, 7], 40)
    assert answer == outputs[0].outputs[0].token_ids


@pytest.mark.torch
def test_equal_seeds_make_equal_models(tiny: Path, tmp_path: Path) -> None:
    import torch

    from minivllm.bench.random_nanogpt import random_nanogpt

    states = [
        torch.load(random_nanogpt(tmp_path, seed, TINY) / "ckpt.pt", weights_only=True)["model"]
        for seed in (3, 4)
    ]
    first = torch.load(tiny, weights_only=True)["model"]
    assert all(torch.equal(first[name], states[0][name]) for name in first)
    assert not torch.equal(first["transformer.wte.weight"], states[1]["transformer.wte.weight"])


@pytest.mark.torch
def test_a_sweep_that_was_cut_short_goes_on(benchmark: ModuleType, tiny: Path, tmp_path: Path) -> None:
    output = tmp_path / "results.csv"
    wish = ("--warmup-runs", "0", "--timed-runs", "1", "--label", "x", "--modes", "kv_cache", "--resume")
    run(benchmark, tiny, output, *wish, "--new-tokens", "5")
    run(benchmark, tiny, output, *wish, "--new-tokens", "5", "6")
    rows = written(output)
    assert [(row["new_tokens"], row["speedup_vs_no_cache"]) for row in rows] == [("5", ""), ("6", "")]


@pytest.mark.torch
def test_going_on_leaves_out_only_what_was_asked_for_already(
    benchmark: ModuleType, tiny: Path, tmp_path: Path
) -> None:
    output = tmp_path / "results.csv"
    wish = ("--warmup-runs", "0", "--timed-runs", "1", "--resume", "--new-tokens", "5")
    run(benchmark, tiny, output, *wish, "--modes", "kv_cache")
    run(benchmark, tiny, output, *wish, "--modes", "kv_cache", "kv_cache_native")  # another mode
    run(benchmark, tiny, output, *wish, "--modes", "kv_cache", "--block-size", "8")
    run(benchmark, tiny, output, *wish, "--modes", "kv_cache", "--prompt", "Another")
    run(benchmark, tiny, output, *wish, "--modes", "kv_cache", "--executor", "native")
    before = written(output)
    assert len(before) == 6
    run(benchmark, tiny, output, *wish, "--modes", "kv_cache", "kv_cache_native")
    assert written(output) == before


@pytest.mark.torch
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--new-tokens", "5", "200"), "do not fit the model's context of 128 tokens"),
        (("--new-tokens", "100", "--concurrency", "40"), "take 320 blocks of 16, but --total-blocks is 128"),
        (
            ("--new-tokens", "100", "--non-paged-block-size", "64"),
            "use a --non-paged-block-size of 113 or more",
        ),
        (("--prompt", ""), "no tokens"),
        (("--prompt", "Привет"), "U+041F"),
        (("--model", "nothing"), "no model 'nothing'"),
    ],
)
def test_wrong_wishes_are_refused_before_any_work(
    benchmark: ModuleType, tiny: Path, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    with pytest.raises(MiniVLLMError, match=re.escape(words)):
        run(benchmark, tiny, tmp_path / "results.csv", *arguments)
    assert not (tmp_path / "results.csv").exists()


@pytest.mark.torch
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--new-tokens", "0"), "0 is less than 1"),
        (("--modes", "all"), "invalid choice"),
        (("--warmup-runs", "-1"), "-1 is less than 0"),
        (("--new-tokens", "x"), "'x' is not a whole number"),
        (("--seed", "1.5"), "'1.5' is not a whole number"),
        (("--threads", "9" * 5000), "is not a whole number"),
    ],
)
def test_a_wrong_command_line_is_refused(
    benchmark: ModuleType, arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        benchmark.parse_arguments(arguments)
    message = capsys.readouterr().err
    assert words in message and "_count" not in message and "_natural" not in message


@pytest.mark.torch
def test_defaults_are_the_originals(benchmark: ModuleType) -> None:
    options = benchmark.parse_arguments([])
    assert (options.output, options.prompt) == (ROOT / "benchmark_results.csv", "Hi my name is")
    assert (options.new_tokens, options.total_blocks, options.block_size) == ([200], 128, [16])
    assert (options.warmup_runs, options.timed_runs, options.modes) == (1, 3, MODES)


@pytest.mark.torch
def test_too_many_threads_are_refused_before_a_model_is_made(benchmark: ModuleType, tmp_path: Path) -> None:
    options = benchmark.parse_arguments(["--threads", "99999", "--output", str(tmp_path / "results.csv")])
    with pytest.raises(ConfigError, match="threads is 99999; it must be from 1 to 1,024"):
        benchmark.run(options)


def row(**changes: Any) -> Row:
    values = (
        dict.fromkeys(COLUMNS, 1)
        | {"prompt": 'with "quotes",\nlines and ж', "kv_utilisation": None}
        | changes
    )
    return Row(**values)  # type: ignore[arg-type]


def test_the_header_begins_with_the_originals(tmp_path: Path) -> None:
    output = tmp_path / "results.csv"
    append_rows(output, [row()])
    append_rows(output, [row(new_tokens=2), row(new_tokens=3)])
    lines = output.read_text().splitlines()
    assert lines[0].startswith(ORIGINAL_COLUMNS + ",model,")
    assert lines[0] == ",".join(COLUMNS) and lines[0] not in lines[1:]
    rows = read_rows(output)
    assert rows == written(output) and [r["new_tokens"] for r in rows] == ["1", "2", "3"]
    assert rows[0]["prompt"] == 'with "quotes",\nlines and ж' and rows[0]["kv_utilisation"] == ""


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a,b\n1,2\n", "column 1 is 'a', not 'timestamp_utc'"),
        (ORIGINAL_COLUMNS + "\n", "column 22 is None, not 'model'"),
        (",".join(COLUMNS) + ",more\n", f"column {len(COLUMNS) + 1} is 'more', not None"),
        (",".join(COLUMNS) + "\n2026", "ends in the middle of a line"),
        ("\0\xff\n", "another header"),
    ],
)
def test_another_file_is_left_alone(tmp_path: Path, content: str, words: str) -> None:
    output = tmp_path / "results.csv"
    output.write_text(content)
    for refused in (
        lambda: append_rows(output, [row()]),
        lambda: check_file(output),
        lambda: read_rows(output),
    ):
        with pytest.raises(ConfigError, match=r"results\.csv") as caught:
            refused()
        assert words in str(caught.value)
    assert output.read_text() == content


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"2026,x,cpu\n", "row 2 has 3 cells, not"),
        (b"2026,\xff\n", "can't decode byte 0xff"),
        (b'"' + b"x" * 200_000 + b'"\n', "field larger than field limit"),
    ],
)
def test_a_damaged_row_is_named(tmp_path: Path, line: bytes, words: str) -> None:
    output = tmp_path / "results.csv"
    append_rows(output, [row()])
    with output.open("ab") as file:
        file.write(line)
    for refused in (lambda: check_file(output), lambda: read_rows(output)):
        with pytest.raises(ConfigError, match=words):
            refused()


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/full"), tmp_path / "pipe"):
        with pytest.raises(ConfigError, match="it is no regular file"):
            check_file(path)


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "results.csv", tmp_path):
        with pytest.raises(ConfigError, match="cannot be written"):
            check_file(path)
    check_file(tmp_path / "new.csv")
    assert os.listdir(tmp_path) == [] and read_rows(tmp_path / "new.csv") == []


def _append_many(output: Path, writer: int) -> None:
    for i in range(40):
        append_rows(output, [row(seed=writer, new_tokens=i), row(seed=writer, new_tokens=i, mode="second")])


def test_runs_at_once_lose_no_row(tmp_path: Path) -> None:
    output = tmp_path / "results.csv"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_append_many, args=(output, i)) for i in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    rows = written(output)
    assert len(rows) == 4 * 40 * 2
    for i in range(4):  # each writer's in its order, and its pairs together
        assert [r["new_tokens"] for r in rows if r["seed"] == str(i)] == [str(n // 2) for n in range(80)]
    assert all(
        a["seed"] == b["seed"] and b["mode"] == "second" for a, b in zip(rows[::2], rows[1::2], strict=True)
    )


@pytest.mark.bench
def test_pictures_are_drawn(results: Path, tmp_path: Path) -> None:
    done = mini_vllm("bench", "plot", results, "--output", tmp_path / "pictures")
    assert done.returncode == 0, done.stderr
    names = ["runtime", "speedup", "throughput", "concurrency", "memory"]
    assert [Path(line).stem for line in done.stdout.splitlines()] == names
    for line in done.stdout.splitlines():
        content = Path(line).read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) > 10_000


@pytest.mark.bench
def test_pictures_show_the_latest_rows_of_one_machine(results: Path, tmp_path: Path) -> None:
    from minivllm.bench import plots

    rows = plots.read(results)
    assert len(rows) == 2 * 2 * (1 + 1 + 2 + 2) + 4  # lengths, concurrencies, setups; and bfloat16
    figure = plots.runtime(rows)
    lines = {label for axes in figure.axes for label in axes.get_legend_handles_labels()[1]}
    assert "no KV cache, PyTorch" in lines and "paged KV cache, native, bfloat16" in lines

    again = tmp_path / "again.csv"
    again.write_bytes(results.read_bytes())
    common = {"threads": "1", "model": rows.model.iloc[0], "processor": rows.processor.iloc[0], "seed": 0}
    point = {
        "dtype": "float32",
        "prompt_tokens": 13,
        "new_tokens": 8,
        "concurrency": 1,
        "executor": "baseline",
    }
    alone = row(**common, **point, mode="no_kv_cache", block_size=None, avg_seconds=77.0)
    append_rows(again, [row(), alone])  # the first is of another machine
    # What was measured together stays together: a machine drifts.
    assert len(plots.read(again)) == len(rows) and 77 not in set(plots.read(again).avg_seconds)
    setups = {"no_kv_cache": None, "kv_cache_no_paging": 21, "kv_cache": 16, "kv_cache_native": 16}
    executors = {"no_kv_cache": "baseline", "kv_cache_native": "native"}
    append_rows(
        again,
        [
            row(**common, **point | {"executor": executors.get(mode, "torch")}, mode=mode, block_size=size,
                timestamp_utc="2099", speedup_vs_no_cache=1.0, avg_seconds=99.0)
            for mode, size in setups.items()
        ],
    )  # fmt: skip
    shown = plots.read(again)
    assert len(shown) == len(rows) and list(shown.avg_seconds).count(99) == 4
    append_rows(again, [row(mode="no_kv_cache", executor="baseline")])
    assert len(plots.read(again)) == 1
    for plot in plots.PLOTS.values():  # all but nothing to show
        plot(plots.read(again))


@pytest.mark.bench
def test_the_notebook_runs_from_top_to_bottom(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbclient
    import nbformat

    notebook = nbformat.read(ROOT / "benchmark_results_viz.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs for cell in cells), "it is committed with its outputs"
    monkeypatch.setenv("MINIVLLM_BENCHMARK_CSV", str(results))
    nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    ).execute()
    pictures = [output for cell in cells for output in cell.outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 5


@pytest.mark.bench
@pytest.mark.parametrize(
    ("content", "words"), [(None, "does not exist"), (",".join(COLUMNS) + "\n", "no rows of the modes")]
)
def test_there_has_to_be_something_to_draw(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "results.csv").write_text(content)
    done = mini_vllm("bench", "plot", tmp_path / "results.csv")
    assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr
