"""Tokenizers from the ``tokenizer.*`` metadata of a GGUF file.

Two kinds, as ``tokenizer.ggml.model`` names them: "gpt2", byte-level BPE, whose merges are in the file and
whose way of splitting text is named by ``tokenizer.ggml.pre``; and "llama", SentencePiece BPE, whose merges
follow from the scores of its tokens. What the names mean is defined by llama.cpp (src/llama-vocab.cpp);
where a name stands for a published tokenizer.json, the split is the one given there.

Knows nothing of the rest of the file. Its ``tokenizer.chat_template`` is passed on unread.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from minivllm.errors import ModelError, shown
from minivllm.text.vocabulary import (
    MAX_VOCAB_SIZE,
    Tokenizer,
    backend_encoder,
    byte_level_bytes,
    sentencepiece_bytes,
    special_token_frame,
    utf8,
)

# Values of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _word_split(digits: str) -> str:
    """The split that Llama 3 and Qwen 2 share but for the number of digits that go together."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _cased_split(digits: str, contractions: str) -> str:
    """The split that Tekken and GPT-4o share, which parts words where capitals begin."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{before}{upper}*{lower}+{contractions}|{before}{upper}+{lower}*{contractions}|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_DIGIT, _THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"

#: The regular expressions of each kind of split, applied one after the other, each within the pieces of
#: the one before.
_SPLITS = {
    "gpt2": (_GPT2_SPLIT,),
    "digits": (_DIGIT, _GPT2_SPLIT),
    "llama3": (_word_split(_THREE_DIGITS),),
    "qwen2": (_word_split(_DIGIT),),
    "tekken": (_cased_split(_DIGIT, ""),),
    "gpt-4o": (_cased_split(_THREE_DIGITS, "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"),),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]"),
}

#: tokenizer.ggml.pre → the kind of split.
_PRE_TOKENIZERS = {
    **dict.fromkeys(("default",), "default"),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "exaone4", "trillion"), "gpt2"),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), "digits"
    ),
    **dict.fromkeys(
        (
            "llama3",
            "llama-v3",
            "llama-bpe",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "dbrx",
            "smaug-bpe",
        ),
        "llama3",
    ),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "kormo", "grok-2"), "qwen2"
    ),
    **dict.fromkeys(("tekken",), "tekken"),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), "gpt-4o"),
}
_WITHOUT_BOS = ("dbrx", "smaug-bpe")  # of the kind llama3, but without what else llama.cpp ties to it


def gguf_tokenizer(data: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file's ``tokenizer.*`` metadata describes.

    Raises:
        ModelError: the metadata is incomplete or malformed, or of a kind that is not implemented.
    """
    kind = data.get("tokenizer.ggml.model")
    tokens = _strings(data, "tokenizer.ggml.tokens")
    if len(tokens) > MAX_VOCAB_SIZE:
        raise ModelError(
            f"the GGUF tokenizer claims {len(tokens)} tokens; at most {MAX_VOCAB_SIZE} are possible"
        )
    vocabulary: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        if vocabulary.setdefault(token, token_id) != token_id:
            raise ModelError(
                f"the GGUF tokenizer has {shown(token)} twice, as {vocabulary[token]} and {token_id}"
            )
    types = _numbers(data, "tokenizer.ggml.token_type", len(tokens)) or [1] * len(tokens)
    pre = data.get("tokenizer.ggml.pre", "default")

    if kind == "gpt2":
        split = _PRE_TOKENIZERS.get(pre) if isinstance(pre, str) else None
        if split is None:
            raise ModelError(
                f"the GGUF tokenizer splits text in a way that is not implemented: "
                f"tokenizer.ggml.pre is {shown(pre)}; implemented are {', '.join(_PRE_TOKENIZERS)}"
            )
        merges_whole_words = split in ("llama3", "tekken") and pre not in _WITHOUT_BOS
        backend = _byte_level(data, vocabulary, _SPLITS[split], merges_whole_words)
        to_bytes, adds_bos, strips = byte_level_bytes, merges_whole_words, False
    elif kind == "llama":
        strips = _flag(data, "add_space_prefix", True)
        unknown = data.get("tokenizer.ggml.unknown_token_id", 0)
        backend = _sentencepiece(data, vocabulary, tokens, types, unknown, strips)
        to_bytes, adds_bos = sentencepiece_bytes, True
    else:
        raise ModelError(
            f"the GGUF tokenizer is of a kind that is not implemented: tokenizer.ggml.model is "
            f"{shown(kind)}; implemented are 'gpt2' and 'llama'"
        )

    for kinds in ((_CONTROL, _UNKNOWN), (_USER_DEFINED,)):
        special = _CONTROL in kinds
        added = [
            AddedToken(token, normalized=False, special=special)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type in kinds and token
        ]
        backend.add_special_tokens(added) if special else backend.add_tokens(added)
    bos, eos = (_token(data, name, tokens) for name in ("bos", "eos"))
    backend.post_processor = special_token_frame(
        bos if _flag(data, "add_bos_token", adds_bos) else None,
        eos if _flag(data, "add_eos_token", False) else None,
    )
    template = data.get("tokenizer.chat_template")
    return Tokenizer(
        backend_encoder(backend),
        [_bytes(token, token_type, to_bytes) for token, token_type in zip(tokens, types, strict=True)],
        special_ids=[i for i, token_type in enumerate(types) if token_type in (_CONTROL, _UNKNOWN)],
        bos_token_id=bos[1] if bos else None,
        eos_token_id=eos[1] if eos else None,
        chat_template=template if isinstance(template, str) else None,
        strips_leading_space=strips,
    )


def _byte_level(
    data: Mapping[str, Any], vocabulary: dict[str, int], splits: tuple[str, ...], merges_whole_words: bool
) -> Backend:
    """Byte-level BPE over the merges that the file lists, the earliest first."""
    merges = []
    for index, merge in enumerate(_strings(data, "tokenizer.ggml.merges")):
        left, _, right = merge.partition(" ")
        if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
            raise ModelError(
                f"merge {index} of the GGUF tokenizer, {shown(merge)}, is not of two of its tokens to a third"
            )
        merges.append((left, right))
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=merges_whole_words))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(split), behavior="isolated") for split in splits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    data: Mapping[str, Any],
    vocabulary: dict[str, int],
    tokens: list[str],
    types: list[Any],
    unknown: object,
    add_space_prefix: bool,
) -> Backend:
    """SentencePiece BPE: of all neighbours that join to a token, the token of the highest score comes first.

    Characters that are no token become their bytes' tokens. The space put before the text, and after each
    special token in it, is the one that ``decode`` drops.
    """
    scores = _numbers(data, "tokenizer.ggml.scores", len(tokens))
    if scores is None:
        raise ModelError("the GGUF tokenizer has no tokenizer.ggml.scores, which SentencePiece needs")
    # Tokens that are never the result of a merge: control tokens, byte tokens and the like.
    joined = {token for token, token_type in zip(tokens, types, strict=True) if token_type == 1}
    merges = [
        (-scores[vocabulary[token]], cut, token)
        for token in joined
        for cut in range(1, len(token))
        if token[:cut] in joined and token[cut:] in joined
    ]
    merges.sort(key=lambda merge: (merge[0], vocabulary[merge[2]], merge[1]))
    backend = Backend(
        models.BPE(
            vocab=vocabulary,
            merges=[(token[:cut], token[cut:]) for _, cut, token in merges],
            unk_token=tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = [normalizers.Prepend("▁")] if add_space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    return backend


def _bytes(token: str, token_type: object, to_bytes: Any) -> bytes:
    """What a token stands for: special and user-defined ones for their spelling, unused ones for nothing."""
    if token_type == _UNUSED:
        return b""
    return utf8(token) if token_type in (_CONTROL, _UNKNOWN, _USER_DEFINED) else bytes(to_bytes(token))


def _strings(data: Mapping[str, Any], key: str) -> list[str]:
    values = data.get(key)
    values = [] if values is None else list(values)
    if set(map(type, values)) != {str}:
        raise ModelError(f"the GGUF tokenizer needs {key}, a list of strings, and not empty")
    return values


def _numbers(data: Mapping[str, Any], key: str, count: int) -> list[Any] | None:
    values = data.get(key)
    if values is None:
        return None
    numbers = list(values)
    if len(numbers) != count or not set(map(type, numbers)) <= {int, float}:
        raise ModelError(f"the GGUF tokenizer's {key} must hold {count} numbers, one for each token")
    return numbers


def _flag(data: Mapping[str, Any], name: str, default: bool) -> bool:
    value = data.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise ModelError(
            f"the GGUF tokenizer's tokenizer.ggml.{name} is {shown(value)}; it must be true or false"
        )
    return value


def _token(data: Mapping[str, Any], name: str, tokens: list[str]) -> tuple[str, int] | None:
    """The text and id of the token that ``tokenizer.ggml.<name>_token_id`` names."""
    token_id = data.get(f"tokenizer.ggml.{name}_token_id")
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise ModelError(
            f"the GGUF tokenizer's tokenizer.ggml.{name}_token_id is {shown(token_id)}; "
            f"it must be from 0 to {len(tokens) - 1}"
        )
    return tokens[token_id], token_id
