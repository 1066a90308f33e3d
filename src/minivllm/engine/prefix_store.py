"""Saving the prefix cache to a file, and restoring it: KVCache's index and the executor's memory.

What is restored answers bit for bit as what was saved, so both sides must agree in all that K and V depend
on; the identity says it. Knows nothing of requests; the file's layout is ``kv_cache.prefix_file``'s.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from minivllm import __version__
from minivllm.batch import IntArray
from minivllm.errors import ConfigError, counted
from minivllm.executors.base import Executor
from minivllm.kv_cache.kv_cache import KVCache
from minivllm.kv_cache.kv_pool import KVGeometry
from minivllm.kv_cache.prefix_file import open_prefix_file, write_prefix_file

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 4 << 20  # of blocks that are in memory twice


def save_prefix_cache(path: str | Path, kv_cache: KVCache, executor: Executor) -> int:
    """Write every published block and its tokens to a file, so that a long prompt survives a restart.

    What requests with a ``cache_salt`` have published is left out. Whoever reads the file can tell the
    prompts: it is made readable for its owner alone. A prefix cache that is there is replaced once the new
    one is complete; anything else that is there stays.

    Returns: the number of blocks.

    Raises:
        ConfigError: prefix caching is off.
        PrefixCacheError: the file cannot be written, or something else is there.
    """
    _check_enabled(kv_cache)
    published = kv_cache.published()

    def blocks() -> Iterator[npt.NDArray[np.uint8]]:
        for some in _chunks(published.block_ids, kv_cache.geometry):
            yield executor.read_blocks(some)

    identity = _identity(kv_cache.geometry, executor)
    size = kv_cache.geometry.bytes_per_block
    write_prefix_file(path, identity, published.parents, published.token_ids, size, blocks())
    return len(published.block_ids)


def load_prefix_cache(path: str | Path, kv_cache: KVCache, executor: Executor) -> int:
    """Take the blocks of a file that ``save_prefix_cache`` has written into the prefix cache.

    They go to blocks that hold nothing; if these are too few, beginnings are taken before what continues
    them. Whatever has been cached or is in use stays. Trust a file as you trust a model: a forged one can
    hold any keys and values.

    Returns: the number of blocks that the cache now has of those in the file.

    Raises:
        ConfigError: prefix caching is off.
        PrefixCacheError: there is no such file, it is damaged, or it was saved by another version of
            mini-vllm or with another model, instruction set, dtype, quantization or block size. Nothing has
            changed.
    """
    _check_enabled(kv_cache)
    geometry = kv_cache.geometry
    identity = _identity(geometry, executor)
    with open_prefix_file(path, identity, geometry.block_size, geometry.bytes_per_block) as file:

        def write(indices: IntArray, block_ids: IntArray) -> None:
            chunks = zip(_chunks(block_ids, geometry), _chunks(indices, geometry), strict=True)
            for some, some_indices in chunks:
                executor.write_blocks(some, file.read_blocks(some_indices))

        count = kv_cache.restore(file.parents, file.token_ids, write)
        if count < len(file.parents):
            logger.warning(
                "%s has %s, of which %d fit into the KV cache",
                path,
                counted(len(file.parents), "block"),
                count,
            )
        return count


def _check_enabled(kv_cache: KVCache) -> None:
    if not kv_cache.prefix_caching:
        raise ConfigError("there is no prefix cache: enable_prefix_caching is False")


def _identity(geometry: KVGeometry, executor: Executor) -> dict[str, str]:
    """Everything that has to be the same where the blocks are used again."""
    return {
        "mini-vllm": __version__,
        **executor.identity(),
        "kv_cache_dtype": geometry.dtype,
        "block_size": str(geometry.block_size),
    }


def _chunks(block_ids: IntArray, geometry: KVGeometry) -> Iterator[IntArray]:
    size = max(1, _CHUNK_BYTES // geometry.bytes_per_block)
    for start in range(0, len(block_ids), size):
        yield block_ids[start : start + size]
