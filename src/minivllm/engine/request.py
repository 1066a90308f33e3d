"""Request: what the engine keeps of a request that is not finished, and the outputs that it gives.

Knows nothing of blocks and queues.
"""

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minivllm.batch import StepResult
from minivllm.engine.beam_search import BeamSearch, Hypothesis
from minivllm.engine.output_builder import OutputBuilder, row_logprobs
from minivllm.engine.outputs import CompletionOutput, Logprob, RequestOutput
from minivllm.engine.pooling import Pooler
from minivllm.sampling_params import SamplingParams
from minivllm.sequence import FinishReason, Sequence, SequenceGroup
from minivllm.text.detokenizer import IncrementalDetokenizer
from minivllm.text.grammar import Matcher
from minivllm.text.tokenizer import Tokenizer


@dataclass(eq=False)
class Request:
    """Owner of what one request has to give back and has not given yet."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    group: SequenceGroup
    params: SamplingParams
    builders: list[OutputBuilder]  #: by choice; not used in a beam search
    matchers: list[Matcher | None]  #: by choice; None: its answer may have any form
    search: BeamSearch | None
    pooler: Pooler | None  #: of an embedding
    prompt_logprobs: list[dict[int, Logprob] | None] | None  #: as in RequestOutput; None once they are given
    tokenizer: Tokenizer | None
    seed: int
    stream: bool
    outbox: deque[RequestOutput]  #: where its outputs go; its owner is known by it, as request ids are reused
    embedding: npt.NDArray[np.float32] | None = None  #: once it is complete

    def matcher(self, sequence: Sequence, position: int) -> Matcher | None:
        """What a sequence's token at this position must match, unless it is there already."""
        return self.matchers[sequence.choice] if position >= len(sequence.token_ids) else None

    def match(self, sequence: Sequence, token_id: int) -> tuple[FinishReason, str | None] | None:
        """Let a sequence's matcher know its new token. If that ends it: how, and if by an error, by which."""
        matcher = self.matchers[sequence.choice]
        if matcher is None:
            return None
        if matcher.failure is None and sequence.finish_reason != "stop":
            matcher.accept(token_id)
        if matcher.failure is not None:
            return "error", matcher.failure
        return ("stop", None) if matcher.complete else None

    def score_prompt(self, position: int, result: StepResult, row: int) -> None:
        """Take the logprobs of one token of the prompt, which ``result`` has in ``row``."""
        assert self.prompt_logprobs is not None, "they are given only when they are complete"
        wanted = self.params.prompt_logprobs or 0
        token_id = self.prompt_token_ids[position]
        self.prompt_logprobs[position] = row_logprobs(token_id, result, row, wanted, self.tokenizer)

    def pool(self, sequence: Sequence, hidden: npt.NDArray[np.float32]) -> None:
        """Take hidden states of the prompt, those of the tokens computed last.

        With the last of them the embedding is there; if not, the model has failed.
        """
        assert self.pooler is not None, "nobody else asks for hidden states"
        self.pooler.add(hidden, begins=sequence.num_computed_tokens == len(hidden))
        if sequence.finish_reason is not None:
            self.embedding = self.pooler.embedding()

    def output(self) -> RequestOutput:
        """What it has not given yet. The answers of a beam search come all at once, when it is over."""
        prompt_logprobs = None
        if self.prompt_logprobs is not None and None not in self.prompt_logprobs[1:]:
            prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=self._news() if self.search is None else self._found(self.search.hypotheses),
            finished=not self.group.sequences,
            num_cached_tokens=self.group.num_cached_tokens or 0,
            seed=self.seed,
            admitted_at=self.group.admitted_at,
            prompt_logprobs=prompt_logprobs,
            embedding=self.embedding,
        )

    def _news(self) -> list[CompletionOutput]:
        return [builder.take() for builder in self.builders if builder.has_news]

    def _found(self, hypotheses: Seq[Hypothesis]) -> list[CompletionOutput]:
        completions = []
        for index, found in enumerate(hypotheses):
            text = ""
            if self.tokenizer is not None:
                detokenizer = IncrementalDetokenizer(self.tokenizer, self.prompt_token_ids, self.params)
                text = detokenizer.push(found.token_ids[: -1 if found.finish_reason == "stop" else None])
                text += detokenizer.finish()
            completions.append(
                CompletionOutput(
                    index=index,
                    text=text,
                    token_ids=found.token_ids,
                    cumulative_logprob=found.cumulative_logprob,
                    logprobs=None,
                    finish_reason=found.finish_reason,
                )
            )
        return completions
