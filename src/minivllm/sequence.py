"""Sequence: the tokens of one choice of a request, and how far they are computed. SequenceGroup: a request's.

SequenceGroup, 3 samples       prompt         output
  choice 0                   [ ·········· ]─┬─[ a b c d …     the first one computes the prompt; when it
  choice 1                                  ├─[ k l m n …     yields, all draw from its row, the others
  choice 2                                  └─[ x y z w …     as forks of it
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Literal, NamedTuple

from minivllm.sampling_params import Pooling, SamplingParams

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

    seq_id: int  #: ordinal of its request: the lower, the older
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
    num_candidates: int | None = None  #: of a beam: likeliest tokens to ask for, in place of params.logprobs
    pooling: Pooling | None = None
    """Of an embedding: it yields no token, but the hidden states of its prompt, and is finished with it."""
    namespace: bytes = b""  #: of the prefix index: only within it are cached prefixes found
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0  #: leading tokens whose K and V are in the cache
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

    @property
    def is_beam(self) -> bool:
        """Whether it belongs to a beam search, which looks at candidates and draws nothing."""
        return self.num_candidates is not None

    @property
    def scores_prompt(self) -> bool:
        """Whether the logprobs of its prompt are asked for, and not complete before it yields a token."""
        return self.params.prompt_logprobs is not None and self.num_output_tokens == 0

    @property
    def needs_every_row(self) -> bool:
        """Whether all of its prompt is to be computed, whatever the cache has: every row gives something."""
        return self.scores_prompt or self.pooling == "mean"

    def append(self, token_id: int) -> None:
        """Append a generated token, whose K and V are yet to be computed."""
        self.token_ids.append(token_id)
        self.output_counts[token_id] = self.output_counts.get(token_id, 0) + 1

    def fork(self, choice: int = 0) -> "Sequence":
        """Another one with the same tokens, for that choice. It has no blocks yet."""
        return replace(
            self,
            choice=choice,
            token_ids=self.token_ids.copy(),
            output_counts=self.output_counts.copy(),
            status=SequenceStatus.WAITING,
            num_computed_tokens=0,
        )


@dataclass(eq=False)
class SequenceGroup:
    """The sequences of one request, its samples or beams, which run, wait and are preempted together.

    They are as long as each other, and draw in the same steps. A single answer is a group of one.
    """

    sequences: list[Sequence]  #: those that are not finished, the one that computes the prompt first
    width: int = 1  #: sequences that it runs, or will run once its prompt is computed
    priority: int = 0  #: lower ones first, then older ones
    num_cached_tokens: int | None = None  #: taken from the prefix cache when first admitted; None before that
    admitted_at: float | None = None  #: ``time.monotonic()`` when first admitted

    @property
    def rank(self) -> tuple[int, int]:
        """Its place in every queue: the lower goes first."""
        return self.priority, self.sequences[0].seq_id

    @property
    def num_running(self) -> int:
        """Of its sequences, those that hold blocks."""
        return sum(sequence.status is SequenceStatus.RUNNING for sequence in self.sequences)

    @property
    def begun(self) -> bool:
        """Whether it has its first tokens; until then only the first sequence is computed."""
        first = self.sequences[0]
        return len(first.token_ids) > first.num_prompt_tokens

    @property
    def num_sure_tokens(self) -> int:
        """Leading tokens that each of its running sequences computes whatever becomes of the others.

        The last one has to wait until they draw together.
        """
        return self.sequences[0].num_tokens - (self.begun and self.width > 1)


class ScheduledSequence(NamedTuple):
    """A sequence's part in one step: its next ``num_tokens`` uncomputed tokens."""

    sequence: Sequence
    num_tokens: int
    num_scored: int = 0  #: of its tokens, the leading ones whose successors in the prompt get logprobs
    draws: tuple[Sequence, ...] = ()
    """Those that draw a token from the row of its last token: itself; all samples of its group, if these are
    their first tokens; none, if more is to be computed before."""
    num_pooled: int = 0  #: of its tokens, the last ones whose hidden states go into its embedding


def logit_rows(plan: Iterable[ScheduledSequence]) -> tuple[list[Sequence], list[int]]:
    """For each of the ``logit_rows`` of a plan's Batch: whose token it yields, and the index of that token.

    Tokens of the prompt come before those that are drawn, as in the sequence.
    """
    sequences: list[Sequence] = []
    positions: list[int] = []
    for sequence, _, num_scored, draws, _ in plan:
        if num_scored:
            first = sequence.num_computed_tokens + 1
            sequences += [sequence] * num_scored
            positions += range(first, first + num_scored)
        for child in draws:
            sequences.append(child)
            positions.append(len(child.token_ids))
    return sequences, positions
