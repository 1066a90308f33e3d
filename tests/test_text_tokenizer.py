"""Tokenizers of every kind, against the tokenizers library, transformers, and definitions written out."""

import json
import os
import unicodedata
from pathlib import Path

import pytest
from helpers_text import (
    SPECIALS,
    byte_level_backend,
    byte_level_metadata,
    llama_backend,
    sentencepiece_by_hand,
    sentencepiece_metadata,
    write_hf_directory,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from minivllm.errors import ModelError, RequestError
from minivllm.text import hf_tokenizer
from minivllm.text.tokenizer import Tokenizer, load_tokenizer
from minivllm.text.vocabulary import byte_alphabet

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
WORDS = st.lists(st.sampled_from([*"abcdehlost  漢字é\n▁w", "the ", " cat", "world", "😀"]), max_size=20).map(
    "".join
)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer("hf", write_hf_directory(tmp_path_factory.mktemp("hf"), eos_token="<|im_end|>"))


@pytest.fixture(scope="module")
def llama_hf(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = write_hf_directory(
        tmp_path_factory.mktemp("llama"),
        llama_backend(),
        bos_token="<s>",
        eos_token="</s>",
        add_bos_token=True,
    )
    return load_tokenizer("hf", directory)


@settings(deadline=None, max_examples=50)
@given(TEXT)
def test_no_text_has_fewer_tokens_than_its_bytes_allow(hf: Tokenizer, llama_hf: Tokenizer, text: str) -> None:
    for tokenizer in (hf, llama_hf):
        assert len(text.encode()) <= tokenizer.max_token_bytes * len(tokenizer.encode(text))


def shrinking(tmp_path: Path, change: str) -> Tokenizer:
    backend = Backend.from_str(byte_level_backend().to_str())
    if change == "nfc":
        backend.normalizer = normalizers.NFC()
    elif change == "nfkc":
        backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.NFKC()])
    elif change == "whitespace":
        parts = [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        backend.pre_tokenizer = pre_tokenizers.Sequence(parts)
    elif change == "removed":
        parts = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        backend.pre_tokenizer = pre_tokenizers.Sequence(parts)
    elif change == "lstrip":
        backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    elif change == "unknown":
        backend.decoder = decoders.Metaspace()
    return load_tokenizer("hf", write_hf_directory(tmp_path, backend))


@pytest.mark.parametrize("change", ["nfkc", "whitespace", "removed", "lstrip", "unknown"])
def test_tokens_that_may_stand_for_any_number_of_bytes(tmp_path: Path, change: str) -> None:
    assert shrinking(tmp_path, change).max_token_bytes is None


def test_composition_makes_texts_shorter_by_a_factor(tmp_path: Path) -> None:
    tokenizer = shrinking(tmp_path, "nfc")
    for character in map(chr, {*range(0x110000)} - {*range(0xD800, 0xE000)}):
        parts = unicodedata.normalize("NFD", character)
        if parts == character:
            continue
        composed = unicodedata.normalize("NFC", parts)
        assert max(len(parts.encode()), len(character.encode())) <= 4 * len(composed.encode())
    text = unicodedata.normalize("NFD", "\u1f82\u0390\ud4db" * 99)
    assert len(text.encode()) <= tokenizer.max_token_bytes * len(tokenizer.encode(text))
    assert tokenizer.max_token_bytes == 4 * max(map(len, tokenizer._token_bytes))


# Hugging Face directories --------------------------------------------------------------------------------


@settings(deadline=None)
@given(TEXT)
def test_hf_agrees_with_its_library(hf: Tokenizer, text: str) -> None:
    ids = byte_level_backend().encode(text).ids
    assert hf.encode(text) == ids
    assert hf.decode(ids, False) == text


@settings(deadline=None)
@given(st.lists(st.integers(0, 399), max_size=12))
def test_any_ids_decode_as_the_library_decodes_them(hf: Tokenizer, ids: list[int]) -> None:
    """Also ids whose bytes are no UTF-8, and special ones."""
    assert hf.decode(ids) == byte_level_backend().decode(ids)
    assert hf.decode(ids, False) == byte_level_backend().decode(ids, skip_special_tokens=False)


def test_hf_special_tokens(hf: Tokenizer) -> None:
    assert (hf.vocab_size, hf.special_ids) == (400, {0, 1, 2})
    assert (hf.bos_token_id, hf.bos_token) == (None, "")
    assert (hf.eos_token_id, hf.eos_token) == (2, "<|im_end|>")
    ids = hf.encode("<|im_start|>the<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert hf.decode(ids) == "the"
    assert hf.decode(ids, False) == "<|im_start|>the<|im_end|>"
    assert hf.decode([-1, 10**9]) == ""


@settings(deadline=None)
@given(WORDS)
def test_llama_kind_agrees_with_its_library(llama_hf: Tokenizer, text: str) -> None:
    backend = llama_backend()
    ids = backend.encode(text, add_special_tokens=False).ids
    assert llama_hf.encode(text) == ids
    assert llama_hf.decode(ids) == backend.decode(ids) == text.replace("▁", " ")


def test_llama_kind_keeps_the_space_of_a_text_that_goes_on(llama_hf: Tokenizer) -> None:
    ids = llama_hf.encode("the cat", add_special_tokens=False)
    assert llama_hf.decode(ids) == "the cat"
    assert llama_hf.decode(ids, continues_text=True) == " the cat"


def test_metaspace_decoder(tmp_path: Path) -> None:
    backend = Backend(models.BPE({"▁a": 0, "▁b": 1, "c": 2}, []))
    backend.decoder = decoders.Metaspace()
    tokenizer = load_tokenizer("hf", write_hf_directory(tmp_path, backend))
    assert tokenizer.decode([0, 1, 2]) == backend.decode([0, 1, 2]) == "a bc"
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    tokenizer = load_tokenizer("hf", write_hf_directory(tmp_path, backend))
    assert tokenizer.decode([0, 1, 2]) == backend.decode([0, 1, 2]) == " a bc"


def test_tokenizer_json_decides_on_the_begin_token(tmp_path: Path) -> None:
    config = {"bos_token": {"content": SPECIALS[1]}, "eos_token": SPECIALS[2]}
    directory = write_hf_directory(tmp_path, byte_level_backend(), add_bos_token=True, **config)
    tokenizer = load_tokenizer("hf", directory)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.encode("t")[0] != 1
    assert (
        load_tokenizer("hf", write_hf_directory(tmp_path, _with_begin_token(), **config)).encode("t")[0] == 1
    )


def _with_begin_token() -> Backend:
    backend = Backend.from_str(byte_level_backend().to_str())
    backend.post_processor = processors.TemplateProcessing(
        single=[SPECIALS[1], "$A"], special_tokens=[(SPECIALS[1], 1)]
    )
    return backend


def test_a_tokenizer_that_would_cut_prompts_does_not(tmp_path: Path) -> None:
    backend = Backend.from_str(byte_level_backend().to_str())
    backend.enable_truncation(2)
    backend.enable_padding(length=10)
    tokenizer = load_tokenizer("hf", write_hf_directory(tmp_path, backend))
    assert tokenizer.encode("the cat sat") == byte_level_backend().encode("the cat sat").ids


def test_where_the_chat_template_is(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    for given_, expected in (("C", "C"), (named, "D"), (None, None), ([], None)):
        directory = write_hf_directory(tmp_path, chat_template=given_)
        assert load_tokenizer("hf", directory).chat_template == expected
    (tmp_path / "chat_template.jinja").write_text("J\n")
    assert load_tokenizer("hf", tmp_path).chat_template == "J\n"


def test_names_may_come_from_special_tokens_map(tmp_path: Path) -> None:
    write_hf_directory(tmp_path, eos_token="<|im_end|>")
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<|im_start|>", "eos_token": "nowhere"}')
    tokenizer = load_tokenizer("hf", tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "no tokenizer.json"),
        ({"tokenizer.json": "{"}, "cannot be read as a tokenizer"),
        (
            {"tokenizer.json": '{"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}'},
            "cannot be read",
        ),
        ({"tokenizer_config.json": "[" * 10**5}, "tokenizer_config.json cannot be read"),
        ({"tokenizer_config.json": "[1]"}, "must hold a JSON object"),
        ({"chat_template.jinja": b"\xff"}, "chat_template.jinja cannot be read"),
    ],
)
def test_damaged_directories(tmp_path: Path, files: dict[str, str | bytes], said: str) -> None:
    if files and "tokenizer.json" not in files:
        write_hf_directory(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelError, match=said):
        load_tokenizer("hf", tmp_path)


def test_unknown_decoders_and_absurd_ids_are_refused(tmp_path: Path) -> None:
    backend = Backend.from_str(byte_level_backend().to_str())
    for decoder in (decoders.WordPiece(), decoders.CTC()):
        backend.decoder = decoder
        with pytest.raises(ModelError, match="implemented are ByteLevel"):
            load_tokenizer("hf", write_hf_directory(tmp_path, backend))
    write_hf_directory(tmp_path)
    description = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    description["model"]["vocab"]["zzz"] = 2**31
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(ModelError, match="highest token id"):
        load_tokenizer("hf", tmp_path)


@pytest.mark.transformers
@settings(deadline=None, max_examples=40)
@given(WORDS)
def test_hf_agrees_with_transformers(
    transformers_tokenizers: list[tuple[Tokenizer, object]], text: str
) -> None:
    for ours, theirs in transformers_tokenizers:
        assert ours.encode(text) == theirs.encode(text)  # type: ignore[attr-defined]
        assert ours.bos_token_id == theirs.bos_token_id  # type: ignore[attr-defined]
        assert ours.eos_token_id == theirs.eos_token_id  # type: ignore[attr-defined]
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(  # type: ignore[attr-defined]
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


@pytest.fixture(scope="module")
def transformers_tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Tokenizer, object]]:
    from transformers import AutoTokenizer

    pairs = []
    for index, (backend, config) in enumerate(
        [
            (
                byte_level_backend(),
                {"eos_token": "<|im_end|>", "add_bos_token": True, "bos_token": "<|im_start|>"},
            ),
            (_with_begin_token(), {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}),
            (llama_backend(), {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
        ]
    ):
        directory = write_hf_directory(tmp_path_factory.mktemp(f"pair{index}"), backend, **config)
        pairs.append((load_tokenizer("hf", directory), AutoTokenizer.from_pretrained(directory)))
    return pairs


# GGUF ----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(TEXT)
def test_gguf_byte_level_agrees_with_the_same_vocabulary_as_tokenizer_json(text: str) -> None:
    tokenizer = _gguf_gpt2()
    assert tokenizer.encode(text) == byte_level_backend().encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text), False) == text


_LOADED: dict[str, Tokenizer] = {}


def _gguf_gpt2(pre: str = "gpt-2") -> Tokenizer:
    if pre not in _LOADED:
        _LOADED[pre] = load_tokenizer("gguf", data=byte_level_metadata(pre))
    return _LOADED[pre]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", " 1234", " don", "'", "T", "   ", " x", "!?", "\n", "\n", "é"]),
        (
            "smollm",
            ["It", "'s", " ", "1", "2", "3", "4", " don", "'", "T", "   ", " x", "!?", "\n", "\n", "é"],
        ),
        ("llama-bpe", ["It", "'s", " ", "123", "4", " don", "'T", "   ", " x", "!?\n\n", "é"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", " don", "'T", "   ", " x", "!?\n\n", "é"]),
        ("tekken", ["It", "'s", " ", "1", "2", "3", "4", " don", "'T", "   ", " x", "!?\n\n", "é"]),
        ("gpt-4o", ["It's", " ", "123", "4", " don'T", "   ", " x", "!?\n\n", "é"]),
        (
            "default",
            ["It", "'", "s", " ", "123", "4", " don", "'", "T", "   ", " x", "!?", "\n", "\n", "é"],
        ),
    ],
)
def test_how_each_pre_tokenizer_splits(pre: str, pieces: list[str]) -> None:
    """The pieces are what the regular expression that each name stands for gives, worked out by hand."""
    text = "It's 1234 don'T    x!?\n\né"
    assert "".join(pieces) == text
    assert _pieces_by_greedy_vocabulary(pre, text) == pieces


def _pieces_by_greedy_vocabulary(pre: str, text: str) -> list[str]:
    """Split ``text`` with a vocabulary that joins whatever it may: each piece comes out as one token."""
    spell = {byte: character for character, byte in byte_alphabet().items()}
    spelled = "".join(spell[byte] for byte in text.encode())
    longest = 8  # bytes of the longest piece, at least
    parts = {spelled[i : i + n] for n in range(2, longest + 1) for i in range(len(spelled) - n + 1)}
    tokens = [*spell.values(), *sorted(parts, key=len)]
    merges = [f"{part[:cut]} {part[cut:]}" for part in tokens[256:] for cut in range(1, len(part))]
    metadata = byte_level_metadata(pre, add_bos_token=False) | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": merges,
    }
    tokenizer = load_tokenizer("gguf", data=metadata)
    return [tokenizer.decode([token_id]) for token_id in tokenizer.encode(text)]


def test_gguf_begin_and_end_tokens() -> None:
    def ids(pre: str, **more: object) -> list[int]:
        return load_tokenizer("gguf", data=byte_level_metadata(pre, **more)).encode("the")

    the = byte_level_backend().encode("the").ids
    assert ids("gpt-2") == the
    assert ids("llama-bpe") == [1, *the]
    assert ids("llama-bpe", add_bos_token=False) == the
    assert ids("gpt-2", add_bos_token=True) == [1, *the]
    assert ids("gpt-2", add_eos_token=True) == [*the, 2]
    tokenizer = _gguf_gpt2()
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.encode("the<|im_end|>") == [*the, 2]


def test_gguf_user_defined_and_unused_tokens() -> None:
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] += ["<think>", "[PAD401]", "two words é"]
    metadata["tokenizer.ggml.token_type"] += [4, 5, 4]
    tokenizer = load_tokenizer("gguf", data=metadata)
    assert tokenizer.vocab_size == 403
    assert tokenizer.encode("<think>two words é") == [400, 402]
    assert tokenizer.decode([400, 401, 402]) == "<think>two words é"
    assert 401 not in tokenizer.encode("[PAD401]")


@settings(deadline=None)
@given(WORDS)
def test_sentencepiece_agrees_with_its_definition(text: str) -> None:
    metadata = sentencepiece_metadata()
    tokenizer = _LOADED.setdefault("spm", load_tokenizer("gguf", data=metadata))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == sentencepiece_by_hand(text, metadata)
    assert tokenizer.encode(text) == [1, *ids]
    assert tokenizer.decode([1, *ids]) == text.replace("▁", " ")


def test_sentencepiece_without_space_prefix() -> None:
    tokenizer = load_tokenizer(
        "gguf", data=sentencepiece_metadata(add_space_prefix=False, add_bos_token=False)
    )
    tokens = sentencepiece_metadata()["tokenizer.ggml.tokens"]
    assert [tokens[i] for i in tokenizer.encode("the cat")] == ["the", "▁cat"]
    assert tokenizer.decode(tokenizer.encode(" the cat")) == " the cat"


def test_sentencepiece_special_and_user_defined_tokens() -> None:
    metadata = sentencepiece_metadata()
    tokenizer = load_tokenizer("gguf", data=metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = tokenizer.encode("the</s>cat<unk><tool>")
    assert [tokens[i] for i in ids] == ["<s>", "▁the", "</s>", "▁cat", "<unk>", "<tool>"]
    assert tokenizer.decode(ids) == "the cat<tool>"
    assert tokenizer.special_ids == {0, 1, 2}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "bert"}, "'bert'"),
        ({"model": None}, "None"),
        ({"pre": "gpt-99"}, "'gpt-99'"),
        ({"pre": ["gpt-2"]}, "gpt-2"),
        ({"tokens": None}, "needs tokenizer.ggml.tokens"),
        ({"tokens": ["a", "a"]}, "'a' twice"),
        ({"tokens": ["a", 7]}, "list of strings"),
        ({"token_type": [1, 2]}, "400 numbers"),
        ({"token_type": ["1"] * 400}, "400 numbers"),
        ({"merges": None}, "needs tokenizer.ggml.merges"),
        ({"merges": [byte_level_metadata()["tokenizer.ggml.merges"][0], "no pair"]}, "merge 1"),
        ({"merges": ["Ġt"]}, "merge 0"),
        ({"bos_token_id": 400}, "from 0 to 399"),
        ({"eos_token_id": "2"}, "'2'"),
        ({"add_bos_token": "yes"}, "true or false"),
        ({"model": "llama"}, "scores"),
        ({"model": "llama", "scores": [0.0]}, "400 numbers"),
    ],
)
def test_malformed_metadata(change: dict[str, object], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        load_tokenizer(
            "gguf", data=byte_level_metadata() | {f"tokenizer.ggml.{k}": v for k, v in change.items()}
        )


# SmolLM2 itself ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> tuple[Tokenizer, Path]:
    from conftest import find_real_model

    from minivllm.models.gguf import load_gguf

    path = find_real_model()
    assert path is not None
    source = load_gguf(path).tokenizer
    assert source is not None
    return load_tokenizer(source.kind, source.path, source.data), path


@pytest.mark.real_model
def test_smollm2_gives_the_published_ids(smollm2: tuple[Tokenizer, Path]) -> None:
    tokenizer, _ = smollm2
    for text, ids in {
        "Hello, we can use": [19556, 28, 392, 416, 722],
        "The capital of France is": [504, 3575, 282, 4649, 314],
        "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
        "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
        "  multiple   spaces": [216, 2701, 256, 5600],
    }.items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.chat_template is not None


@pytest.mark.real_model
@settings(deadline=None, max_examples=200)
@given(TEXT)
def test_smollm2_round_trip(smollm2: tuple[Tokenizer, Path], text: str) -> None:
    """All that the vocabulary can express: some control characters have no token, and are left out."""
    tokenizer = smollm2[0]
    known = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    missing = {byte for byte in range(256) if bytes([byte]) not in known}
    text = "".join(character for character in text if not missing & set(character.encode()))
    assert tokenizer.decode(tokenizer.encode(text), False) == text


@pytest.mark.real_model
@pytest.mark.transformers
def test_smollm2_agrees_with_transformers(smollm2: tuple[Tokenizer, Path]) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer, path = smollm2
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # transformers overlooks tokenizer.ggml.pre = "smollm"; this is what the model's own tokenizer.json has.
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert tokenizer.eos_token_id == theirs.eos_token_id

    @settings(deadline=None, max_examples=300)
    @given(TEXT | st.text(st.sampled_from("abT  0123٣½\n\t\r.,'s!é漢😀|<>_"), max_size=60))
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)

    check()


# Characters, and GPT-2 -----------------------------------------------------------------------------------


def test_characters() -> None:
    tokenizer = load_tokenizer("chars", data={"itos": ["\n", "a", "é", "😀"]})
    assert tokenizer.vocab_size == 4
    assert tokenizer.encode("aé😀\n") == [1, 2, 3, 0]
    assert tokenizer.decode([1, 2, 3, 0, 9]) == "aé😀\n"
    with pytest.raises(RequestError, match=r"'z' \(U\+007A\)") as caught:
        tokenizer.encode("az")
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("itos", [None, [], "ab", ["a", "a"], ["ab"], [1], ["\ud800"]])
def test_malformed_character_lists(itos: object) -> None:
    with pytest.raises(ModelError):
        load_tokenizer("chars", data={"itos": itos})


def _gpt2_sized_backend() -> Backend:
    """GPT-2's number of tokens, of which the first 256 are the bytes and the others are never used."""
    alphabet = sorted(byte_level_backend().pre_tokenizer.alphabet())
    vocabulary = {token: i for i, token in enumerate(alphabet)}
    vocabulary |= {f"unused {i}": i for i in range(256, 50256)} | {"<|endoftext|>": 50256}
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = byte_level_backend().pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    return backend


@pytest.mark.parametrize(
    "names", [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"), ("tokenizer.json",)]
)
@pytest.mark.parametrize("in_cache", [False, True])
def test_gpt2_files(tmp_path: Path, names: tuple[str, ...], in_cache: bool) -> None:
    backend = _gpt2_sized_backend()
    place = tmp_path / "gpt2-bpe" if in_cache else tmp_path / "model"
    place.mkdir()
    if len(names) == 1:
        backend.save(str(place / names[0]))
    else:
        (place / names[0]).write_text(json.dumps(backend.get_vocab()), encoding="utf-8")
        (place / names[1]).write_text("#version: 0.2\n", encoding="utf-8")
    tokenizer = load_tokenizer("gpt2", tmp_path / "model", cache_dir=tmp_path)
    ids = tokenizer.encode("aé<|endoftext|>")
    assert ids == backend.encode("aé<|endoftext|>").ids
    assert ids[-1] == 50256 == tokenizer.eos_token_id
    assert tokenizer.decode(ids) == "aé"
    assert tokenizer.vocab_size == 50257


def test_gpt2_of_the_wrong_kind(tmp_path: Path) -> None:
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="is not GPT-2's tokenizer: it has 400 tokens"):
        load_tokenizer("gpt2", tmp_path, cache_dir=tmp_path)


def test_gpt2_from_the_hub_or_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo: str, name: str) -> str:
        assert (repo, name) == ("openai-community/gpt2", "tokenizer.json")
        file = tmp_path / "downloaded.json"
        _gpt2_sized_backend().save(str(file))
        return str(file)

    monkeypatch.setattr(hf_tokenizer.huggingface_hub, "hf_hub_download", download)
    assert load_tokenizer("gpt2", tmp_path, cache_dir=tmp_path).vocab_size == 50257

    def fail(repo: str, name: str) -> str:
        raise ConnectionError("no network")

    monkeypatch.setattr(hf_tokenizer.huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(
        ModelError, match=r"pull gpt2-bpe.*put vocab\.json and merges\.txt, or tokenizer\.json, "
    ):
        load_tokenizer("gpt2", tmp_path, cache_dir=tmp_path)


def test_lone_surrogates_are_refused(hf: Tokenizer) -> None:
    for tokenizer in (hf, load_tokenizer("chars", data={"itos": ["a"]})):
        with pytest.raises(RequestError, match=r"character 1 is a lone surrogate, U\+D83D"):
            tokenizer.encode("a\ud83d")


def test_unknown_kind() -> None:
    with pytest.raises(ModelError, match="'tiktoken'"):
        load_tokenizer("tiktoken")  # type: ignore[arg-type]
