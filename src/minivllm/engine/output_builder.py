"""OutputBuilder: from the tokens of one sequence to the CompletionOutputs that a client gets.

Knows nothing of other sequences, blocks or queues; that a stop string was found it only reports.
"""

from minivllm.batch import StepResult
from minivllm.engine.outputs import CompletionOutput, Logprob
from minivllm.sequence import Sequence
from minivllm.text.detokenizer import IncrementalDetokenizer
from minivllm.text.tokenizer import Tokenizer


class OutputBuilder:
    """Owner of what one sequence has to give back and has not given yet."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer | None) -> None:
        self._sequence = sequence
        self._tokenizer = tokenizer
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(tokenizer, sequence.token_ids, sequence.params)
        self._num_given = sequence.num_tokens  # leading tokens that need not be given any more: the prompt
        self._end_given = False
        self._text = ""
        asked = sequence.params.logprobs is not None
        self._logprobs: list[dict[int, Logprob]] | None = [] if asked else None
        self._cumulative: float | None = 0.0 if asked else None

    def add(self, token_id: int, result: StepResult, row: int) -> str | None:
        """Take the token just appended to the sequence, which ``result`` has in ``row``.

        Returns the stop string that it completed, if any.
        """
        if self._logprobs is not None and self._cumulative is not None:
            wanted = self._sequence.params.logprobs or 0
            logprobs = row_logprobs(token_id, result, row, wanted, self._tokenizer)
            self._logprobs.append(logprobs)
            self._cumulative += logprobs[token_id].logprob
        if self._detokenizer is None:
            return None
        params = self._sequence.params
        # At this point "stop" means that the token itself ended the sequence.
        if self._sequence.finish_reason != "stop" or params.include_stop_str_in_output:
            self._text += self._detokenizer.push((token_id,))
        return self._detokenizer.stopped

    @property
    def has_news(self) -> bool:
        """Whether there are tokens or an end that were not given yet."""
        sequence = self._sequence
        ended = sequence.finish_reason is not None
        return sequence.num_tokens > self._num_given or (ended and not self._end_given)

    def take(self) -> CompletionOutput:
        """Everything that was not given yet, and whether more will come."""
        sequence = self._sequence
        if self._detokenizer is not None and sequence.finish_reason is not None:
            self._text += self._detokenizer.finish()
        output = CompletionOutput(
            index=sequence.choice,
            text=self._text,
            token_ids=sequence.token_ids[self._num_given :],
            cumulative_logprob=self._cumulative,
            logprobs=self._logprobs,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )
        self._num_given = sequence.num_tokens
        self._end_given = output.finished
        self._text = ""
        self._logprobs = None if self._logprobs is None else []
        return output


def row_logprobs(
    token_id: int, result: StepResult, row: int, num_likeliest: int, tokenizer: Tokenizer | None
) -> dict[int, Logprob]:
    """A row's logprobs: of its token, then of the likeliest ones."""

    def entry(token_id: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, None if tokenizer is None else tokenizer.token_text(token_id))

    logprobs = {token_id: entry(token_id, float(result.logprobs[row]), int(result.ranks[row]))}
    top = zip(result.top_token_ids[row].tolist(), result.top_logprobs[row].tolist(), strict=True)
    for rank, (top_id, logprob) in zip(range(1, num_likeliest + 1), top, strict=False):
        if top_id >= 0 and top_id != token_id:
            logprobs[top_id] = entry(top_id, logprob, rank)
    return logprobs
