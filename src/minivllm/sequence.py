"""Sequence: the tokens of one choice of one request, and how far they are computed."""

from dataclasses import dataclass, field
from enum import Enum, auto

from minivllm.sampling_params import SamplingParams


class SequenceStatus(Enum):
    """Where a sequence stands. Only the scheduler changes it."""

    WAITING = auto()  #: holds no blocks
    RUNNING = auto()
    FINISHED = auto()  #: holds no blocks


@dataclass(eq=False)
class Sequence:
    """Owner of a sequence's tokens and progress. Block tables are KVCache's, queues the scheduler's."""

    seq_id: int
    request_id: str
    token_ids: list[int]  #: prompt, then output
    num_prompt_tokens: int
    params: SamplingParams
    seed: int  #: the request's seed, or the one derived for it
    max_num_tokens: int  #: prompt + output, at most; the sequence finishes with "length" there
    choice: int = 0  #: index within its request
    eos_token_ids: tuple[int, ...] = ()  #: the model's end tokens
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0  #: leading tokens whose K and V are in the cache
    num_cached_tokens: int = 0  #: of these, taken from the prefix cache when it was admitted
    output_counts: dict[int, int] = field(default_factory=dict)  #: token id → occurrences in the output

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.token_ids)
