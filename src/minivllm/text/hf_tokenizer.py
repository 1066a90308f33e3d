"""Tokenizers from tokenizer.json and from GPT-2's vocabulary files.

Knows nothing of where the model's weights are or what they look like.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import tokenizers

from minivllm.errors import ModelError
from minivllm.text.vocabulary import (
    MAX_VOCAB_SIZE,
    Tokenizer,
    backend_encoder,
    byte_level_bytes,
    decoder_steps,
    sentencepiece_bytes,
    utf8,
)

GPT2_VOCAB_SIZE = 50257
GPT2_HUB_NAME = "openai-community/gpt2"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_GPT2_END = "<|endoftext|>"
_GPT2_FILE_PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))


def hf_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face model directory.

    Reads tokenizer.json and, where they are, tokenizer_config.json, special_tokens_map.json and
    chat_template.jinja. Whether a begin token is added is for tokenizer.json to say: as in transformers 5,
    the configuration's add_bos_token has no effect.

    Raises:
        ModelError: tokenizer.json is missing or malformed, or decodes in a way that is not implemented.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ModelError(
            f"{directory} has no tokenizer.json; save the model's tokenizer there with "
            f"transformers.AutoTokenizer.from_pretrained(…).save_pretrained(…), or use token ids as prompts"
        )
    backend = read_backend(file)
    config = {
        **_json_object(directory / "special_tokens_map.json"),
        **_json_object(directory / "tokenizer_config.json"),
    }
    special = {name: _special_token(backend, config.get(name)) for name in _SPECIAL_TOKENS}
    bos, eos = special["bos_token"], special["eos_token"]
    return from_backend(
        backend,
        file,
        bos_token_id=bos[1] if bos else None,
        eos_token_id=eos[1] if eos else None,
        more_special_ids=[token[1] for token in special.values() if token],
        chat_template=_chat_template(directory, config),
    )


def gpt2_tokenizer(directory: Path | None, cache_dir: Path | None) -> Tokenizer:
    """GPT-2's BPE: from ``directory``, from ``cache_dir``/gpt2-bpe, or from the Hub.

    A directory may hold vocab.json and merges.txt, encoder.json and vocab.bpe, or tokenizer.json.

    Raises:
        ModelError: it is nowhere to be had, or is not GPT-2's.
    """
    places = [place for place in (directory, cache_dir and cache_dir / "gpt2-bpe") if place]
    for place in places:
        if backend_and_file := _gpt2_files(place):
            break
    else:
        try:
            file = Path(huggingface_hub.hf_hub_download(GPT2_HUB_NAME, "tokenizer.json"))
        except Exception as error:  # whatever the network or the Hub's library raises
            raise ModelError(
                f"this model needs GPT-2's tokenizer, and the Hub did not give it ({type(error).__name__}): "
                f"run `mini-vllm pull gpt2-bpe`, or put vocab.json and merges.txt, or tokenizer.json, of "
                f"{GPT2_HUB_NAME} into {' or '.join(map(str, places))}"
            ) from None
        backend_and_file = read_backend(file), file
    backend, file = backend_and_file
    if backend.token_to_id(_GPT2_END) != GPT2_VOCAB_SIZE - 1 or backend.get_vocab_size() != GPT2_VOCAB_SIZE:
        raise ModelError(
            f"{file} is not GPT-2's tokenizer: it has {backend.get_vocab_size()} tokens, "
            f"not {GPT2_VOCAB_SIZE} that end with {_GPT2_END}"
        )
    end = GPT2_VOCAB_SIZE - 1
    return from_backend(backend, file, bos_token_id=end, eos_token_id=end, more_special_ids=[end])


def _gpt2_files(directory: Path) -> tuple[tokenizers.Tokenizer, Path] | None:
    """GPT-2's BPE from the files in ``directory``; None if there are none."""
    for vocabulary, merges in _GPT2_FILE_PAIRS:
        files = directory / vocabulary, directory / merges
        if all(file.is_file() for file in files):
            return read_backend(*files), files[0]
    file = directory / "tokenizer.json"
    if file.is_file():
        return read_backend(file), file
    return None


def _gpt2_bpe(vocabulary: Path, merges: Path) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(vocabulary), str(merges)))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([_GPT2_END])
    return backend


def read_backend(*files: Path) -> tokenizers.Tokenizer:
    """The tokenizer in one tokenizer.json, or in a vocabulary and its merges.

    Raises:
        ModelError: it cannot be read.
    """
    try:
        if len(files) == 1:
            return tokenizers.Tokenizer.from_file(str(files[0]))
        return _gpt2_bpe(*files)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the Rust library is not an Exception
        raise ModelError(f"{files[0]} cannot be read as a tokenizer: {str(error)[:200]}") from None


def from_backend(
    backend: tokenizers.Tokenizer,
    file: Path,
    *,
    bos_token_id: int | None,
    eos_token_id: int | None,
    more_special_ids: list[int],
    chat_template: str | None = None,
) -> Tokenizer:
    """The tokenizer over ``backend``, its tokens' bytes derived from its decoder.

    Raises:
        ModelError: the decoder is of a kind that is not implemented, or an id is out of all proportion.
    """
    to_bytes, strips_leading_space = _decoding(backend, file)
    added = backend.get_added_tokens_decoder()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    highest = max(vocabulary.values(), default=-1)
    if not 0 <= highest < MAX_VOCAB_SIZE:
        raise ModelError(
            f"{file} has {highest} as its highest token id; it must be from 0 to {MAX_VOCAB_SIZE - 1}"
        )
    token_bytes = [b""] * (highest + 1)
    for token, token_id in vocabulary.items():
        token_bytes[token_id] = utf8(token) if token_id in added else to_bytes(token)
    backend.no_truncation()  # a prompt that is too long is refused, never cut
    backend.no_padding()
    return Tokenizer(
        backend_encoder(backend),
        token_bytes,
        special_ids=[*(token_id for token_id, token in added.items() if token.special), *more_special_ids],
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
        chat_template=chat_template,
        strips_leading_space=strips_leading_space,
        shrinks=_shrinks(backend),
    )


def _decoding(backend: tokenizers.Tokenizer, file: Path) -> tuple[Callable[[str], bytes], bool]:
    """How a token of ``backend`` becomes bytes, and whether a text's first space is dropped."""
    steps = decoder_steps(backend)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return byte_level_bytes, False
    strips = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}:
                pass
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                strips = True
            case {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme}:
                strips = scheme != "never"
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case _:
                kinds = []
    if "Replace" in kinds or "Metaspace" in kinds:
        return (sentencepiece_bytes if "ByteFallback" in kinds else _metaspace_bytes), strips
    raise ModelError(
        f"{file} decodes its tokens by {json.dumps(steps, ensure_ascii=False)[:200]}; "
        f"implemented are ByteLevel and SentencePiece's (Replace or Metaspace, ByteFallback, Fuse, Strip)"
    )


def _shrinks(backend: tokenizers.Tokenizer) -> int | None:
    """In how many bytes of a text one byte of its tokens may originate; None: in any number.

    What is not known to keep every character may drop any number of them.
    """
    decoding = {step["type"] for step in decoder_steps(backend)}
    if not decoding & {"ByteLevel", "ByteFallback"}:  # else there is an unknown token, for any number of them
        return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None
    factor = 1
    for step in _steps(backend.normalizer, "normalizers") + _steps(backend.pre_tokenizer, "pretokenizers"):
        match step:
            case {"type": "Prepend" | "ByteLevel" | "Digits" | "Metaspace"}:
                pass
            case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                pass
            case {"type": "Split" | "Punctuation", "behavior": behavior} if behavior != "Removed":
                pass
            case {"type": "NFC"}:
                factor = 4  # from decomposed to composed 3 at most, and from compatibility ideographs 4 to 3
            case _:
                return None
    return factor


def _steps(part: Any, parts: str) -> list[Any]:
    """The steps of a normaliser or pre-tokeniser, as tokenizer.json describes them."""
    if part is None:
        return []
    step = json.loads(part.__getstate__())
    return list(step[parts]) if step["type"] == "Sequence" else [step]


def _metaspace_bytes(token: str) -> bytes:
    return utf8(token.replace("▁", " "))


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja if there is one, else the configuration's; of several named ones, "default"."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _json_object(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``; empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        # No number in it is used, and an int of thousands of digits would be refused in Python's words.
        value = json.loads(file.read_text(encoding="utf-8"), parse_int=float)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return value


def _special_token(backend: tokenizers.Tokenizer, entry: object) -> tuple[str, int] | None:
    """Text and id of a token that a configuration names, by a string or an object with its content."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    token_id = backend.token_to_id(entry) if isinstance(entry, str) else None
    return None if token_id is None else (str(entry), token_id)
