"""The one place that puts an engine together, so that no other room has to know which parts there are."""

import logging
import math

from minivllm.block_allocator import create_block_allocator
from minivllm.config import EngineConfig
from minivllm.engine.inference_engine import InferenceEngine
from minivllm.executors.base import Executor
from minivllm.executors.native import NativeExecutor, packed_bytes
from minivllm.kv_cache.kv_cache import KVCache
from minivllm.kv_cache.kv_pool import KVDtype, KVGeometry, KVPool
from minivllm.kv_cache.memory import available_memory, plan_pool
from minivllm.models.config import tensor_shapes
from minivllm.models.pull import cache_directory
from minivllm.models.registry import load_checkpoint, resolve_model
from minivllm.models.weights import Checkpoint, WeightDtype
from minivllm.scheduler import Scheduler
from minivllm.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)


def create_engine(config: EngineConfig) -> InferenceEngine:
    """Load the model, reserve the KV cache, and connect the parts.

    Raises:
        ModelError: there is no such model, it is damaged, or it needs something that is not implemented.
        ConfigError: the settings do not fit the model or the machine.
    """
    checkpoint = load_checkpoint(resolve_model(config.model))
    model = checkpoint.config
    dtype = checkpoint.dtype if config.dtype == "auto" else config.dtype
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    tokenizer = _tokenizer(checkpoint)

    create_executor = _torch_executor if config.executor == "torch" else _native_executor
    executor, geometry, max_model_len = create_executor(config, checkpoint, dtype, kv_dtype)
    allocator = create_block_allocator(geometry.num_blocks, geometry.block_size)
    kv_cache = KVCache(geometry, allocator, config.enable_prefix_caching)
    engine = InferenceEngine(
        executor=executor,
        kv_cache=kv_cache,
        scheduler=Scheduler(kv_cache, config.max_num_batched_tokens, config.max_num_seqs),
        tokenizer=tokenizer,
        vocab_size=model.vocab_size,
        eos_token_ids=checkpoint.eos_token_ids,
        max_model_len=max_model_len,
        seed=config.seed,
    )
    for line in engine.describe().splitlines():
        logger.info(line)
    return engine


def _native_executor(
    config: EngineConfig, checkpoint: Checkpoint, dtype: WeightDtype, kv_dtype: KVDtype
) -> tuple[Executor, KVGeometry, int]:
    """The executor, its pool's geometry, and max_model_len."""
    weights = packed_bytes(checkpoint, dtype, config.weight_quantization)
    geometry, max_model_len = plan_pool(config, checkpoint.config, kv_dtype, weights, available_memory())
    return (
        NativeExecutor(
            checkpoint, KVPool.reserve(geometry), dtype, config.threads, config.weight_quantization
        ),
        geometry,
        max_model_len,
    )


def _torch_executor(
    config: EngineConfig, checkpoint: Checkpoint, dtype: WeightDtype, kv_dtype: KVDtype
) -> tuple[Executor, KVGeometry, int]:
    """The executor, its pool's geometry, and max_model_len."""
    from minivllm.executors.torch_ import TorchExecutor, default_device, free_cuda_memory

    device = default_device() if config.device == "auto" else config.device
    on_host = device == "cpu"
    available = available_memory() if on_host else free_cuda_memory(device)
    item = 4 if dtype == "float32" else 2
    weights = item * sum(map(math.prod, tensor_shapes(checkpoint.config).values()))
    geometry, max_model_len = plan_pool(config, checkpoint.config, kv_dtype, weights, available)
    pool = KVPool.reserve(geometry) if on_host else geometry
    return TorchExecutor(checkpoint, pool, dtype, device), geometry, max_model_len


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    source = checkpoint.tokenizer
    if source is None:
        return None
    return load_tokenizer(source.kind, source.path, source.data, cache_dir=cache_directory())
