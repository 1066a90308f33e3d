"""The stream of a sequence's text, against decoding and cutting the whole at once."""

from pathlib import Path

import pytest
from helpers_text import answer_text, byte_level_backend, byte_level_metadata, sentencepiece_metadata
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.sampling_params import SamplingParams
from minivllm.text.detokenizer import IncrementalDetokenizer, StopStrings, failure_table
from minivllm.text.tokenizer import Tokenizer, load_tokenizer

BYTE_LEVEL = load_tokenizer("gguf", data=byte_level_metadata())
SENTENCEPIECE = load_tokenizer("gguf", data=sentencepiece_metadata())
CHARACTERS = load_tokenizer("chars", data={"itos": list("abcd é😀")})

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def stream(
    tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None, **params: object
) -> tuple[list[str], IncrementalDetokenizer]:
    """The piece that each token gives, and the last one that the end gives."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt or [], SamplingParams(max_tokens=None, **params))  # type: ignore[arg-type]
    pieces = [detokenizer.push([token_id]) for token_id in ids]
    return [*pieces, detokenizer.finish()], detokenizer


def expected_text(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    skipped = tokenizer.special_ids if skip else ()
    data = b"".join(tokenizer.token_bytes(token_id) for token_id in ids if token_id not in skipped)
    return answer_text(data.removeprefix(b" ") if tokenizer.strips_leading_space else data)


@settings(deadline=None)
@given(st.sampled_from([BYTE_LEVEL, SENTENCEPIECE, CHARACTERS]), st.data())
def test_pieces_joined_are_the_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Whatever the ids: ill-formed bytes, special tokens, ids beyond the vocabulary."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=20))
    for skip in (True, False):
        pieces, detokenizer = stream(tokenizer, ids, skip_special_tokens=skip)
        assert "".join(pieces) == detokenizer.text == expected_text(tokenizer, ids, skip)
        assert detokenizer.num_tokens == len(ids)


@settings(deadline=None)
@given(TEXT, TEXT)
def test_every_piece_is_whole_characters(prompt: str, text: str) -> None:
    """Tokens of single bytes: a character comes with its last byte, and not as U+FFFD before."""
    alphabet = {BYTE_LEVEL.token_bytes(i): i for i in range(BYTE_LEVEL.vocab_size - 1, -1, -1)}
    ids = [alphabet[bytes([byte])] for byte in text.encode()]
    pieces, _ = stream(BYTE_LEVEL, ids, BYTE_LEVEL.encode(prompt))
    expected = []
    for character in text:
        expected += [""] * (len(character.encode()) - 1) + [character]
    assert pieces == [*expected, ""]


@pytest.mark.parametrize("data", [b"\xf0\x9f\x98", b"a\xe6\xbc", b"\xc3", b"\xed\x9f"])
def test_unfinished_character_at_the_end_is_left_out(data: bytes) -> None:
    alphabet = {BYTE_LEVEL.token_bytes(i): i for i in range(BYTE_LEVEL.vocab_size)}
    for stop in ((), ("a\xe9",)):
        pieces, _ = stream(BYTE_LEVEL, [alphabet[bytes([byte])] for byte in data], stop=stop)
        assert "".join(pieces) == ("a" if data.startswith(b"a") else "")


@pytest.mark.parametrize("data", [b"\xff", b"\x80", b"\xe0\x80", b"\xf4\x90", b"\xc0"])
def test_bytes_that_no_character_has_are_replaced_even_at_the_end(data: bytes) -> None:
    alphabet = {BYTE_LEVEL.token_bytes(i): i for i in range(BYTE_LEVEL.vocab_size)}
    pieces, _ = stream(BYTE_LEVEL, [alphabet[bytes([byte])] for byte in data])
    assert "".join(pieces) == data.decode(errors="replace") != ""


def test_unfinished_characters_are_replaced_when_they_are_seen_to_be() -> None:
    alphabet = {BYTE_LEVEL.token_bytes(i): i for i in range(BYTE_LEVEL.vocab_size)}
    first_three = [alphabet[bytes([byte])] for byte in "😀".encode()[:3]]
    # The next byte shows that they will never be a character.
    assert stream(BYTE_LEVEL, [*first_three, alphabet[b"a"]])[0] == ["", "", "", "\ufffda", ""]


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["the", "cat", " ", "é", "漢字", "  x"]), max_size=6).map(" ".join), st.data()
)
def test_sentencepiece_output_goes_on_where_the_prompt_ends(text: str, data: st.DataObject) -> None:
    """The leading space belongs to the text unless the text begins there."""
    ids = SENTENCEPIECE.encode(text, add_special_tokens=False)
    cut = data.draw(st.integers(0, len(ids)))
    pieces, _ = stream(SENTENCEPIECE, ids[cut:], [1, *ids[:cut]])
    assert SENTENCEPIECE.decode(ids[:cut]) + "".join(pieces) == text


def test_a_stop_string_that_begins_within_a_token_and_spans_three() -> None:
    tokenizer = load_tokenizer("gguf", data=_with_tokens("Hello wor", "ld! ", "1!?", "23 more"))
    ids = list(range(tokenizer.vocab_size - 4, tokenizer.vocab_size))
    pieces, detokenizer = stream(tokenizer, ids, stop=["rld! 1"])
    assert pieces == ["Hello wo", "", "", "", ""]
    assert (detokenizer.stopped, detokenizer.num_tokens) == ("rld! 1", 3)
    pieces, detokenizer = stream(tokenizer, ids, stop=["rld! 1"], include_stop_str_in_output=True)
    assert pieces == ["Hello wor", "ld! ", "1", "", ""]
    pieces, detokenizer = stream(tokenizer, ids, stop=["rld! 13"])
    assert pieces == ["Hello wo", "", "rld! 1!?", "23 more", ""]
    assert detokenizer.stopped is None
    pieces, _ = stream(tokenizer, ids[:2], stop=["rld! 1"])
    assert pieces == ["Hello wo", "", "rld! "]


def _with_tokens(*texts: str) -> dict[str, object]:
    """The byte-level vocabulary, and tokens for these texts at its end."""
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] += texts
    metadata["tokenizer.ggml.token_type"] += [4] * len(texts)
    return metadata


def test_text_before_the_stop_string_in_the_same_token_is_kept() -> None:
    tokenizer = load_tokenizer("gguf", data=_with_tokens("answer.\n\nUser:"))
    pieces, detokenizer = stream(tokenizer, [tokenizer.vocab_size - 1] * 2, stop=["\n\n", "User:"])
    assert pieces == ["answer.", "", ""]
    assert (detokenizer.stopped, detokenizer.num_tokens) == ("\n\n", 1)


def test_several_tokens_at_once_end_with_the_one_that_completes_it() -> None:
    ids = CHARACTERS.encode("abcdab")
    detokenizer = IncrementalDetokenizer(CHARACTERS, [], SamplingParams(stop="cd"))
    assert detokenizer.push(ids) == "ab"
    assert (detokenizer.stopped, detokenizer.num_tokens) == ("cd", 4)
    assert detokenizer.push(ids) == detokenizer.finish() == detokenizer.finish() == ""
    with pytest.raises(ValueError, match="push after finish"):
        detokenizer.push(ids)


def test_a_stop_string_of_ill_formed_bytes_is_found() -> None:
    alphabet = {BYTE_LEVEL.token_bytes(i): i for i in range(BYTE_LEVEL.vocab_size)}
    pieces, detokenizer = stream(BYTE_LEVEL, [alphabet[b"a"], alphabet[b"\xff"]], stop="\ufffd")
    assert pieces == ["a", "", ""]
    assert detokenizer.stopped == "\ufffd"


SMALL = st.text("ab", min_size=1, max_size=5)


@settings(deadline=None, max_examples=500)
@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(SMALL, min_size=1, max_size=3, unique=True),
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
)
def test_stop_strings_against_searching_the_whole_text(
    pieces: list[str], stops: list[str], include: bool, min_tokens: int
) -> None:
    expected_text, expected_stop, expected_count = cut_by_search(pieces, stops, include, min_tokens)
    finder = StopStrings(stops, include)
    given_ = []
    count = 0
    for piece in pieces:
        count += 1
        given_.append(finder.feed(piece, may_stop=count >= min_tokens))
        if finder.found is not None:
            break
        so_far = "".join(pieces[:count])
        held = len(so_far) - len("".join(given_))
        assert held == (0 if include else longest_beginning(so_far, stops))
    if finder.found is None:
        given_.append(finder.release())
    assert ("".join(given_), finder.found, count) == (expected_text, expected_stop, expected_count)


def cut_by_search(
    pieces: list[str], stops: list[str], include: bool, min_tokens: int
) -> tuple[str, str | None, int]:
    """Search the whole text after each piece: of the occurrences ending in it, the one that starts first."""
    text = ""
    for count, piece in enumerate(pieces, start=1):
        before, text = len(text), text + piece
        occurrences = [
            (start, order, stop)
            for order, stop in enumerate(stops)
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > before
        ]
        if occurrences and count >= min_tokens:
            start, _, stop = min(occurrences)
            return text[: start + len(stop) if include else start], stop, count
    return text, None, len(pieces)


def longest_beginning(text: str, stops: list[str]) -> int:
    """How long the end of ``text`` is that begins, but is not, a stop string."""
    return max(n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n]))


@given(st.text("ab", min_size=1, max_size=12))
def test_failure_table_against_its_definition(pattern: str) -> None:
    table = failure_table(pattern)
    assert table[0] == 0
    for n in range(1, len(pattern) + 1):
        assert table[n] == max(k for k in range(n) if pattern[:n].endswith(pattern[:k]))


@settings(deadline=None)
@given(st.text("ab", max_size=30), st.lists(SMALL, min_size=1, max_size=2), st.integers(0, 30))
def test_min_tokens_and_stop_strings_of_a_sequence(text: str, stops: list[str], min_tokens: int) -> None:
    stops = list(dict.fromkeys(stops))
    ids = CHARACTERS.encode(text)
    pieces, detokenizer = stream(CHARACTERS, ids, stop=stops, min_tokens=min_tokens)
    expected, stop, count = cut_by_search(list(text), stops, False, min_tokens)
    assert ("".join(pieces), detokenizer.stopped, detokenizer.num_tokens) == (expected, stop, count)


def test_special_tokens_are_no_part_of_a_stop_string() -> None:
    the = byte_level_backend().encode("the").ids
    pieces, detokenizer = stream(BYTE_LEVEL, [*the, 2, *the], stop="<|im_end|>")
    assert ("".join(pieces), detokenizer.stopped) == ("thethe", None)
    pieces, detokenizer = stream(BYTE_LEVEL, [*the, 2], stop="<|im_end|>", skip_special_tokens=False)
    assert ("".join(pieces), detokenizer.stopped) == ("the", "<|im_end|>")


@pytest.mark.real_model
@settings(deadline=None, max_examples=50)
@given(TEXT)
def test_smollm2_streams(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode(text)
    pieces, _ = stream(smollm2, ids, skip_special_tokens=False)
    assert "".join(pieces) == smollm2.decode(ids, False)


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    from conftest import find_real_model

    from minivllm.models.gguf import load_gguf

    path = find_real_model()
    assert isinstance(path, Path)
    source = load_gguf(path).tokenizer
    assert source is not None
    return load_tokenizer(source.kind, source.path, source.data)
