"""``mini-vllm bench``: the limits' arithmetic against figures worked out by hand, counts and shapes."""

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from helpers_models import LLAMA_CONFIG, llama_tensors, write_hf
from safetensors import safe_open
from test_cli import mini_vllm

from minivllm.bench.compare import PYTHON_VARIABLE, PeerSpec, parse_peers, running_peers
from minivllm.bench.export import write_gguf
from minivllm.bench.export import write_hf as export_hf
from minivllm.bench.limits import (
    Format,
    MachineRates,
    ModelCosts,
    Shape,
    decode_time,
    prefill_time,
    step_time,
    workload_time,
)
from minivllm.bench.machine import Machine, Peak, best_peaks, largest_cache
from minivllm.bench.measure import measure, plan
from minivllm.bench.report import Figure, PeerFigures
from minivllm.bench.workloads import check_counts, random_prompts, run_engine
from minivllm.config import EngineConfig
from minivllm.errors import ConfigError, ModelError
from minivllm.factory import create_engine
from minivllm.models.config import ModelConfig, tensor_shapes
from minivllm.models.registry import load_checkpoint
from minivllm.models.rope import as_config_field, inverse_frequencies

SMOLLM2 = ModelConfig(
    kind="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
    num_kv_heads=3, head_dim=64, max_position=8192, norm="rmsnorm", norm_eps=1e-5, norm_bias=False,
    activation="silu", gated_mlp=True, qkv_bias=False, out_bias=False, mlp_bias=False, tied_head=True,
    rope_inv_freq=as_config_field(inverse_frequencies(64, 100000.0)),
)  # fmt: skip
KV_BYTES = 30 * 2 * 3 * 64 * 2


def costs(format: Format = "bfloat16", config: ModelConfig = SMOLLM2) -> ModelCosts:
    matrices = [name for name, shape in tensor_shapes(config).items() if len(shape) == 2]
    bits = {"bfloat16": 16, "int8": 8.5}[format]
    weights = sum(math.prod(tensor_shapes(config)[name]) for name in matrices)
    return ModelCosts.of(
        config, dict.fromkeys(matrices, format), int(weights * bits / 8), "bfloat16", KV_BYTES
    )


RATES = MachineRates(68e9, {"float32": 0.52e12, "bfloat16": 0.98e12, "int8": 2.1e12})


def test_limits_are_those_worked_out_by_hand() -> None:
    """SmolLM2-135M on a machine of 68 GB/s and 0.98 TFLOP/s: the figures that a spreadsheet gave."""
    model = costs()
    assert sum(model.token_weights.values()) == pytest.approx(106.2e6, rel=1e-3)
    assert sum(model.logit_weights.values()) == 49152 * 576
    assert model.kv_bytes == 23040
    one, prompt = Shape(1, 128, 256), Shape(1, 1024, 1)
    assert 255 / decode_time(one, model, RATES).seconds == pytest.approx(247, abs=1)
    assert 255 / decode_time(one, costs("int8"), RATES).seconds == pytest.approx(457, abs=2)
    assert 1024 / prefill_time(prompt, model, RATES).seconds == pytest.approx(3960, rel=0.01)
    assert 16 * 128 / workload_time(Shape(16, 128, 128), model, RATES).seconds == pytest.approx(
        1880, rel=0.02
    )
    assert 64 * 128 / workload_time(Shape(64, 128, 128), model, RATES).seconds == pytest.approx(
        1970, rel=0.02
    )
    assert workload_time(Shape(16, 1056, 64, 1024), model, RATES).seconds == pytest.approx(0.76, rel=0.03)


def test_limits_know_what_bounds_a_step() -> None:
    alone, many = next(Shape(1, 8, 2).decode()), next(Shape(64, 8, 2).decode())
    assert step_time(alone, costs(), RATES).arithmetic == 0
    assert step_time(many, costs(), RATES).memory == 0
    assert decode_time(Shape(1, 8, 1), costs(), RATES).seconds == 0
    # A shared beginning is computed and read once.
    shared, apart = Shape(4, 100, 2, shared_len=90).prefill(), Shape(4, 100, 2).prefill()
    assert (shared.tokens, apart.tokens) == (130, 400)
    brute = sum(i + 1 for i in range(90)) + 4 * sum(i + 1 for i in range(90, 100))
    assert shared.pairs == brute and apart.pairs == 4 * 5050
    assert next(Shape(4, 100, 2, shared_len=90).decode()).cached_tokens == 90 + 4 * 11


def test_an_embedding_that_is_only_looked_up_is_not_read() -> None:
    untied = replace(SMOLLM2, tied_head=False)
    assert costs(config=untied).step_bytes == costs().step_bytes
    assert costs("int8", untied).token_weights.keys() == {"int8"}


def test_the_machine_has_limits() -> None:
    machine = Machine(2)
    assert machine.processor
    assert 1e7 < machine.read_bandwidth() < 1e13
    numbers = {peak.number for peak in machine.peaks}
    assert "float32" in numbers <= {"float32", "bfloat16", "int8"}
    assert all(1e7 < peak.operations < 1e16 for peak in machine.peaks)


def test_peaks_stand_in_for_each_other_and_tiles_need_kernels_for_them() -> None:
    peaks = (
        Peak("float32", "vfmadd231ps/512", 3.0),
        Peak("bfloat16", "vdpbf16ps", 2.0),
        Peak("int8", "vpdpbusd/512", 9.0),
        Peak("bfloat16", "tdpbf16ps", 50.0),
    )
    assert best_peaks(peaks, "avx512bf16") == {"float32": 3.0, "bfloat16": 3.0, "int8": 9.0}
    assert best_peaks(peaks, "amx") == {"float32": 3.0, "bfloat16": 50.0, "int8": 50.0}


def test_the_largest_cache_is_found(tmp_path: Path) -> None:
    assert largest_cache(tmp_path) == 0
    for index, size in enumerate(("48K", "2048K", "32M")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert largest_cache(tmp_path) == 32 << 20


def test_figures_and_ratios() -> None:
    speed = Figure("decode", "tok/s", [80.0, 100.0, 90.0], 120.0)
    assert speed.value == 90 and speed.share == 0.75
    wait = Figure("first token", "ms", [20.0], 5.0)
    assert wait.share == 0.25
    assert Figure("p99", "ms", [1.0]).share is None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("model"), LLAMA_CONFIG, llama_tensors())


def test_prompts_are_new_each_time_and_share_their_beginning() -> None:
    rng = np.random.default_rng(0)
    first, second = (random_prompts(rng, 1000, Shape(3, 40, 1, shared_len=30)) for _ in range(2))
    assert [len(prompt) for prompt in first] == [40, 40, 40]
    assert first[0][:30] == first[1][:30] == first[2][:30] != second[0][:30]
    assert len({tuple(prompt[30:]) for prompt in first}) == 3


def test_a_run_sees_every_token(model: Path) -> None:
    engine = create_engine(EngineConfig(model=model, num_blocks=32))
    ticks = iter(range(10_000))
    run = run_engine(engine, [[1, 2, 3], [4]], 5, clock=lambda: float(next(ticks)))
    assert [len(times) for times in run.token_times] == [5, 5]
    assert run.token_times[0] == [1, 2, 3, 4, 5] and run.seconds == 5  # one reading a step
    with pytest.raises(RuntimeError, match="2 × 3 tokens were asked for"):
        check_counts([3, 2], 2, 3)


@pytest.mark.parametrize(
    ("kind", "requests", "concurrency", "shared", "names"),
    [
        ("latency", 2, 2, 0, ["first token", "prompt", "between tokens", "between tokens, p99", "decode"]),
        ("throughput", 5, 2, 0, ["generated", "prompts too"]),
        ("prefix", 3, 3, 16, ["all answers"]),
    ],
)
def test_a_measurement_is_whole(
    model: Path, kind: str, requests: int, concurrency: int, shared: int, names: list[str]
) -> None:
    wanted = plan(kind, requests, concurrency, (20, shared, 4), 2, "")  # type: ignore[arg-type]
    assert wanted.requests == requests and wanted.concurrency == concurrency
    report = measure(EngineConfig(model=model, num_blocks=64, max_num_seqs=concurrency), wanted)
    assert [figure.name for figure in report.figures] == names
    assert len(report.bandwidths) == 3
    for figure in report.figures:
        assert len(figure.runs) == 2 and all(run > 0 for run in figure.runs)
        assert figure.share is None or 0 < figure.share < 2  # such a small model is all overhead
    as_json = json.loads(json.dumps(report.as_json()))
    assert as_json["limit"]["seconds"] > 0 and as_json["figures"][0]["share"] < 2
    text = report.as_text()
    assert str(wanted) in text and report.processor in text and all(name in text for name in names)


def test_ratios_are_paired_by_round(model: Path) -> None:
    wanted = plan("prefix", 2, 2, (20, 16, 3), 1, "")
    report = measure(EngineConfig(model=model, num_blocks=64), wanted)
    ours = Figure("all answers", "s", [1.0, 2.0, 4.0])
    speed = Figure("decode", "tok/s", [10.0, 20.0, 40.0])
    peer = PeerFigures(
        "other", "1.0", [Figure("all answers", "s", [2.0, 2.0, 16.0]), Figure("decode", "tok/s", [5.0] * 3)]
    )
    report = replace(report, figures=[ours, speed], peers=[peer])
    assert report.ratios(peer) == {"all answers": 2.0, "decode": 4.0}
    assert "2.00 ×" in report.as_text() and "4.00 ×" in report.as_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("latency", "--output-len", "0"), "--output-len is 0; it must be from 1"),
        (("latency", "--prompt-len", "500"), "max_model_len is 128"),
        (("throughput", "--num-prompts", "0"), "--num-prompts is 0; it must be from 1 to 65,536"),
        (("prefix", "--own-len", "0"), "--own-len is 0; it must be from 1"),
        (
            ("latency", "--prompt-len", "8", "--output-len", "4", "--compare", "nothing"),
            "no engine 'nothing'",
        ),
        (("latency", "--dtype", "float64"), "float64"),
        (("latency", "--quantization", "foo"), "'none'"),
        (("throughput", "--kv-cache-dtype", "int4"), "'int8'"),
        (("latency", "--batch-size", "100000"), "--batch-size is 100,000; it must be from 1 to 65,536"),
        (("throughput", "--num-prompts", str(10**12)), "--num-prompts is 1,000,000,000,000"),
        (("throughput", "--concurrency", "0"), "--concurrency is 0"),
        (("throughput", "--prompt-len", "0"), "--prompt-len is 0"),
        (("throughput", "--output-len", "1"), "--output-len is 1; it must be from 2"),
        (("prefix", "--own-len", "0", "--shared-len", "16"), "--own-len is 0"),
        (("prefix", "--shared-len", "-1"), "--shared-len is -1"),
        (("prefix", "--runs", "0"), "--runs is 0"),
        (("latency", "--runs", str(10**9)), "--runs is 1,000,000,000; it must be from 1 to 10,000"),
    ],
)
def test_wrong_wishes_are_refused(model: Path, arguments: tuple[str, ...], words: str) -> None:
    result = mini_vllm("bench", arguments[0], model, *arguments[1:])
    assert result.returncode in (1, 2) and words in result.stderr and "Traceback" not in result.stderr


def test_the_command_prints_json_alone(model: Path) -> None:
    wish = ("--prompt-len", "8", "--output-len", "4", "--runs", "1", "--batch-size", "2", "--threads", "1")
    result = mini_vllm("bench", "latency", model, *wish, "--json", "--compare", "vllm")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["workload"] == "2 requests: 8 prompt tokens, 4 generated"
    assert {figure["name"] for figure in report["figures"]} >= {"decode", "first token"}
    assert len(report["peers"]) + len(report["absent"]) == 1


def test_peers_are_named_with_their_weights() -> None:
    assert parse_peers("llama.cpp, openvino:q8_0", "bfloat16") == [
        PeerSpec("llama.cpp", "BF16"),
        PeerSpec("openvino", "Q8_0"),
    ]
    assert [str(peer) for peer in parse_peers("llama.cpp,vllm", "int4")] == ["llama.cpp Q4_0", "vllm BF16"]
    assert parse_peers("", "int8") == []
    with pytest.raises(ConfigError, match="use BF16"):
        parse_peers("vllm:Q8_0", "int8")
    for nothing in (",", "vllm,,openvino", "vllm, "):
        with pytest.raises(ConfigError, match="no engine ''"):
            parse_peers(nothing, "int8")


#: Stands in for llama.cpp: a module of that name whose worker is ours, with an engine that only counts.
FAKE = """
import json, sys
counts = {counts}
print("noise of a library", file=sys.stderr)
print(json.dumps({{"info": "fake 1.0"}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    print(json.dumps({{"seconds": 0.5, "counts": counts(request)}}), flush=True)
"""


@pytest.mark.parametrize("honest", [True, False])
def test_peers_run_in_their_own_process_and_are_counted(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, honest: bool
) -> None:
    (tmp_path / "llama_cpp.py").touch()
    worker = tmp_path / "worker.py"
    counts = 'lambda r: [r["output_len"]] * len(r["prompts"])' if honest else "lambda r: [1]"
    worker.write_text(FAKE.format(counts=counts))
    monkeypatch.setattr("minivllm.bench.compare._WORKER", worker)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv(PYTHON_VARIABLE, "/no/such/python")
    config = EngineConfig(model=model, num_blocks=64)
    wanted = plan("throughput", 2, 2, (8, 0, 3), 2, "llama.cpp")
    report = measure(config, wanted)
    if not honest:
        assert report.peers == []
        assert report.absent == ["llama.cpp BF16 failed: 2 × 3 tokens were asked for, but [1] came"]
        return
    (peer,) = report.peers
    assert (peer.name, peer.info) == ("llama.cpp BF16", "fake 1.0")
    assert peer.figures == [Figure("generated", "tok/s", [12.0, 12.0])]
    assert report.ratios(peer)["generated"] == pytest.approx(
        np.median([run / 12 for run in report.figures[0].runs])
    )


def test_a_peer_that_is_not_there_or_fails_is_said(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, "")
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('built for another processor')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    peers = [PeerSpec("openvino", "F16"), PeerSpec("llama.cpp", "Q8_0")]
    with running_peers(peers, load_checkpoint(model), 1, 1, 16) as (running, absent):
        assert running == []
    if "openvino_genai" not in sys.modules:
        assert absent[0].startswith("openvino is not installed: no module openvino_genai in ")
    assert "built for another processor" in absent[1]


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_an_exported_gguf_has_the_same_weights(model: Path, tmp_path: Path, kind: str) -> None:
    """Read back by our loader, and its bytes by the gguf package."""
    checkpoint = load_checkpoint(model)
    write_gguf(checkpoint, tmp_path / "model.gguf", kind)  # type: ignore[arg-type]
    again = load_checkpoint(tmp_path / "model.gguf")
    eps = float(np.float32(checkpoint.config.norm_eps))  # GGUF's floats have 32 bits
    assert again.config == replace(checkpoint.config, norm_eps=eps)
    error = {"F16": 0.001, "BF16": 0.005, "Q8_0": 0.01, "Q4_0": 0.15}[kind]
    for ours, theirs in zip(checkpoint.tensors(), again.tensors(), strict=True):
        scale = np.abs(ours.to_float32()).max()
        np.testing.assert_allclose(
            theirs.to_float32(), ours.to_float32(), atol=error * scale, err_msg=ours.name
        )
    types = {
        tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors
    }
    assert types["blk.0.attn_q.weight"] == kind and types["output_norm.weight"] == "F32"
    assert types["token_embd.weight"] == ("Q8_0" if kind == "Q4_0" else kind)


def test_an_exported_directory_has_the_same_weights(model: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(model)
    export_hf(checkpoint, tmp_path)
    again = load_checkpoint(tmp_path)
    assert again.config == checkpoint.config
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        assert "model.layers.1.self_attn.q_proj.weight" in set(file.keys())
    for ours, theirs in zip(checkpoint.tensors(), again.tensors(), strict=True):
        np.testing.assert_allclose(theirs.to_float32(), ours.to_float32(), rtol=0.005)


def test_what_others_cannot_read_is_refused(model: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(model)
    for wrong in (
        replace(checkpoint.config, kind="gpt2"),
        replace(checkpoint.config, rope_inv_freq=None),
        replace(checkpoint.config, rope_inv_freq=(1.0, *[0.5] * 7)),
    ):
        odd = object.__new__(type(checkpoint))
        odd.__dict__.update(checkpoint.__dict__ | {"config": wrong})
        with pytest.raises(ModelError, match="other engines cannot be given"):
            export_hf(odd, tmp_path)
