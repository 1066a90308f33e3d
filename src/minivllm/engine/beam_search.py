"""BeamSearch: which beams of a request survive a step, and which hypotheses it answers with in the end.

    beams, best first         likeliest next tokens          next beams
      "the cat"  -1.2   ──►   sat -0.3   ran -1.9     ──►     "the cat sat"  -1.5
      "a dog"    -1.4   ──►   ran -0.9   .   -0.4             "a dog ran"    -2.3
                                           └─ an end token: a hypothesis, scored by its length

The rules are those of transformers' ``generate(num_beams=...)``, so that both find the same texts; scores are
float32 as there. Knows nothing of blocks and steps: it is given the beams' rows, and says who goes on.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from minivllm.batch import StepResult
from minivllm.sampling_params import BeamSearchParams
from minivllm.sequence import FinishReason, Sequence


@dataclass(frozen=True)
class Hypothesis:
    """A text that the search may answer with."""

    token_ids: list[int]  #: of the output
    cumulative_logprob: float
    finish_reason: FinishReason


class BeamSearch:
    """Owner of the scores of one request's beams, and of the hypotheses found so far.

    Args:
        params: the request's.
        end_token_ids: tokens that end a hypothesis.
        num_prompt_tokens: of the prompt.
        max_num_tokens: prompt and output tokens, at most.
    """

    def __init__(
        self,
        params: BeamSearchParams,
        end_token_ids: frozenset[int],
        num_prompt_tokens: int,
        max_num_tokens: int,
    ) -> None:
        self.hypotheses: list[Hypothesis] = []  #: at most ``beam_width``, the best first
        self._params = params
        self._end_token_ids = end_token_ids
        self._num_prompt_tokens = num_prompt_tokens
        self._max_length = max_num_tokens - num_prompt_tokens
        self._scores = [np.float32(0)]  # of the beams

    def extend(self, beams: Seq[Sequence], rows: Seq[int], result: StepResult) -> list[tuple[Sequence, int]]:
        """Choose the next beams by a step's logprobs: the parent and the token of each, the best first.

        Empty: the search is over.

        Args:
            beams: all of them, in the order of the last answer; at first the one that has the prompt.
            rows: the rows of ``result`` that have their likeliest next tokens, ``num_candidates`` or more.
        """
        width, most = self._params.beam_width, self.num_candidates
        logprobs = result.top_logprobs[rows, :most] + np.array(self._scores)[:, None]  # [beams, candidates]
        order = np.argsort(-logprobs, axis=None, kind="stable")[:most]  # equals by beam, then by token id
        length = beams[0].num_output_tokens + 1
        at_end = length >= self._max_length
        children: list[tuple[Sequence, int]] = []
        scores: list[np.float32] = []
        for place, (index, rank) in enumerate(zip(*np.unravel_index(order, logprobs.shape), strict=True)):
            score, token_id = logprobs[index, rank], int(result.top_token_ids[rows[index], rank])
            if at_end or token_id in self._end_token_ids:
                if place < width:
                    self._add(score, beams[index], token_id, length)
            elif len(children) < width:
                children.append((beams[index], token_id))
                scores.append(score)
        self._scores = scores
        return children if children and self._may_improve(length) else []

    @property
    def num_candidates(self) -> int:
        """Continuations that are looked at in a step: so many that ``beam_width`` of them go on."""
        return self._params.beam_width * max(2, 1 + len(self._end_token_ids))

    def interrupt(self, beams: Seq[Sequence], reason: FinishReason) -> None:
        """End the search before its time: its answers are the beams as they are."""
        self.hypotheses = [
            Hypothesis(beam.token_ids[self._num_prompt_tokens :], float(score), reason)
            for beam, score in zip(beams, self._scores, strict=True)
        ]

    def _add(self, logprob: np.float32, beam: Sequence, token_id: int, length: int) -> None:
        """Keep a finished text, if it is among the best ones."""
        output = [*beam.token_ids[self._num_prompt_tokens :], token_id]
        reason: FinishReason = "stop" if token_id in self._end_token_ids else "length"
        self.hypotheses.append(Hypothesis(output, float(logprob), reason))
        self.hypotheses.sort(key=self._score, reverse=True)  # stable: of equals, the older first
        del self.hypotheses[self._params.beam_width :]

    def _may_improve(self, length: int) -> bool:
        """Whether the search goes on: the best beam may still beat the worst hypothesis.

        For ``early_stopping`` "never" and a positive penalty the longest texts score best, else those of
        this length: with False that is a heuristic.
        """
        if len(self.hypotheses) < self._params.beam_width:
            return True
        if self._params.early_stopping is True:
            return False
        if self._params.early_stopping == "never" and self._params.length_penalty > 0:
            length = self._max_length
        return self._penalised(self._scores[0], length) > self._score(self.hypotheses[-1])

    def _score(self, hypothesis: Hypothesis) -> float:
        return self._penalised(np.float32(hypothesis.cumulative_logprob), len(hypothesis.token_ids))

    def _penalised(self, logprob: np.float32, length: int) -> float:
        return float(logprob / np.float32(length**self._params.length_penalty))
