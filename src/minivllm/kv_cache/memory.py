"""How much memory the KV cache may have, and the pool's size that follows from it.

Reads the operating system's figures; reserves nothing itself. Knows nothing of sequences.
"""

import math
import os
from dataclasses import replace
from pathlib import Path

from minivllm.config import EngineConfig
from minivllm.errors import ConfigError, counted
from minivllm.kv_cache.kv_pool import KVDtype, KVGeometry
from minivllm.models.config import ModelConfig

DEFAULT_SHARE = 0.4
"""Share of the memory left beside the weights that the pool gets when nobody says otherwise: less than half,
so that a second engine, or what else runs on the machine, still finds room."""

_MAX_SLOTS = 2**31 - 1  # slots are int32


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can still use: free memory of the machine, or less where a cgroup limits it.

    ``root`` is where ``proc`` and ``sys`` are looked for (tests put others there).
    """
    candidates = [_machine_memory(root), *_cgroup_memory(root)]
    return max(0, min(candidates))


def _machine_memory(root: Path) -> int:
    """MemAvailable on Linux; elsewhere half of the physical memory, as nothing says what is free."""
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup_memory(root: Path) -> list[int]:
    """Limit minus usage of this process's memory cgroups and those above. Reclaimable cache is no usage."""
    left = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2: one hierarchy
            mount, limit_file, usage_file = root / "sys/fs/cgroup", "memory.max", "memory.current"
            cache_key = "inactive_file"
        elif "memory" in controllers.split(","):  # version 1
            mount, limit_file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            usage_file, cache_key = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = mount / path.lstrip("/")
        # In a container the path may be the host's, which is not mounted here; the mount itself then counts.
        for directory in [group, *group.parents]:
            limit, usage = _read(directory / limit_file).strip(), _read(directory / usage_file).strip()
            if limit.isdigit() and usage.isdigit():
                fields = dict(field.split() for field in _read(directory / "memory.stat").splitlines())
                left.append(int(limit) - int(usage) + int(fields.get(cache_key, 0)))
            if directory == mount:
                break
    return left


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def plan_pool(
    config: EngineConfig, model: ModelConfig, dtype: KVDtype, weight_bytes: int, available: int
) -> tuple[KVGeometry, int]:
    """Geometry of the pool, and max_model_len, for an engine of this configuration.

    Args:
        config: the engine's; ``num_blocks`` or ``kv_cache_memory`` sizes the pool, else ``DEFAULT_SHARE``.
        model: shape of the model.
        dtype: of the cache.
        weight_bytes: what the weights will take of ``available``.
        available: bytes of memory that are free on the executor's device.

    Raises:
        ConfigError: the pool would not fit, would hold no request, or ``max_model_len`` does not fit it.
    """
    context = model.max_position
    if config.block_size > context:
        raise ConfigError(f"block_size is {config.block_size:,}; the model's context is {context:,} tokens")
    if config.max_model_len is not None and config.max_model_len > context:
        raise ConfigError(
            f"max_model_len is {config.max_model_len:,}; the model's context is {context:,} tokens"
        )
    wanted_len = config.max_model_len or context
    one_block = KVGeometry(model.num_layers, 1, model.num_kv_heads, config.block_size, model.head_dim, dtype)
    block_bytes = one_block.bytes_per_block

    if config.num_blocks is not None:
        num_blocks, budget = config.num_blocks, config.num_blocks * block_bytes
    else:
        left = max(0, available - weight_bytes)
        if config.kv_cache_memory is not None and config.kv_cache_memory > left:
            raise ConfigError(
                f"kv_cache_memory is {_mib(config.kv_cache_memory)}, but {_mib(available)} are available, "
                f"of which the weights take {_mib(weight_bytes)}; use less"
            )
        budget = config.kv_cache_memory or int(DEFAULT_SHARE * left)
        # More than this is never used: each running sequence has at least one token in every step.
        num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        useful = num_seqs * math.ceil(wanted_len / config.block_size)
        num_blocks = min(budget // block_bytes, useful, _MAX_SLOTS // config.block_size)
    capacity = num_blocks * config.block_size
    if capacity > _MAX_SLOTS:
        raise ConfigError(
            f"num_blocks ({num_blocks:,}) × block_size ({config.block_size:,}) is over {_MAX_SLOTS:,} tokens"
        )
    needed = num_blocks * block_bytes
    if needed > available - weight_bytes:
        raise ConfigError(
            f"a KV cache of {counted(num_blocks, 'block')} needs {_mib(needed)}, but {_mib(available)} are "
            f"available, of which the weights take {_mib(weight_bytes)}; use a smaller num_blocks or "
            f"kv_cache_memory"
        )
    required_len = config.max_model_len or 2  # a prompt of one token and an answer of one
    if capacity < required_len:
        required = math.ceil(required_len / config.block_size)
        raise ConfigError(
            f"a KV cache of {_mib(budget)} holds {counted(num_blocks, 'block')}, "
            f"{counted(capacity, 'token')}, but one sequence of {required_len:,} takes "
            f"{counted(required, 'block')}, {_mib(required * block_bytes)}"
        )
    return replace(one_block, num_blocks=num_blocks), min(wanted_len, capacity)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
