"""KVCache against a slow model of it, the pool's sizing, and the memory it may take."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes import fake_kv_cache
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.config import EngineConfig
from minivllm.errors import BlockError, ConfigError
from minivllm.kv_cache.kv_pool import KVGeometry, KVPool
from minivllm.kv_cache.memory import DEFAULT_SHARE, available_memory, plan_pool
from minivllm.models.config import ModelConfig
from minivllm.sampling_params import SamplingParams
from minivllm.sequence import ScheduledSequence, Sequence
from minivllm.sequence import logit_rows as yielded

MIB = 2**20


def sequence(seq_id: int, num_tokens: int, num_computed: int = 0) -> Sequence:
    return Sequence(
        seq_id=seq_id,
        request_id=str(seq_id),
        token_ids=list(range(seq_id * 1000, seq_id * 1000 + num_tokens)),
        num_prompt_tokens=num_tokens,
        params=SamplingParams(),
        seed=0,
        max_num_tokens=num_tokens + 16,
        num_computed_tokens=num_computed,
    )


# --- tables ---


def test_allocate_grows_only_by_what_is_missing() -> None:
    cache = fake_kv_cache(num_blocks=4, block_size=4)
    a = sequence(0, 16)
    assert cache.allocate(a, 1)
    assert len(cache.table(a)) == 1
    assert cache.allocate(a, 4)
    assert len(cache.table(a)) == 1
    first = cache.table(a)
    assert cache.allocate(a, 9)
    assert cache.table(a)[:1] == first and len(set(cache.table(a))) == 3
    assert cache.num_free_blocks == 1


def test_allocation_that_does_not_fit_changes_nothing() -> None:
    cache = fake_kv_cache(num_blocks=4, block_size=4)
    a, b = sequence(0, 16), sequence(1, 16)
    assert cache.allocate(a, 9)
    before = cache.table(a)
    assert not cache.allocate(a, 17)
    assert not cache.allocate(b, 5)
    assert cache.table(a) == before and cache.table(b) == [] and cache.num_free_blocks == 1
    cache.check_integrity()


def test_free_releases_tail_first_so_that_the_same_blocks_come_back_in_order() -> None:
    cache = fake_kv_cache(num_blocks=8, block_size=1)
    a, b = sequence(0, 8), sequence(1, 8)
    cache.allocate(a, 5)
    table = cache.table(a)
    cache.free(a)
    cache.free(a)  # holds nothing: nothing happens
    assert cache.num_free_blocks == 8 and cache.table(a) == []
    cache.allocate(b, 5)
    assert cache.table(b) == table


def test_integrity_check_notices_a_block_that_the_allocator_knows_otherwise() -> None:
    cache = fake_kv_cache(num_blocks=8, block_size=1)
    a = sequence(0, 8)
    cache.allocate(a, 3)
    cache.check_integrity()
    cache._allocator.fork(cache.table(a)[:1])
    with pytest.raises(BlockError, match=f"block {cache.table(a)[0]} 1 times, but its count is 2"):
        cache.check_integrity()
    cache._allocator.free(cache.table(a)[:1])
    cache._allocator.allocate(2)
    with pytest.raises(BlockError, match="5 blocks are in use, but the tables hold 3"):
        cache.check_integrity()


# --- batches ---


def test_batch_is_the_one_drawn_in_its_docstring() -> None:
    cache = fake_kv_cache(num_blocks=16, block_size=2)
    a, b, c = sequence(1, 3, num_computed=2), sequence(2, 8, num_computed=7), sequence(3, 9)
    for s, upto in ((c, 4), (a, 3), (b, 8)):
        assert cache.allocate(s, upto)
    batch = cache.batch(
        [ScheduledSequence(a, 1, 0, (a,)), ScheduledSequence(b, 1, 0, (b,)), ScheduledSequence(c, 4)]
    )
    assert batch.token_ids.tolist() == [1002, 2007, 3000, 3001, 3002, 3003]
    assert batch.positions.tolist() == [2, 7, 0, 1, 2, 3]
    assert batch.query_start.tolist() == [0, 1, 2, 6]
    assert batch.context_lens.tolist() == [3, 8, 4]
    assert batch.logit_rows.tolist() == [0, 1]
    assert batch.block_tables.tolist() == [
        [*cache.table(a), 0, 0],
        cache.table(b),
        [*cache.table(c), 0, 0],
    ]
    assert batch.block_copies.shape == (0, 3)


@settings(max_examples=50, deadline=None)
@given(data=st.data(), block_size=st.sampled_from([1, 2, 3, 16, 40]))
def test_batch_agrees_with_its_definition(data: st.DataObject, block_size: int) -> None:
    cache = fake_kv_cache(num_blocks=400, block_size=block_size)
    plan = []
    for seq_id in range(data.draw(st.integers(1, 6))):
        length = data.draw(st.integers(1, 50))
        computed = data.draw(st.integers(0, length - 1))
        count = data.draw(st.integers(1, length - computed))
        s = sequence(seq_id, length, computed)
        assert cache.allocate(s, computed)  # grown in two steps, so that tables interleave
        draws = (s,) * data.draw(st.integers(1, 3)) if computed + count == length else ()
        scored = data.draw(st.integers(0, count - (computed + count == length)))
        plan.append(ScheduledSequence(s, count, scored, draws))
    for s, count, *_ in reversed(plan):
        # More than the step needs: what lies beyond the context must not show.
        assert cache.allocate(s, s.num_computed_tokens + count + block_size)
    batch = cache.batch(plan)

    row = 0
    logit_rows = []
    for i, (s, count, scored, draws, _) in enumerate(plan):
        table = cache.table(s)
        assert batch.query_start[i] == row
        context = s.num_computed_tokens + count
        assert batch.context_lens[i] == context
        used = -(-context // block_size)
        width = batch.block_tables.shape[1]
        assert batch.block_tables[i].tolist() == table[:used] + [0] * (width - used)
        for position in range(s.num_computed_tokens, context):
            assert batch.token_ids[row] == s.token_ids[position]
            assert batch.positions[row] == position
            slot = table[position // block_size] * block_size + position % block_size
            assert batch.slot_mapping[row] == slot
            row += 1
        logit_rows += [*range(row - count, row - count + scored), *[row - 1] * len(draws)]
    assert batch.query_start[-1] == row == len(batch.token_ids)
    assert batch.logit_rows.tolist() == logit_rows == sorted(logit_rows)
    sequences, positions = yielded(plan)
    assert len(sequences) == len(positions) == len(logit_rows)
    for yielder, position, logit_row in zip(sequences, positions, logit_rows, strict=True):
        assert position == batch.positions[logit_row] + 1
        assert yielder is plan[int(np.searchsorted(batch.query_start, logit_row, side="right")) - 1].sequence
    for name in type(batch).__dataclass_fields__:
        array = getattr(batch, name)
        assert array.dtype == np.int32 and array.flags.c_contiguous, name


# --- the pool's memory ---


def test_pool_is_zeroed_aligned_and_of_the_shape_it_says() -> None:
    geometry = KVGeometry(2, 3, 5, 16, 8, "bfloat16")
    pool = KVPool.reserve(geometry)
    assert pool.data.shape == (2, 3, 5, 2, 16, 8) and pool.data.dtype == np.uint16
    assert pool.data.nbytes == geometry.num_bytes == 3 * geometry.bytes_per_block
    assert pool.data.ctypes.data % 4096 == 0
    assert not pool.data.any()
    pool.data[:] = 1
    assert str(geometry) == "3 blocks × 16 tokens = 48 tokens, 0.0 MiB (bfloat16)"


def test_pool_beyond_the_address_space_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match="use a smaller num_blocks"):
        KVPool.reserve(KVGeometry(1000, 2**30, 1000, 1, 1000, "float32"))


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_available_memory_is_what_the_machine_has_free(tmp_path: Path) -> None:
    write_tree(tmp_path, {"proc/meminfo": "MemTotal: 900 kB\nMemAvailable:   500 kB\n"})
    assert available_memory(tmp_path) == 500 * 1024


def test_available_memory_respects_every_cgroup_above_version_2(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {
            "proc/meminfo": "MemAvailable: 5000000 kB\n",
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/inner/memory.max": "max\n",
            "sys/fs/cgroup/outer/inner/memory.current": "5\n",
            "sys/fs/cgroup/outer/memory.max": f"{100 * MIB}\n",
            "sys/fs/cgroup/outer/memory.current": f"{60 * MIB}\n",
            "sys/fs/cgroup/outer/memory.stat": f"anon 5\ninactive_file {20 * MIB}\n",
        },
    )
    assert available_memory(tmp_path) == 60 * MIB


def test_available_memory_respects_cgroups_version_1_in_a_container(tmp_path: Path) -> None:
    # The path is the host's and does not exist here: the limit is at the mount.
    write_tree(
        tmp_path,
        {
            "proc/meminfo": "MemAvailable: 5000000 kB\n",
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{100 * MIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{30 * MIB}\n",
            "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {5 * MIB}\n",
        },
    )
    assert available_memory(tmp_path) == 75 * MIB


def test_available_memory_of_this_machine_is_plausible() -> None:
    assert 0 <= available_memory() < 2**50
    assert available_memory(Path("/nonexistent")) > 2**26  # no /proc: as on macOS


# --- sizing ---

MODEL = ModelConfig(
    kind="llama", vocab_size=100, hidden_size=64, intermediate_size=128, num_layers=4, num_heads=4,
    num_kv_heads=2, head_dim=16, max_position=1000, norm="rmsnorm", norm_eps=1e-5, norm_bias=False,
    activation="silu", gated_mlp=True, qkv_bias=False, out_bias=False, mlp_bias=False, tied_head=True,
    rope_inv_freq=(1.0,) * 8,
)  # fmt: skip
TOKEN_BYTES = 4 * 2 * 2 * 16 * 4  # float32


def plan(available: int = 64 * MIB, weight_bytes: int = 0, **settings: object) -> tuple[KVGeometry, int]:
    config = replace(EngineConfig("m"), **settings)
    return plan_pool(config, MODEL, "float32", weight_bytes, available)


def test_default_pool_is_a_share_of_what_the_weights_leave() -> None:
    geometry, max_model_len = plan(available=64 * MIB, weight_bytes=4 * MIB)
    assert geometry.num_blocks == int(60 * MIB * DEFAULT_SHARE) // (16 * TOKEN_BYTES)
    assert max_model_len == 1000


def test_pool_is_never_larger_than_what_the_running_sequences_could_use() -> None:
    assert plan(available=2**40)[0].num_blocks == 64 * 63
    assert plan(available=2**40, max_num_seqs=2)[0].num_blocks == 2 * 63
    assert plan(available=2**40, max_num_seqs=2, max_model_len=100)[0].num_blocks == 2 * 7
    assert plan(available=2**40, max_num_batched_tokens=3)[0].num_blocks == 3 * 63


def test_explicit_sizes_count_and_limit_the_context() -> None:
    assert plan(num_blocks=5) == (KVGeometry(4, 5, 2, 16, 16, "float32"), 80)
    assert plan(kv_cache_memory=5 * 16 * TOKEN_BYTES + 1)[0].num_blocks == 5
    assert plan(num_blocks=100, max_model_len=90)[1] == 90
    assert plan(num_blocks=3, block_size=1000)[1] == 1000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 1001}, r"max_model_len is 1,001; the model's context is 1,000 tokens"),
        ({"block_size": 1001}, r"block_size is 1,001; the model's context is 1,000 tokens"),
        (
            {"num_blocks": 5, "max_model_len": 81},
            r"80 tokens, but one sequence of 81 takes 6 blocks",
        ),
        ({"kv_cache_memory": 100}, r"0.0 MiB holds 0 blocks, 0 tokens, but one sequence of 2 takes 1 block,"),
        ({"num_blocks": 1, "block_size": 1}, r"1 block, 1 token, but one sequence of 2 takes 2 blocks"),
        ({"num_blocks": 10_000}, r"10,000 blocks needs 156.2 MiB, but 64.0 MiB are available"),
        ({"kv_cache_memory": 64 * MIB + 1}, r"kv_cache_memory is 64.0 MiB, but 64.0 MiB are available"),
        ({"kv_cache_memory": 2**49}, r"kv_cache_memory is 536,870,912.0 MiB, but 64.0 MiB are available"),
        ({"num_blocks": 2**30, "block_size": 2}, r"is over 2,147,483,647 tokens"),
    ],
)
def test_sizes_that_cannot_be_are_refused_with_the_numbers(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**settings)


# --- configuration ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 0}, "block_size is 0; it must be from 1 to"),
        ({"block_size": True}, "block_size is True; it must be an integer"),
        ({"block_size": None}, "block_size is None; it must be an integer"),
        ({"num_blocks": 2.0}, "num_blocks is 2.0; it must be an integer"),
        ({"max_num_seqs": -1}, "max_num_seqs is -1"),
        ({"max_num_batched_tokens": 10**18}, "max_num_batched_tokens is 1000000000000000000"),
        ({"kv_cache_memory": 0}, "kv_cache_memory is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"threads": 0}, "threads is 0"),
        ({"dtype": "float16"}, "dtype is 'float16'; use one of 'auto', 'float32', 'bfloat16'"),
        ({"executor": "cuda"}, "executor is 'cuda'; use one of 'native', 'torch'"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"device": "cuda"}, "the native executor runs on the CPU"),
        ({"executor": "torch", "threads": 2}, "threads is 2, but it is the native executor's"),
        ({"quantization": "awq"}, "quantization is 'awq'; use one of 'auto', 'int8', 'int4'"),
        ({"executor": "torch", "kv_cache_dtype": "int8"}, "kv_cache_dtype is 'int8', but the torch"),
        ({"executor": "torch", "quantization": "int8"}, "the torch executor keeps weights in dtype"),
        ({"num_blocks": 4, "kv_cache_memory": 4}, "set one of them"),
        ({"model": ""}, "model is ''"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching is 1"),
    ],
)
def test_config_refuses(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{"model": "m", **settings})


def test_config_keeps_numpy_integers_as_ints() -> None:
    config = EngineConfig("m", block_size=np.int64(8))
    assert type(config.block_size) is int and config.block_size == 8


def test_a_dtype_that_is_asked_for_is_what_the_weights_get() -> None:
    assert EngineConfig("m").weight_quantization == "auto"
    assert EngineConfig("m", dtype="float32", quantization="auto").weight_quantization is None
    assert EngineConfig("m", dtype="float32", quantization="int8").weight_quantization == "int8"
    assert EngineConfig("m", quantization=None).weight_quantization is None
