"""IncrementalDetokenizer: the text of one sequence while its tokens arrive, and where it stops.

Three stages, each holding back only what is not certain yet:

    token id ─► bytes ─► characters (part of one waits) ─► text (what may become a stop string waits)

Knows nothing of end tokens, ``stop_token_ids`` and ``max_tokens``: the engine pushes the tokens whose text
counts, and says when it is finished.
"""

import codecs
from collections.abc import Iterable, Sequence
from functools import lru_cache

from minivllm.sampling_params import SamplingParams
from minivllm.text.vocabulary import Tokenizer


class IncrementalDetokenizer:
    """Owner of one sequence's output text.

    The pieces that ``push`` and ``finish`` return, joined, are ``tokenizer.decode`` of all tokens pushed,
    cut at the stop string that was found, if any, and without a character that the end leaves unfinished.
    The time for a token does not grow with the text.

    Args:
        prompt_token_ids: decides only whether the output continues a text or begins one.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Iterable[int], params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_text_start = tokenizer.strips_leading_space and not any(
            tokenizer.token_bytes(token_id)
            for token_id in prompt_token_ids
            if token_id not in tokenizer.special_ids
        )
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._min_tokens = params.min_tokens
        self._pieces: list[str] = []
        self._finished = False
        self.num_tokens = 0  #: tokens pushed, up to and with the one that completed a stop string

    @property
    def stopped(self) -> str | None:
        """The stop string that was found; nothing that is pushed after it has an effect."""
        return self._stops.found if self._stops else None

    @property
    def text(self) -> str:
        """All pieces returned so far, joined."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next output tokens and return the text that is certain now: perhaps none.

        A token that completes a stop string is the last that is taken: see ``num_tokens`` and ``stopped``.
        Occurrences that end before ``min_tokens`` tokens are text like any other.
        """
        if self._finished:
            raise ValueError("push after finish")
        piece = ""
        for token_id in token_ids:
            if self.stopped is not None:
                break
            self.num_tokens += 1
            piece += self._certain(self._decoder.decode(self._bytes(token_id)))
        return self._returned(piece)

    def finish(self) -> str:
        """No more tokens will come: return what was held back, but no part of a character."""
        held_back = not self._finished and self._stops is not None and self.stopped is None
        self._finished = True
        return self._returned(self._stops.release()) if held_back and self._stops else ""

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._skipped:
            return b""
        data = self._tokenizer.token_bytes(token_id)
        if self._at_text_start and data:
            self._at_text_start = False
            return data.removeprefix(b" ")
        return data

    def _certain(self, text: str) -> str:
        """What may be returned now that ``text`` has been decoded."""
        if not self._stops:
            return text
        return self._stops.feed(text, may_stop=self.num_tokens >= self._min_tokens)

    def _returned(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece


class StopStrings:
    """Finds the first of some strings in a text that arrives in pieces, and cuts the text there.

    Of the occurrences complete after a piece, the one that starts first counts; of those that start together,
    the one of the string given first. Held back is the longest end of the text that begins a stop string.

    Args:
        stops: not empty, and no empty string among them.
        include: the text is cut after the stop string, not before it.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = stops
        self._include = include
        self._matched = [0] * len(stops)  # for each: how many of its characters the text's end matches
        self._held = ""  # decoded, not returned
        self.found: str | None = None  #: the stop string that ended the text

    def feed(self, text: str, may_stop: bool) -> str:
        """Take the next piece of text and return what is certain.

        Args:
            may_stop: whether an occurrence that ends in this piece ends the text.
        """
        text_before = len(self._held)
        self._held += text
        best: tuple[int, int, str] | None = None  # start in _held, index of the string, the string
        for index, stop in enumerate(self._stops):
            failure = failure_table(stop)
            matched = self._matched[index]
            ends = None
            for place, character in enumerate(text):
                while matched and (matched == len(stop) or stop[matched] != character):
                    matched = failure[matched]
                if stop[matched] == character:
                    matched += 1
                if matched == len(stop) and ends is None:
                    ends = text_before + place + 1
            # A complete match that does not count may still overlap with the beginning of one that will.
            self._matched[index] = failure[matched] if matched == len(stop) else matched
            if ends is not None and may_stop and (best is None or ends - len(stop) < best[0]):
                best = ends - len(stop), index, stop
        if best is not None:
            start, _, self.found = best
            certain = self._held[: start + len(self.found) if self._include else start]
            self._held = ""
            return certain
        keep = 0 if self._include else max(self._matched)
        cut = len(self._held) - keep
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain

    def release(self) -> str:
        """Return what was held back, since nothing will follow."""
        certain, self._held = self._held, ""
        return certain


@lru_cache(maxsize=4096)
def failure_table(pattern: str) -> tuple[int, ...]:
    """For each n: the length of the longest proper prefix of ``pattern[:n]`` that is also its suffix.

    (Knuth, Morris and Pratt, "Fast pattern matching in strings", 1977.)
    """
    table = [0, 0]
    matched = 0
    for character in pattern[1:]:
        while matched and pattern[matched] != character:
            matched = table[matched]
        if pattern[matched] == character:
            matched += 1
        table.append(matched)
    return tuple(table)
