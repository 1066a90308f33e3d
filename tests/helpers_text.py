"""Small tokenizers of every kind, made on the spot: a byte-level BPE and a SentencePiece one."""

import json
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "the cat sat on the mat, and the dog sat on the log. It's what they'll do: don't they?",
    "Numbers: 1 12 123 1234 12345, 3.14159; dates 2024-12-31.\n\n  Indented\n\ttabbed text\r\n",
    "Grüße aus München, déjà vu, naïve café — “quoted” … 漢字かな交じり文 Привет мир 😀👍🏽",
] * 4

_WORDS = """he th the ▁t ▁the ▁the▁ at ca cat ▁c ▁ca ▁cat ▁s ▁sa sat ▁sat on ▁on ▁▁ ▁▁▁▁ ab abc bc bcd ▁d do
dog og ▁do ▁dog 漢字 ll ▁l lo ▁lo ▁log es ess ▁w wo ▁wo or ▁wor ld ▁world éé"""

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@lru_cache(maxsize=1)
def byte_level_backend() -> Tokenizer:
    """A byte-level BPE of 400 tokens, three of them special, trained on CORPUS."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def write_hf_directory(directory: Path, backend: Tokenizer | None = None, **config: Any) -> Path:
    """A directory with tokenizer.json and tokenizer_config.json."""
    (backend or byte_level_backend()).save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def byte_level_metadata(pre: str = "gpt-2", **more: Any) -> dict[str, Any]:
    """The metadata that a GGUF file would have for ``byte_level_backend``."""
    description = json.loads(byte_level_backend().to_str())
    vocabulary = byte_level_backend().get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    merges = [m if isinstance(m, str) else " ".join(m) for m in description["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIALS else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{name}": value for name, value in more.items()},
    }


def sentencepiece_metadata(**more: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary as a GGUF file has it: bytes, characters, and words by falling score."""
    words = _WORDS.split()
    characters = sorted(set("".join(words)))
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *words,
        *characters,
        "<tool>",
    ]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(words) + len(characters)), 4]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(words) + len(characters))] + [0.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{name}": value for name, value in more.items()},
    }


def sentencepiece_by_hand(text: str, metadata: dict[str, Any]) -> list[int]:
    """SentencePiece BPE from its definition: join the neighbours of the best score, leftmost first; again."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {token: i for i, token in enumerate(tokens) if metadata["tokenizer.ggml.token_type"][i] == 1}
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joinable = [
            (-scores[ids[a + b]], place) for place, (a, b) in enumerate(pairwise(symbols)) if a + b in ids
        ]
        if not joinable:
            break
        _, place = min(joinable)
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    result = []
    for symbol in symbols:
        result += [ids[symbol]] if symbol in ids else [tokens.index(f"<0x{b:02X}>") for b in symbol.encode()]
    return result


def llama_backend() -> Tokenizer:
    """A tokenizer.json as Llama 2's is: normalizer, byte fallback, the first space stripped in decoding."""
    metadata = sentencepiece_metadata()
    tokens = metadata["tokenizer.ggml.tokens"][:-1]
    words = {
        token for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=False) if kind == 1
    }
    merges = [
        (token[:cut], token[cut:])
        for token in tokens
        if token in words
        for cut in range(1, len(token))
        if token[:cut] in words and token[cut:] in words
    ]
    model = models.BPE(
        {token: i for i, token in enumerate(tokens)},
        merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in tokens[:3]])
    return backend


@lru_cache(maxsize=1)
def _unfinished_characters() -> frozenset[bytes]:
    """What UTF-8 characters begin with, but for whole ones. 64 neighbours differ in their last byte only."""
    characters = [chr(i).encode(errors="surrogatepass") for i in range(0x80, 0x110000, 64)]
    return frozenset(data[:n] for data in characters for n in range(1, len(data)))


def answer_text(data: bytes) -> str:
    """The text of an answer of these bytes: U+FFFD for ill-formed ones, without an unfinished character."""
    for n in (3, 2, 1):
        if data[-n:] in _unfinished_characters():
            data = data[:-n]
            break
    return data.decode(errors="replace")
