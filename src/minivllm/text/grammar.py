"""Grammars: from the form that an answer must have to the tokens that may come next in it.

    StructuredOutputsParams ─► GrammarCompiler ─► Grammar ─► a Matcher for each answer ─► masks

llguidance does the parsing; here it is given the model's vocabulary, and kept within bounds of time and
memory: what a client sends is not trusted. A grammar speaks of bytes, and so do the tokens
(``Tokenizer.token_bytes``), but for special ones, which are no text. Knows nothing of models and steps.
"""

import json
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from minivllm.errors import RequestError
from minivllm.structured_outputs import StructuredOutputsParams
from minivllm.text.vocabulary import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_GBNF_LENGTH = 2**14  #: characters: the time to translate GBNF may grow with their square
MAX_EXPECTED = 256  #: characters of a text without alternatives that are given the model's own tokens

#: How llguidance is to take JSON schemas. Between the parts of a JSON text there is nothing, a space, or
#: line breaks and indentation: models that are not sure how to go on would fill an answer with white space
#: if there were no end to it. Keywords that it does not implement are refused.
JSON_OPTIONS: Any = {"whitespace_pattern": r" |\n{1,2}[ \t]{0,20}", "lenient": False}

#: Bounds of the time that a mask takes, and of memory, below llguidance's own; forms that people ask for are
#: far from them. An answer whose grammar exceeds one on its way ends there.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_items_in_row": 600,  # a schema has some for each optional property, an ambiguous grammar any number
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}

Mask = npt.NDArray[np.uint32]


class GrammarCompiler:
    """Owner of a vocabulary as llguidance has it. Threads may share it.

    Args:
        tokenizer: the model's.
        vocab_size: of the model, which may have more tokens than the tokenizer knows.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None  # made for the first grammar: it takes a while

    def compile(self, form: StructuredOutputsParams) -> "Grammar":
        """The grammar of a form. It may take a second; nobody else is held up, whatever it is.

        Raises:
            RequestError: the form is malformed or too complex, asks for what is not implemented, or has no
                text that the vocabulary could express.
        """
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = _vocabulary(self._tokenizer, self._vocab_size)
        return Grammar(_matcher(self._vocabulary, form), self._vocab_size)


class Grammar:
    """A compiled form, from which answers begin.

    They share what llguidance keeps of it, and so its limits: strangers are not to have one Grammar.
    """

    def __init__(self, matcher: "LLMatcher", vocab_size: int) -> None:
        self._matcher = matcher  # at the beginning, where it stays
        self._vocab_size = vocab_size
        first = Matcher(matcher, frozenset(), vocab_size)
        first.write_mask(np.empty(first.num_words, np.uint32))
        if first.failure is not None:
            raise _refusal(first.failure)

    def matcher(self, end_token_ids: frozenset[int]) -> "Matcher":
        """Of a new answer, which these tokens may end."""
        return Matcher(self._matcher.deep_copy(), end_token_ids, self._vocab_size)


class Matcher:
    """Owner of the place that one answer has reached in its grammar."""

    def __init__(self, matcher: "LLMatcher", end_token_ids: frozenset[int], vocab_size: int) -> None:
        self.complete = False  #: nothing can follow
        self.failure: str | None = None  #: why no token can be drawn any more, although it is not complete
        self.num_words = _num_words(vocab_size)  #: of a mask
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = np.zeros(self.num_words, np.uint32)
        for token_id in end_token_ids:
            self._ends[token_id // 32] |= np.uint32(1 << token_id % 32)
        self._has_ends = bool(end_token_ids)

    def write_mask(self, mask: Mask) -> None:
        """Write which tokens may come next: the end tokens exactly where the grammar can end.

        After a failure every token may, so that something is drawn, which is not to be used.

        Args:
            mask: [num_words] uint32, contiguous; see ``minivllm.batch.SamplingBatch.masks``.
        """
        can_end = self._write_text_mask(mask)
        if can_end:
            mask |= self._ends
        if self.failure is None and not mask.any():
            self.failure = "there is no token in the vocabulary that could come next"
        if self.failure is not None:
            mask.fill(0xFFFFFFFF)

    def accept(self, token_id: int) -> None:
        """Take the token that was drawn, which is not an end token."""
        if self.failure is None and not self._matcher.consume_token(token_id):
            self._fail()
        if self.failure is None:
            self.complete = self._matcher.is_stopped() or (not self._has_ends and self._can_only_end())

    def _write_text_mask(self, mask: Mask) -> bool:
        """The same without end tokens. Returns whether the grammar can end here."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            self._fail()
        word, bit = divmod(self._vocab_size, 32)  # of the token that says so
        can_end = bool(int(mask[word]) >> bit & 1)
        mask[word] &= np.uint32((1 << bit) - 1)
        mask[word + 1 :] = 0
        return can_end

    def _can_only_end(self) -> bool:
        mask = np.empty(self.num_words, np.uint32)
        return self._write_text_mask(mask) and not mask.any()

    def _fail(self) -> None:
        self.failure = _first_line(self._matcher.get_error()) or "it does not go on"


# llguidance is told of two tokens more than the model has: one that says that the grammar can end here, for
# which each request has end tokens of its own, and one that stands for text that no token can express.


def _num_words(vocab_size: int) -> int:
    return (vocab_size + 2 + 31) // 32


class _Vocabulary:
    """The interface that llguidance has for tokenizers; it knows nothing of ours."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.eos_token_id = vocab_size
        self.tokens = [*map(tokenizer.token_bytes, range(vocab_size)), b"", b"<inexpressible>"]
        self.special_token_ids = [*tokenizer.special_ids.intersection(range(vocab_size)), vocab_size + 1]
        self.greedily: Any = None  # text → tokens, the longest first; set by whoever has it
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """The tokens that the model would expect for a text, where there is no other way to go on.

        Only the first of them come next, so the far end of a long text need not be what the model expects.
        """
        near, far = text[:MAX_EXPECTED], text[MAX_EXPECTED:]
        for encode in (self._encode, self.greedily):
            token_ids = [*encode(near), *(self.greedily(far) if far else [])]
            if b"".join([self.tokens[token_id] for token_id in token_ids]) == text.encode():
                return token_ids
        return [len(self.tokens) - 1]

    def _encode(self, text: str) -> list[int]:
        try:
            token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        except RequestError:
            return []
        return [] if self._tokenizer.special_ids.intersection(token_ids) else token_ids


def _vocabulary(tokenizer: Tokenizer, vocab_size: int) -> "LLTokenizer":
    from llguidance import LLTokenizer  # it takes 0.15 s, which only those who ask for a form are to pay

    wrapper = _Vocabulary(tokenizer, vocab_size)
    vocabulary = LLTokenizer(wrapper)  # type: ignore[arg-type]
    wrapper.greedily = vocabulary.greedy_tokenize
    return vocabulary


def _matcher(vocabulary: "LLTokenizer", form: StructuredOutputsParams) -> "LLMatcher":
    from llguidance import LLMatcher, LLParserLimits, grammar_from

    if form.grammar is not None and "::=" in form.grammar and len(form.grammar) > MAX_GBNF_LENGTH:
        raise _refusal(
            f"a grammar in GBNF may have {MAX_GBNF_LENGTH:,} characters; Lark's notation may be longer"
        )
    try:
        if form.json is not None or form.json_object:
            schema = form.json if isinstance(form.json, str) else '{"type": "object"}'
            source = LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)
        elif form.regex is not None:
            source = LLMatcher.grammar_from_regex(form.regex)
        elif form.choice is not None:
            source = LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, form.choice)))
        else:
            source = grammar_from("grammar", form.grammar or "")
    except (ValueError, RecursionError) as error:
        raise _refusal(str(error)) from None
    matcher = LLMatcher(vocabulary, source, log_level=0, limits=LLParserLimits(**_LIMITS))
    if matcher.is_error():
        raise _refusal(matcher.get_error())
    return matcher


def _refusal(reason: str) -> RequestError:
    return RequestError(
        f"structured output is not possible in this form: {_first_line(reason)}", "structured_outputs"
    )


def _first_line(text: str) -> str:
    line = text.strip().split("\n")[0]
    return line if len(line) <= 300 else line[:300] + "…"
