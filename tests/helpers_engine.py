"""Engines over the fake model or a tiny native one, and loops that check the books after every step."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fakes import EOS, VOCAB_SIZE, FakeExecutor
from helpers_step import make_checkpoint, random_tensors

from minivllm.block_allocator import create_block_allocator
from minivllm.engine.inference_engine import InferenceEngine
from minivllm.engine.outputs import RequestOutput
from minivllm.executors.native import NativeExecutor
from minivllm.kv_cache.kv_cache import KVCache
from minivllm.kv_cache.kv_pool import KVGeometry, KVPool
from minivllm.models.config import ModelConfig
from minivllm.models.weights import Checkpoint
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler import Scheduler
from minivllm.text.tokenizer import Tokenizer

#: Big enough for grouped heads and rotary positions, small enough for thousands of steps.
TINY = ModelConfig(
    kind="llama", vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=8, max_position=1024, norm="rmsnorm", norm_eps=1e-5, norm_bias=False,
    activation="silu", gated_mlp=True, qkv_bias=False, out_bias=False, mlp_bias=False, tied_head=True,
    rope_inv_freq=(1.0, 0.1, 0.01, 0.001),
)  # fmt: skip


def byte_tokenizer(chat_template: str | None = None) -> Tokenizer:
    """Token id = byte."""
    return Tokenizer(
        lambda text, add_special_tokens: list(text.encode()),
        [bytes([i]) for i in range(256)],
        chat_template=chat_template,
    )


@lru_cache(maxsize=1)
def tiny_checkpoint() -> Checkpoint:
    """A random model of 256 tokens."""
    return make_checkpoint(TINY, random_tensors(TINY))


@dataclass(frozen=True)
class Setup:
    """What an engine for a test is made of."""

    model: str = "fake"  #: "fake" or "native"
    num_blocks: int = 64
    block_size: int = 16
    budget: int = 64
    max_num_seqs: int = 16
    dtype: str = "float32"
    kv_dtype: str | None = None  #: None: as dtype
    threads: int = 2
    eos: tuple[int, ...] = (EOS,)
    tokenizer: bool = True
    seed: int = 0
    prefix_caching: bool = True
    chat_template: str | None = None
    checkpoint: Checkpoint | None = None  #: of the shape TINY, for "native"; None: ``tiny_checkpoint``

    def engine(self) -> InferenceEngine:
        """A fresh engine; ``max_model_len`` is the pool's, or the tiny model's."""
        geometry = KVGeometry(
            TINY.num_layers,
            self.num_blocks,
            TINY.num_kv_heads,
            self.block_size,
            TINY.head_dim,
            self.kv_dtype or self.dtype,
        )
        executor: Any = FakeExecutor(geometry)
        if self.model == "native":
            executor = NativeExecutor(
                self.checkpoint or tiny_checkpoint(), KVPool.reserve(geometry), self.dtype, self.threads
            )
        allocator = create_block_allocator(self.num_blocks, self.block_size)
        kv_cache = KVCache(geometry, allocator, self.prefix_caching)
        return InferenceEngine(
            executor=executor,
            kv_cache=kv_cache,
            scheduler=Scheduler(kv_cache, self.budget, self.max_num_seqs),
            tokenizer=byte_tokenizer(self.chat_template) if self.tokenizer else None,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=self.eos,
            max_model_len=min(TINY.max_position, geometry.num_slots),
            seed=self.seed,
        )


def run(engine: InferenceEngine) -> dict[str, RequestOutput]:
    """Step until nothing is left, checking the books after each step. The last output of each request."""
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id] = output
        engine.kv_cache.check_integrity()
    assert_idle(engine)
    return outputs


def answer(engine: InferenceEngine, prompt: Any, params: SamplingParams | None = None) -> RequestOutput:
    """The whole answer to one more request."""
    request_id = engine.add_request(prompt, params)
    return run(engine)[request_id]


def assert_idle(engine: InferenceEngine) -> None:
    """Nothing runs, nothing waits, and every block is free."""
    metrics = engine.metrics()
    assert (metrics.num_running, metrics.num_waiting) == (0, 0)
    assert metrics.num_free_blocks == metrics.num_blocks
    assert not engine.has_unfinished_requests()
