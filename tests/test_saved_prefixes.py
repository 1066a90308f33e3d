"""Saved prefix caches: what is restored answers bit for bit, and no damaged or foreign file is believed."""

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import fake_kv_cache
from helpers_engine import TINY, Setup, answer, assert_idle, run, tiny_checkpoint
from helpers_prefix import KINDS, prefixes_of
from helpers_step import make_checkpoint, random_tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from test_cli import mini_vllm

import minivllm
from minivllm.block_allocator import create_block_allocator
from minivllm.engine.inference_engine import InferenceEngine
from minivllm.engine.outputs import RequestOutput
from minivllm.errors import ConfigError, PrefixCacheError
from minivllm.executors.native import NativeExecutor
from minivllm.kv_cache.kv_cache import KVCache
from minivllm.kv_cache.kv_pool import KVGeometry, KVPool
from minivllm.kv_cache.prefix_file import check_prefix_target
from minivllm.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=8, temperature=0.9, seed=3, logprobs=5, ignore_eos=True)
PROMPT = [random.Random(1).randrange(1, 256) for _ in range(100)]
PROMPTS = [PROMPT, [*PROMPT[:70], 5, 6, 7], [*PROMPT[:20], 9, 9], [200, *PROMPT[:40]]]
NATIVE = Setup("native")


def contents(engine: InferenceEngine) -> dict[Any, bytes]:
    """Every shared prefix of the cache, and K and V of its last block."""
    published = engine.kv_cache.published()
    kv = engine.executor.read_blocks(published.block_ids)
    row = {block: i for i, block in enumerate(published.block_ids.tolist())}
    return {prefix: kv[row[block]].tobytes() for prefix, block in prefixes_of(published)}


def filled(setup: Setup = NATIVE) -> InferenceEngine:
    """An engine that has answered all prompts."""
    engine = setup.engine()
    for prompt in PROMPTS:
        engine.add_request(prompt, PARAMS)
    run(engine)
    return engine


def same(a: RequestOutput, b: RequestOutput) -> bool:
    """Tokens and logprobs, bit for bit."""
    return repr(a.outputs) == repr(b.outputs)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "prefixes"
    filled().save_prefix_cache(path)
    return path


def refused(engine: InferenceEngine, path: Path, words: str) -> None:
    """The file is refused in one sentence that has these words, and the engine is as it was."""
    before = contents(engine) if engine.kv_cache.prefix_caching else None
    with pytest.raises((PrefixCacheError, ConfigError), match=words) as caught:
        engine.load_prefix_cache(path)
    assert "\n" not in str(caught.value)
    assert before is None or contents(engine) == before
    engine.kv_cache.check_integrity()
    assert_idle(engine)


# --- restoring ---


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("other", [{}, {"num_blocks": 200, "threads": 1, "budget": 13}])
def test_a_restored_cache_answers_bit_for_bit(dtype: str, other: dict[str, int], tmp_path: Path) -> None:
    setup = replace(NATIVE, dtype=dtype)
    first = filled(setup)
    count = first.save_prefix_cache(tmp_path / "saved")
    second = replace(setup, **other).engine()
    assert second.load_prefix_cache(tmp_path / "saved") == count > 0
    second.kv_cache.check_integrity()
    assert_idle(second)
    assert contents(second) == contents(first)
    for prompt in PROMPTS:
        alone = answer(replace(setup, prefix_caching=False).engine(), prompt, PARAMS)
        restored = answer(second, prompt, PARAMS)
        assert restored.num_cached_tokens >= len(prompt) // 16 * 16 - 1
        assert same(alone, restored)


def test_an_8_bit_cache_is_saved_with_its_scales(saved: Path, tmp_path: Path) -> None:
    def engine() -> InferenceEngine:
        engine = NATIVE.engine()
        geometry = replace(engine.kv_cache.geometry, dtype="int8")
        engine.kv_cache.geometry = geometry
        engine.executor = NativeExecutor(tiny_checkpoint(), KVPool.reserve(geometry), "float32", 2)
        return engine

    first, second = engine(), engine()
    answer(first, PROMPT, PARAMS)
    first.save_prefix_cache(tmp_path / "saved")
    second.load_prefix_cache(tmp_path / "saved")
    assert contents(second) == contents(first)
    restored = answer(second, PROMPT, PARAMS)
    assert restored.num_cached_tokens == 96 and same(answer(first, PROMPT, PARAMS), restored)
    refused(engine(), saved, "kv_cache_dtype 'float32', but here it is 'int8'")


def test_a_fresh_process_restores_it(saved: Path) -> None:
    script = f"""
from test_saved_prefixes import *
engine = NATIVE.engine()
engine.load_prefix_cache({str(saved)!r})
output = answer(engine, PROMPT, PARAMS)
print((output.num_cached_tokens, output.outputs))
"""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    expected = answer(filled(), PROMPT, PARAMS)
    assert expected.num_cached_tokens > 0
    assert result.stdout.strip() == repr((expected.num_cached_tokens, expected.outputs))


@pytest.mark.torch
def test_the_torch_executor_saves_and_restores_too(tmp_path: Path) -> None:
    from minivllm.executors.torch_ import TorchExecutor

    def torch_engine() -> InferenceEngine:
        engine = Setup(dtype="bfloat16").engine()
        pool = KVPool.reserve(engine.kv_cache.geometry)
        engine.executor = TorchExecutor(tiny_checkpoint(), pool, "bfloat16")
        return engine

    first = torch_engine()
    expected = answer(first, PROMPT, PARAMS)
    assert first.save_prefix_cache(tmp_path / "saved") == 6
    second = torch_engine()
    second.load_prefix_cache(tmp_path / "saved")
    assert contents(second) == contents(first)
    restored = answer(second, PROMPT, PARAMS)
    assert restored.num_cached_tokens == 96
    assert restored.outputs[0].token_ids == expected.outputs[0].token_ids
    refused(replace(NATIVE, dtype="bfloat16").engine(), tmp_path / "saved", "executor")


def test_another_tool_reads_the_file(saved: Path) -> None:
    engine = filled()
    published = engine.kv_cache.published()
    pool = engine.executor.pool.data  # type: ignore[attr-defined]
    with safe_open(saved, "np") as file:
        assert file.metadata()["mini-vllm"] == minivllm.__version__
        assert (file.get_tensor("token_ids") == published.token_ids).all()
        blocks = file.get_tensor("blocks").view(np.float32).reshape(-1, *np.delete(pool.shape, 1))
        for block, block_id in zip(blocks, published.block_ids.tolist(), strict=True):
            assert (block == pool[:, block_id]).all()
        digest = file.get_tensor("sha256").tobytes()
    assert digest == hashlib.sha256(saved.read_bytes()[:-32]).digest()
    assert saved.stat().st_mode & 0o077 == 0  # prompts are nobody else's business


def test_an_empty_cache_is_saved_too(tmp_path: Path) -> None:
    engine = NATIVE.engine()
    assert engine.save_prefix_cache(tmp_path / "saved") == 0
    assert engine.load_prefix_cache(tmp_path / "saved") == 0
    assert filled().load_prefix_cache(tmp_path / "saved") == 0


def test_what_is_there_already_stays_as_it_is(saved: Path) -> None:
    engine = filled()
    before = contents(engine)
    free = engine.metrics()
    for _ in range(3):
        engine.load_prefix_cache(saved)
        engine.kv_cache.check_integrity()
        assert contents(engine) == before
    assert engine.metrics() == free


@pytest.mark.parametrize("num_blocks", [3, 8, 9])
def test_of_too_much_the_beginnings_are_taken(num_blocks: int, saved: Path) -> None:
    everything = contents(filled())
    engine = replace(NATIVE, num_blocks=num_blocks).engine()
    assert engine.load_prefix_cache(saved) == num_blocks < len(everything)
    engine.kv_cache.check_integrity()
    taken = contents(engine)
    assert taken.items() <= everything.items() and len(taken) == num_blocks
    lengths = sorted(len(tokens) for _, tokens in everything)
    assert sorted(len(tokens) for _, tokens in taken) == lengths[:num_blocks]
    engine = replace(NATIVE, num_blocks=max(num_blocks, 8)).engine()  # and they serve
    engine.load_prefix_cache(saved)
    alone = answer(NATIVE.engine(), PROMPT, PARAMS)
    assert same(alone, answer(engine, PROMPT, PARAMS))


def test_nothing_is_loaded_over_what_is_in_use_or_cached(saved: Path) -> None:
    engine = replace(NATIVE, num_blocks=16).engine()
    own = [[i, *PROMPT[:50]] for i in (250, 251)]
    answer(engine, own[0], PARAMS)
    cached = contents(engine)
    engine.add_request(own[1], PARAMS)
    engine.step()  # of 16 blocks, some are cached now and some in use
    in_use = engine.kv_cache.geometry.num_blocks - engine.metrics().num_free_blocks
    loaded = engine.load_prefix_cache(saved)
    assert loaded == 16 - in_use - len(cached) > 0
    engine.kv_cache.check_integrity()
    assert cached.items() <= contents(engine).items()
    outputs = run(engine)
    assert same(outputs.popitem()[1], answer(NATIVE.engine(), own[1], PARAMS))


def test_salted_prefixes_are_left_out() -> None:
    kv_cache = fake_kv_cache(16, 2)
    allocator = kv_cache._allocator
    held = allocator.allocate(5)
    assert held is not None
    for namespace, parent, tokens, blocks in [
        (b"a", None, [1, 2, 3, 4], held[:2]), (b"", None, [1, 2], held[2:3]), (b"z", None, [1, 2], held[3:4]),
        (b"", held[2], [7, 8], held[4:]),
    ]:  # fmt: skip
        allocator.publish(namespace, parent, tokens, blocks)
    published = kv_cache.published()
    assert prefixes_of(published) == [((b"", (1, 2)), held[2]), ((b"", (1, 2, 7, 8)), held[4])]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=8),
    st.integers(1, 40),
    st.sampled_from(KINDS),
)
def test_any_index_is_restored(texts: list[list[int]], num_blocks: int, kind: Any) -> None:
    def cache(count: int, kind: Any) -> KVCache:
        return KVCache(KVGeometry(1, count, 1, 2, 1, "float32"), create_block_allocator(count, 2, kind))

    first, second = cache(64, "reference"), cache(num_blocks, kind)
    for text in texts:
        table = first._allocator.allocate(len(text) // 2)
        table = first._allocator.publish(b"", None, text[: len(text) // 2 * 2], table)
        first._allocator.free(table[::-1])
    saved = first.published()
    written: list[int] = []
    count = second.restore(saved.parents, saved.token_ids, lambda _, ids: written.extend(ids.tolist()))
    second.check_integrity()
    assert count == min(num_blocks, len(saved.parents)) == len(written)
    assert second.num_free_blocks == num_blocks
    restored = second.published()
    assert (restored.token_ids == saved.token_ids[:count]).all()
    assert [prefix for prefix, _ in prefixes_of(restored)] == sorted(
        prefix for prefix, block in prefixes_of(saved) if block in saved.block_ids[:count]
    )
    assert restored.block_ids.tolist() == written  # K and V of each went where the index says


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=8),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=4),
    st.integers(1, 40),
    st.sampled_from(KINDS),
)
def test_what_is_published_already_counts_and_takes_no_room(
    texts: list[list[int]], others: list[list[int]], num_blocks: int, kind: Any
) -> None:
    def cache(count: int, kind: Any, texts: list[list[int]]) -> KVCache:
        cache = KVCache(KVGeometry(1, count, 1, 2, 1, "float32"), create_block_allocator(count, 2, kind))
        for text in texts:
            table = cache._allocator.allocate(len(text) // 2)
            if table is not None:
                table = cache._allocator.publish(b"", None, text[: len(text) // 2 * 2], table)
                cache._allocator.free(table[::-1])
        return cache

    first, second = cache(64, "reference", texts), cache(num_blocks, kind, others)
    saved = first.published()
    wanted = {prefix for prefix, _ in prefixes_of(saved)}
    before = dict(prefixes_of(second.published()))
    empty = num_blocks - len(before)
    written: dict[int, int] = {}  # block: whose K and V
    for _ in range(2):  # the second time there is nothing to do, unless it did not fit
        count = second.restore(
            saved.parents,
            saved.token_ids,
            lambda indices, ids: written.update(zip(ids.tolist(), indices.tolist(), strict=True)),
        )
        second.check_integrity()
        after = dict(prefixes_of(second.published()))
        assert count == len(wanted & after.keys()) == min(len(wanted), len(wanted & before.keys()) + empty)
        assert before.items() <= after.items() and after.keys() <= wanted | before.keys()
        prefix_of = {block: prefix for prefix, block in prefixes_of(saved)}
        for block, index in written.items():  # K and V of each went where the index says
            assert after[prefix_of[int(saved.block_ids[index])]] == block
        assert len(written) == len(after) - len(before)
    assert second.num_free_blocks == num_blocks


def test_loading_again_finds_all_of_it(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    count = len(contents(filled()))
    engine = replace(NATIVE, num_blocks=count + 3).engine()
    assert [engine.load_prefix_cache(saved) for _ in range(3)] == [count] * 3
    partly = replace(NATIVE, num_blocks=count + 3).engine()
    answer(partly, PROMPT[:40], replace(PARAMS, max_tokens=1))  # K and V of two blocks, not from the file
    assert partly.load_prefix_cache(saved) == count
    assert contents(partly) == contents(engine)
    assert not caplog.records


# --- refusing ---


def test_every_truncation_is_refused(saved: Path, tmp_path: Path) -> None:
    data, path, engine = saved.read_bytes(), tmp_path / "cut", filled()
    header = 8 + int.from_bytes(data[:8], "little")
    for length in {
        *range(0, header + 200),
        *range(header, len(data), 997),
        *range(len(data) - 40, len(data)),
    }:
        path.write_bytes(data[:length])
        refused(engine, path, "damaged")
    path.write_bytes(data + b"x")
    refused(engine, path, "damaged")


def test_every_flipped_byte_is_refused(saved: Path, tmp_path: Path) -> None:
    data, path, engine = bytearray(saved.read_bytes()), tmp_path / "flipped", filled()
    header = 8 + int.from_bytes(data[:8], "little")
    for at in {*range(0, header, 3), *range(header, len(data), 1999), *range(len(data) - 32, len(data), 5)}:
        data[at] ^= 1 << at % 8
        path.write_bytes(data)
        refused(engine, path, "damaged|not a prefix cache")
        data[at] ^= 1 << at % 8


def forged(data: bytes, change: Callable[[dict[str, Any], bytearray], None]) -> bytes:
    """The file with another header or other data, and a checksum that is right."""
    start = 8 + int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8:start]), bytearray(data[start:-32])
    change(header, body)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = len(text).to_bytes(8, "little") + text + body
    return data + hashlib.sha256(data).digest()


def set_parent(index: int, value: int) -> Callable[[dict[str, Any], bytearray], None]:
    def change(header: dict[str, Any], body: bytearray) -> None:
        body[4 * index : 4 * index + 4] = value.to_bytes(4, "little", signed=True)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_parent(3, 3), "do not fit together"),
        (set_parent(0, 1), "do not fit together"),
        (set_parent(5, -2), "do not fit together"),
        (lambda header, body: body.extend(b"12345678"), "do not fit together"),
        (lambda header, body: header["parents"].update(shape=[2**31 - 1]), "do not fit together"),
        (lambda header, body: header["parents"].update(shape=[2**70]), "do not fit together"),
        (lambda header, body: header["parents"].update(shape=[True]), "do not fit together"),
        (lambda header, body: header["parents"].update(shape=7), "do not fit together"),
        (lambda header, body: header.pop("parents"), "do not fit together"),
        (lambda header, body: header.update(more={}), "do not fit together"),
        (lambda header, body: header["blocks"].update(shape=[0, 0]), "do not fit together"),
        (lambda header, body: header["__metadata__"].update({"mini-vllm": "9"}), "mini-vllm '9'"),
        (lambda header, body: header["__metadata__"].update({"format version": "1"}), "format version '1'"),
        (lambda header, body: header["__metadata__"].update(model=["x"]), "model"),
        (lambda header, body: header["__metadata__"].update(lora="x"), "lora 'x', but here it is None"),
        (lambda header, body: header["__metadata__"].pop("instruction set"), "instruction set None"),
    ],
)
def test_forgeries_with_a_right_checksum_are_refused(
    change: Callable[[dict[str, Any], bytearray], None], words: str, saved: Path, tmp_path: Path
) -> None:
    path = tmp_path / "forged"
    path.write_bytes(forged(saved.read_bytes(), lambda header, body: None))
    assert NATIVE.engine().load_prefix_cache(path) > 0  # the forger's tools are right
    path.write_bytes(forged(saved.read_bytes(), change))
    refused(filled(), path, words)


def test_duplicates_in_a_forgery_do_no_harm(saved: Path, tmp_path: Path) -> None:
    def change(header: dict[str, Any], body: bytearray) -> None:
        count = header["parents"]["shape"][0]
        body[: 4 * count] = np.full(count, -1, np.int32).tobytes()
        body[4 * count : 4 * count + 64 * count] = bytes(64 * count)

    path = tmp_path / "forged"
    path.write_bytes(forged(saved.read_bytes(), change))
    engine = NATIVE.engine()
    engine.load_prefix_cache(path)
    engine.kv_cache.check_integrity()
    assert_idle(engine)
    assert len(contents(engine)) == 1


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"checkpoint": make_checkpoint(TINY, random_tensors(TINY, seed=1))}, "model"),
        ({"checkpoint": make_checkpoint(replace(TINY, norm_eps=1e-6), random_tensors(TINY))}, "model"),
        ({"dtype": "bfloat16"}, "dtype 'float32', but here it is 'bfloat16'"),
        ({"block_size": 32}, "block_size '16', but here it is '32'"),
        ({"prefix_caching": False}, "enable_prefix_caching"),
    ],
)
def test_other_engines_refuse_it(other: dict[str, Any], words: str, saved: Path) -> None:
    refused(replace(NATIVE, **other).engine(), saved, words)


def test_one_weight_is_enough_to_be_another_model() -> None:
    tensors = random_tensors(TINY)
    before = make_checkpoint(TINY, tensors).fingerprint
    assert make_checkpoint(TINY, random_tensors(TINY)).fingerprint == before
    tensors["layers.1.down.weight"] = tensors["layers.1.down.weight"].copy()
    tensors["layers.1.down.weight"].flat[7] *= 1.0000001
    assert make_checkpoint(TINY, tensors).fingerprint != before


def test_other_instruction_sets_refuse_it(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if filled().executor.isa == "scalar":  # type: ignore[attr-defined]
        pytest.skip("this processor or this run has scalar arithmetic only")
    monkeypatch.setenv("MINIVLLM_ISA", "scalar")
    refused(NATIVE.engine(), saved, "instruction set")


def test_quantized_weights_are_other_weights(saved: Path, tmp_path: Path) -> None:
    engine = NATIVE.engine()
    pool = KVPool.reserve(engine.kv_cache.geometry)
    engine.executor = NativeExecutor(tiny_checkpoint(), pool, "float32", 2, "int8")
    refused(engine, saved, "quantization 'none', but here it is 'int8'")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    engine = filled()
    refused(engine, tmp_path / "absent", "cannot read .*No such file")
    refused(engine, tmp_path, "is not a file")
    refused(engine, Path("a\0b"), "must be that of a file")
    os.mkfifo(tmp_path / "pipe")
    refused(engine, tmp_path / "pipe", "is not a file")
    for name, data in {"empty": b"", "text": b"hello, world" * 9, "zeros": bytes(5000)}.items():
        (tmp_path / name).write_bytes(data)
        refused(engine, tmp_path / name, "is not a prefix cache")


def test_a_save_that_fails_leaves_the_old_file(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "old"
    path.write_bytes(saved.read_bytes())
    engine = filled()
    before = contents(engine)
    read = engine.executor.read_blocks

    def full_disk(block_ids: Any) -> Any:
        raise OSError(28, "No space left on device")

    engine.executor.read_blocks = full_disk  # type: ignore[method-assign]
    with pytest.raises(PrefixCacheError, match="No space left"):
        engine.save_prefix_cache(path)
    engine.executor.read_blocks = read  # type: ignore[method-assign]
    assert path.read_bytes() == saved.read_bytes() and os.listdir(tmp_path) == ["old"]
    assert contents(engine) == before
    engine.save_prefix_cache(path)
    assert os.listdir(tmp_path) == ["old"]
    with pytest.raises(PrefixCacheError, match=r"cannot write .*No such file"):
        engine.save_prefix_cache(tmp_path / "absent" / "file")
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        replace(NATIVE, prefix_caching=False).engine().save_prefix_cache(path)
    assert path.read_bytes() == saved.read_bytes()


def not_written(path: Any, words: str, engine: InferenceEngine | None = None) -> None:
    """Neither a save nor the check before it does anything there, and both say why."""
    for save in (check_prefix_target, (engine or filled()).save_prefix_cache):
        with pytest.raises(PrefixCacheError, match=words) as caught:
            save(path)
        assert "\n" not in str(caught.value)


def test_a_save_replaces_nothing_but_a_prefix_cache(saved: Path, tmp_path: Path) -> None:
    engine = filled()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    foreign = {
        "text": b"hello, world",
        "short": b"x",
        "zeros": bytes(5000),
        "header": b"\2" + bytes(7) + b"{}",
    }
    for name, data in foreign.items():
        (tmp_path / name).write_bytes(data)
    for name in [*foreign, "pipe", "directory"]:
        (tmp_path / f"link to {name}").symlink_to(name)
    (tmp_path / "loop").symlink_to("loop")
    there = {path.name: path.lstat() for path in tmp_path.iterdir()}
    for name in foreign:
        not_written(tmp_path / name, "is not a prefix cache .*; it is not replaced", engine)
        not_written(tmp_path / f"link to {name}", "is not a prefix cache", engine)
        assert (tmp_path / name).read_bytes() == foreign[name]
    for name in ("pipe", "directory"):
        not_written(tmp_path / name, "is not a file; it is not replaced", engine)
        not_written(tmp_path / f"link to {name}", "is not a file", engine)
    not_written(tmp_path / "loop", "cannot write .*symbolic links", engine)
    now = {path.name: path.lstat() for path in tmp_path.iterdir()}
    assert {
        name: (s.st_ino, s.st_mode, s.st_mtime_ns) for name, s in now.items() if s.st_mode & 0o100000
    } == {name: (s.st_ino, s.st_mode, s.st_mtime_ns) for name, s in there.items() if s.st_mode & 0o100000}
    assert now.keys() == there.keys()  # nothing unfinished is left


def test_a_save_goes_where_a_link_leads(saved: Path, tmp_path: Path) -> None:
    engine = filled()
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "link", tmp_path / "there" / ("long name" * 28)
    link.symlink_to(target)
    for before in (None, b"", b"an old one, damaged"):
        if before is not None:  # what was saved, cut short behind its header, counts as ours
            target.write_bytes(before and saved.read_bytes()[:-9])
        assert engine.save_prefix_cache(link) == NATIVE.engine().load_prefix_cache(target)
        assert link.is_symlink() and not target.is_symlink()
    assert os.listdir(tmp_path / "there") == [target.name]


def test_a_check_leaves_nothing_behind(tmp_path: Path) -> None:
    assert check_prefix_target(tmp_path / "new") == (tmp_path / "new").resolve()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("path", ["", "a\0b", None, 7, b"bytes", ["x"]])
def test_what_is_no_path_is_refused(path: Any) -> None:
    engine = filled()
    not_written(path, "must be that of a file", engine)
    with pytest.raises(PrefixCacheError, match="must be that of a file"):
        engine.load_prefix_cache(path)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("absent/file", "No such file"),
        ("text/file", "Not a directory"),
        ("text", "not a prefix cache"),
        ("", "must be that of a file"),
        (".", ". is not a file"),
        ("/proc/prefixes", "cannot write"),
        ("x" * 300, "name too long"),
    ],
)
def test_the_command_line_refuses_a_path_before_anything_runs(path: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"mine")
    where = str(tmp_path / path) if path.strip("./") and path[0] != "/" else path
    for command in (("generate", "no/such/model.gguf", "hi"), ("chat", "no/such/model.gguf", "hi")):
        result = mini_vllm(*command, "--prefix-cache", where)
        assert result.returncode == 1 and result.stdout == ""
        assert words in result.stderr and "model.gguf" not in result.stderr, result.stderr
    assert os.listdir(tmp_path) == ["text"] and (tmp_path / "text").read_bytes() == b"mine"


@pytest.mark.real_model
def test_the_command_line_keeps_it(tmp_path: Path) -> None:
    from conftest import find_real_model

    path = tmp_path / "prefixes"
    command = [
        "generate", str(find_real_model()), "one two three " * 30, "-n", "2", "-t", "0", "--json",
        "--num-blocks", "64", "--prefix-cache", str(path),
    ]  # fmt: skip
    first, second = (mini_vllm(*command) for _ in range(2))
    assert first.returncode == second.returncode == 0, second.stderr
    a, b = json.loads(first.stdout), json.loads(second.stdout)
    assert a["num_cached_tokens"] == 0 < b["num_cached_tokens"]
    assert a["outputs"] == b["outputs"]
    path.write_bytes(path.read_bytes()[:-1])
    third = mini_vllm(*command)
    assert third.returncode == 1 and "damaged" in third.stderr
