"""Sequence: the tokens of one choice of one request, and how far they are computed."""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal, NamedTuple

from minivllm.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class SequenceStatus(Enum):
    """Where a sequence stands. Only the scheduler changes it."""

    WAITING = auto()  #: holds no blocks
    RUNNING = auto()
    FINISHED = auto()  #: holds no blocks


@dataclass(eq=False)
class Sequence:
    """Owner of a sequence's tokens and progress. Block tables are KVCache's, queues the scheduler's.

    token_ids   [ prompt ............ | output ........ ]
                  0 ... num_computed_tokens ... num_tokens
                  in the cache         still to compute
    """

    seq_id: int  #: ordinal of arrival: the lower, the older
    request_id: str
    token_ids: list[int]  #: prompt, then output
    num_prompt_tokens: int
    params: SamplingParams
    seed: int  #: the request's seed, or the one derived for it
    max_num_tokens: int  #: prompt + output, at most; the sequence finishes with "length" there
    choice: int = 0  #: index within its request
    end_token_ids: frozenset[int] = frozenset()
    """Tokens that end it: the model's end tokens unless ``ignore_eos``, and ``params.stop_token_ids``.
    They may not be drawn before ``params.min_tokens``."""
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0  #: leading tokens whose K and V are in the cache
    num_cached_tokens: int | None = None  #: taken from the prefix cache when first admitted; None before that
    admitted_at: float | None = None  #: ``time.monotonic()`` when first admitted
    output_counts: dict[int, int] = field(default_factory=dict)  #: token id → occurrences in the output
    finish_reason: FinishReason | None = None  #: None until it is finished
    stop_reason: int | str | None = None  #: the stop token or stop string that ended it; None: an end token

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    def append(self, token_id: int) -> None:
        """Append a generated token, whose K and V are yet to be computed."""
        self.token_ids.append(token_id)
        self.output_counts[token_id] = self.output_counts.get(token_id, 0) + 1


class ScheduledSequence(NamedTuple):
    """A sequence's part in one step: its next ``num_tokens`` uncomputed tokens."""

    sequence: Sequence
    num_tokens: int
    yields_token: bool  #: the last of its tokens is computed, so that the next one can be drawn
