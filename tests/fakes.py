"""Stand-ins for a model and a tokenizer, small enough to know exactly what they must answer.

The fake executor keeps token ids where a real one keeps K and V, and its answers depend on nothing but the
tokens read back through the block tables: a wrong table, slot or position changes the tokens that come out.
"""

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from minivllm.batch import NO_SLOT, Batch, SamplingBatch, StepResult
from minivllm.block_allocator import create_block_allocator
from minivllm.kv_cache.kv_cache import KVCache
from minivllm.kv_cache.kv_pool import KVGeometry

VOCAB_SIZE = 256
EOS = 0


def fake_next(token_ids: Sequence[int], choice: int = 0) -> tuple[int, float]:
    """The next token of that choice after these ones, and its logprob: a hash of all of them."""
    digest = zlib.crc32(np.asarray(token_ids, np.int32).tobytes(), choice)
    return digest % VOCAB_SIZE, float(np.float32(-(digest >> 8) / 2**24))


def fake_continuation(
    prompt: Sequence[int], max_tokens: int, end: frozenset[int] = frozenset({EOS}), choice: int = 0
) -> list[int]:
    """What the fake model must answer: up to ``max_tokens`` tokens, ending with the first end token."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(fake_next(tokens, choice)[0])
        if tokens[-1] in end:
            break
    return tokens[len(prompt) :]


HIDDEN_SIZE = 4


def fake_hidden(token_ids: Sequence[int]) -> list[float]:
    """The hidden state of the last of these tokens: a hash of all of them."""
    return [fake_next(token_ids, choice)[1] for choice in range(HIDDEN_SIZE)]


class FakeExecutor:
    """Obeys ``executors.base.Executor``. Ignores the sampling parameters, except for ``num_logprobs``."""

    name = "fake"
    device = "cpu"

    def __init__(self, geometry: KVGeometry) -> None:
        self.block_size = geometry.block_size
        self.tokens = np.full(geometry.num_slots, -1, np.int32)
        self.positions = np.full(geometry.num_slots, -1, np.int32)
        self.steps: list[tuple[int, int]] = []  #: (sequences, rows) of each
        self.fail_at: int | None = None  #: raise in this step
        self.damaged: int | None = None  #: a context that begins with this token has no token to choose

    def execute(
        self,
        batch: Batch,
        sampling: SamplingBatch,
        before_sampling: Callable[[], object] | None = None,
    ) -> StepResult:
        num_seqs, num_rows = len(batch.context_lens), len(batch.token_ids)
        self.steps.append((num_seqs, num_rows))
        if self.fail_at is not None and len(self.steps) >= self.fail_at:
            raise RuntimeError("the fake model broke")
        for name in Batch.__dataclass_fields__:
            array = getattr(batch, name)
            assert array.dtype == np.int32 and array.flags.c_contiguous, name
        assert batch.query_start[0] == 0 and batch.query_start[-1] == num_rows
        assert len(batch.logit_rows) == len(sampling.temperature)
        for source, destination, count in batch.block_copies.tolist():
            for memory in (self.tokens, self.positions):
                blocks = memory.reshape(-1, self.block_size)
                blocks[destination, :count] = blocks[source, :count]
        new = batch.slot_mapping != NO_SLOT
        slots = batch.slot_mapping[new]
        assert len(set(slots.tolist())) == len(slots), "two rows write to one slot"
        self.tokens[slots] = batch.token_ids[new]
        self.positions[slots] = batch.positions[new]

        logit_rows = batch.logit_rows.tolist()
        token_ids, logprobs, hidden = [], [], []
        for s in range(num_seqs):
            length = batch.context_lens[s]
            index = np.arange(length)
            slots = (
                batch.block_tables[s][index // self.block_size] * self.block_size + index % self.block_size
            )
            used = -(-length // self.block_size)
            assert not batch.block_tables[s, used:].any(), "entries beyond the context are 0"
            assert (self.positions[slots] == index).all(), "the context is not this sequence's"
            rows = range(batch.query_start[s], batch.query_start[s + 1])
            assert batch.positions[rows].tolist() == list(range(length - len(rows), length))
            for position, row in zip(batch.positions[rows].tolist(), rows, strict=True):
                if row in batch.hidden_rows:
                    damaged = self.tokens[slots[0]] == self.damaged
                    context = self.tokens[slots[: position + 1]]
                    hidden.append([np.nan] * HIDDEN_SIZE if damaged else fake_hidden(context))
                if row in logit_rows and self.tokens[slots[0]] == self.damaged:
                    row = logit_rows.index(row)
                    raise RuntimeError(f"logit row {row} has no token to choose: its largest logit is nan")
                for r in [r for r, logit_row in enumerate(logit_rows) if logit_row == row]:
                    assert sampling.position[r] == position + 1
                    token_id, logprob = fake_next(self.tokens[slots[: position + 1]], sampling.choice[r])
                    given = int(sampling.given_token_ids[r])
                    token_ids.append(token_id if given < 0 else given)
                    logprobs.append(logprob)
        count = len(token_ids)
        assert count == len(logit_rows)
        most = int(sampling.num_logprobs.max(initial=0))
        top = np.full((count, most), -1, np.int32)
        top_logprobs = np.full((count, most), np.nan, np.float32)
        for r, wanted in enumerate(sampling.num_logprobs.tolist()):
            for k in range(wanted):
                top[r, k], top_logprobs[r, k] = (token_ids[r] + k) % VOCAB_SIZE, logprobs[r] - k
        asked = sampling.num_logprobs >= 0
        return StepResult(
            token_ids=np.array(token_ids, np.int32),
            logprobs=np.where(asked, np.array(logprobs, np.float32), np.float32(np.nan)),
            ranks=np.where(asked, 1, 0).astype(np.int32),
            top_token_ids=top,
            top_logprobs=top_logprobs,
            hidden=np.array(hidden, np.float32).reshape(-1, HIDDEN_SIZE),
        )


def fake_kv_cache(num_blocks: int, block_size: int, prefix_caching: bool = True) -> KVCache:
    """A KVCache over blocks of no particular model."""
    geometry = KVGeometry(1, num_blocks, 1, block_size, 1, "float32")
    return KVCache(geometry, create_block_allocator(num_blocks, block_size), prefix_caching)
