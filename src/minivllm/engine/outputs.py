"""What a request gives back, with vLLM's names.

Outputs are made for every token, so they are not frozen: that would take four times as long, 5 µs a token.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minivllm.sequence import FinishReason


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token under the raw logits (before penalties and temperature)."""

    logprob: float
    rank: int  #: 1 = the likeliest
    decoded_token: str | None  #: None without a tokenizer


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt: whole, or, when streaming, what is new since the last output."""

    index: int
    text: str
    """Without the token or string that ended it, unless ``include_stop_str_in_output``. Empty without a
    tokenizer. A streamed piece never ends within a character, nor within what may become a stop string.
    U+FFFD stands for bytes that are no UTF-8, whatever follows them; the first bytes of a character that the
    end of the answer (as max_tokens) leaves unfinished are left out, in a stream as in a whole text."""
    token_ids: list[int]  #: all generated tokens, the one that ended it included
    cumulative_logprob: (
        float | None
    )  #: sum over all generated tokens so far; None unless logprobs were asked for
    logprobs: list[dict[int, Logprob]] | None
    """For each token of ``token_ids``: the chosen one first, then the likeliest ones, by token id."""
    finish_reason: FinishReason | None = None
    """"stop": an end token, stop token or stop string; "length": max_tokens or max_model_len; "abort";
    "error": the model failed. None while it goes on."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None: an end token, or its form was complete. After an
    "error": why it could not go on in its form, where that is the reason."""

    @property
    def finished(self) -> bool:
        """Nothing more will come."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The answer to one request: whole, or, when streaming, what is new since the last output."""

    request_id: str
    prompt: str | None  #: None if it was given as token ids
    prompt_token_ids: list[int]  #: a list that all pieces of a stream share: not to be changed
    outputs: list[CompletionOutput]
    """By ``index``, one for each of the ``n``; in a stream: those with news. Of a beam search: the best
    first, once it is over."""
    finished: bool  #: all of them are
    num_cached_tokens: int  #: prompt tokens that were taken from the prefix cache
    seed: int  #: the request's, or the one derived for it: giving it again repeats the answer
    admitted_at: float | None = None  #: ``time.monotonic()`` when it left the queue; None: it never did
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each token of the prompt, if they were asked for: its logprob, then those of the likeliest, by
    token id; None for the first. A stream has them in its first piece."""
    embedding: npt.NDArray[np.float32] | None = None
    """[hidden_size], of an embedding that is complete; ``outputs`` then has one, without tokens."""

    @property
    def num_tokens(self) -> int:
        """Generated tokens, over all ``outputs``."""
        return sum([len(completion.token_ids) for completion in self.outputs])
