"""Tokenizer: text to token ids and back, whatever file it was read from.

Encoding is a function of the file's kind. Decoding is one rule for all: every token stands for some
bytes, a text is their concatenation, read as UTF-8. So a stream needs no window of earlier tokens, and
the pieces of a stream are the whole by construction.

Knows nothing of models, of their end tokens (``Checkpoint.eos_token_ids``), or of chat.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import tokenizers

from minivllm.errors import ModelError, RequestError, shown

#: More token ids than any vocabulary has; a file that claims more is malformed.
MAX_VOCAB_SIZE = 2**24

Encoder = Callable[[str, bool], list[int]]  #: (text, add_special_tokens) → token ids


class Tokenizer:
    """One vocabulary, immutable and safe to share between threads.

    Args:
        encode: text → token ids; may assume well-formed Unicode.
        token_bytes: for each id the bytes it stands for; empty for ids that stand for nothing.
        special_ids: tokens that are not text (begin, end, roles …).
        strips_leading_space: a text begins with one space more than it should (SentencePiece).
        shrinks: in how many bytes of a text one byte of its tokens may originate, where encoding normalises;
            None: in any number.
    """

    def __init__(
        self,
        encode: Encoder,
        token_bytes: Sequence[bytes],
        *,
        special_ids: Iterable[int] = (),
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        chat_template: str | None = None,
        strips_leading_space: bool = False,
        shrinks: int | None = 1,
    ) -> None:
        self._encode = encode
        self._token_bytes = tuple(token_bytes)
        self.special_ids = frozenset(special_ids)
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.chat_template = chat_template
        self.strips_leading_space = strips_leading_space
        #: Bytes of text (UTF-8) that one token can stand for, at most; None: any number.
        self.max_token_bytes = (
            None if shrinks is None else shrinks * max(map(len, self._token_bytes), default=0)
        )

    @property
    def vocab_size(self) -> int:
        """The highest token id + 1."""
        return len(self._token_bytes)

    @property
    def bos_token(self) -> str:
        """The text of the begin token, as chat templates want it; empty if there is none."""
        return "" if self.bos_token_id is None else self.token_text(self.bos_token_id)

    @property
    def eos_token(self) -> str:
        """The text of the end token; empty if there is none."""
        return "" if self.eos_token_id is None else self.token_text(self.eos_token_id)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. Special tokens spelled out in it ("<|im_end|>") become their ids.

        Args:
            add_special_tokens: put the begin token first, where the model wants one. False for a rendered
                chat template, which spells it out.

        Raises:
            RequestError: the text is not Unicode, or has a character that the vocabulary cannot express.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt is not valid Unicode: character {error.start} is a lone surrogate, "
                f"U+{ord(text[error.start]):04X}",
                "prompt",
            ) from None
        return self._encode(text, add_special_tokens)

    def decode(
        self, token_ids: Iterable[int], skip_special_tokens: bool = True, *, continues_text: bool = False
    ) -> str:
        """The text of ``token_ids``; ids that the vocabulary doesn't know stand for nothing.

        Ill-formed UTF-8 becomes U+FFFD, one for each maximal ill-formed part, as the Unicode standard
        recommends (section 3.9).

        Args:
            continues_text: the tokens follow other text, so a leading space is part of it.
        """
        skipped = self.special_ids if skip_special_tokens else ()
        data = b"".join(self.token_bytes(token_id) for token_id in token_ids if token_id not in skipped)
        if self.strips_leading_space and not continues_text:
            data = data.removeprefix(b" ")
        return data.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for: perhaps a part of a character only."""
        return self._token_bytes[token_id] if 0 <= token_id < len(self._token_bytes) else b""

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, with U+FFFD for parts of characters."""
        return self.token_bytes(token_id).decode(errors="replace")


def backend_encoder(backend: tokenizers.Tokenizer) -> Encoder:
    """The encoder of a tokenizer of the ``tokenizers`` library."""

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        return backend.encode(text, add_special_tokens=add_special_tokens).ids

    return encode


def special_token_frame(
    bos: tuple[str, int] | None, eos: tuple[str, int] | None
) -> tokenizers.processors.TemplateProcessing:
    """The post-processor that puts the begin token first and the end token last, where they are given."""
    tokens = [token for token in (bos, eos) if token]
    single = [*([bos[0]] if bos else []), "$A", *([eos[0]] if eos else [])]
    return tokenizers.processors.TemplateProcessing(single=single, special_tokens=tokens)


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2), character → byte.

    Printable bytes of Latin-1 stand for themselves; the others are numbered from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


@lru_cache(maxsize=1)
def _byte_translation() -> dict[int, str]:
    """For ``str.translate``: the alphabet's characters to Latin-1, which is the bytes; others out of it."""
    outside = dict.fromkeys(range(0x100), "\uffff")
    return outside | {ord(character): chr(byte) for character, byte in byte_alphabet().items()}


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a token spelled in the byte alphabet; of any other token, its UTF-8."""
    try:
        return token.translate(_byte_translation()).encode("latin-1")
    except UnicodeEncodeError:
        return utf8(token)


def sentencepiece_bytes(token: str) -> bytes:
    """The bytes of a SentencePiece token: "▁" is a space, "<0x0A>" the byte 10."""
    byte = byte_token(token)
    return bytes([byte]) if byte is not None else utf8(token.replace("▁", " "))


def byte_token(token: str) -> int | None:
    """The byte that a token of the form "<0x0A>" stands for; None for any other token."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


def utf8(token: str) -> bytes:
    """The token's UTF-8.

    Raises:
        ModelError: it holds a lone surrogate.
    """
    try:
        return token.encode()
    except UnicodeEncodeError:
        raise ModelError(f"the tokenizer's token {shown(token)} is not valid Unicode") from None


def decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, object]]:
    """The steps by which ``backend`` turns tokens into text, as tokenizer.json describes them."""
    if backend.decoder is None:
        return []
    step = json.loads(backend.decoder.__getstate__())
    return list(step["decoders"]) if step["type"] == "Sequence" else [step]
