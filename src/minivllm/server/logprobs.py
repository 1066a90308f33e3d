"""Logprobs in OpenAI's two shapes: a chat's list of tokens, and the parallel lists of a text completion."""

import codecs
from collections.abc import Sequence as Seq
from collections.abc import Set

from minivllm.engine.outputs import CompletionOutput, Logprob
from minivllm.server.responses import ChatLogprobs, CompletionLogprobs, PromptLogprobs, TopLogprob
from minivllm.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # OpenAI's stand-in for -infinity, which JSON does not have


def chat_logprobs(completion: CompletionOutput, tokenizer: Tokenizer, num_top: int) -> ChatLogprobs | None:
    """Of what is new in a choice; None if they were not asked for."""
    if completion.logprobs is None:
        return None
    return {
        "content": [
            {
                **_entry(token_id, logprobs[token_id], tokenizer),
                "top_logprobs": [
                    _entry(i, logprob, tokenizer) for i, logprob in _likeliest(logprobs, num_top)
                ],
            }
            for token_id, logprobs in zip(completion.token_ids, completion.logprobs, strict=True)
        ],
        "refusal": None,
    }


def prompt_logprobs(logprobs: Seq[dict[int, Logprob] | None]) -> PromptLogprobs:
    """As vLLM has them."""
    return [
        None
        if known is None
        else {
            str(token_id): {
                "logprob": _finite(logprob.logprob),
                "rank": logprob.rank,
                "decoded_token": logprob.decoded_token,
            }
            for token_id, logprob in known.items()
        }
        for known in logprobs
    ]


class CompletionLogprobsBuilder:
    """Owner of the place in a text, of which the offsets are told.

    Args:
        skipped: tokens that are not in the text.
        start: characters before the first token.
        continues_text: a space at the beginning is text, which is so wherever other text comes before.
        num_top: likeliest tokens to tell of.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skipped: Set[int],
        *,
        start: int,
        continues_text: bool,
        num_top: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._offset = start
        self._num_top = num_top
        self._strips = tokenizer.strips_leading_space and not continues_text
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_ids: Seq[int], logprobs: Seq[dict[int, Logprob] | None]) -> CompletionLogprobs:
        """Of the next tokens; None is for one that has nothing before it, as a prompt's first."""
        result: CompletionLogprobs = {
            "tokens": [self._text(token_id) for token_id in token_ids],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [self._pass(token_id) for token_id in token_ids],
        }
        for token_id, known in zip(token_ids, logprobs, strict=True):
            if known is None:
                result["token_logprobs"].append(None)
                result["top_logprobs"].append(None)
                continue
            told = _chosen_and_likeliest(token_id, known, self._num_top)
            result["token_logprobs"].append(_finite(known[token_id].logprob))
            result["top_logprobs"].append({self._text(i): _finite(logprob.logprob) for i, logprob in told})
        return result

    def _pass(self, token_id: int) -> int:
        """Go past the token; returns where it begins, which may be within a character."""
        data = b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id)
        if self._strips and data:
            self._strips = False
            data = data.removeprefix(b" ")
        if data and self._decoder.getstate()[0] and data[0] & 0xC0 != 0x80:
            self._decoder.reset()
            self._offset += 1  # the U+FFFD of a character that does not go on
        begin = self._offset
        self._offset += len(self._decoder.decode(data))
        return begin

    def _text(self, token_id: int) -> str:
        """Part of a character is spelled in bytes, so that two such tokens are not the same."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def joined(earlier: CompletionLogprobs | None, later: CompletionLogprobs) -> CompletionLogprobs:
    """Those of a text's beginning and of what follows."""
    if earlier is None:
        return later
    return {
        "tokens": earlier["tokens"] + later["tokens"],
        "token_logprobs": earlier["token_logprobs"] + later["token_logprobs"],
        "top_logprobs": earlier["top_logprobs"] + later["top_logprobs"],
        "text_offset": earlier["text_offset"] + later["text_offset"],
    }


def _entry(token_id: int, logprob: Logprob, tokenizer: Tokenizer) -> TopLogprob:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": _finite(logprob.logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _likeliest(logprobs: dict[int, Logprob], number: int) -> list[tuple[int, Logprob]]:
    """The likeliest tokens, the likeliest first. The chosen one is among them if it belongs there."""
    return sorted(((i, p) for i, p in logprobs.items() if p.rank <= number), key=lambda entry: entry[1].rank)[
        :number
    ]


def _chosen_and_likeliest(
    token_id: int, logprobs: dict[int, Logprob], number: int
) -> list[tuple[int, Logprob]]:
    """For text completions OpenAI has up to ``number`` + 1 tokens: the chosen one is always among them."""
    top = _likeliest(logprobs, number)
    return top if any(i == token_id for i, _ in top) else [*top, (token_id, logprobs[token_id])]


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
