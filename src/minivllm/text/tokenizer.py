"""load_tokenizer: from what a checkpoint says of its tokenizer to the tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from minivllm.errors import ModelError, shown
from minivllm.text.char_tokenizer import char_tokenizer
from minivllm.text.gguf_tokenizer import gguf_tokenizer
from minivllm.text.hf_tokenizer import gpt2_tokenizer, hf_tokenizer
from minivllm.text.vocabulary import Tokenizer

__all__ = ["Tokenizer", "load_tokenizer"]


def load_tokenizer(
    kind: Literal["hf", "gguf", "chars", "gpt2"],
    path: Path | None = None,
    data: Mapping[str, Any] | None = None,
    *,
    cache_dir: Path | None = None,
) -> Tokenizer:
    """Build the tokenizer that the fields of a ``TokenizerSource`` describe.

    Args:
        kind: "hf": a directory with tokenizer.json; "gguf": the metadata of a GGUF file; "chars": a list of
            characters; "gpt2": GPT-2's BPE.
        path: hf: that directory; gpt2: the directory looked in first.
        data: gguf: the ``tokenizer.*`` metadata; chars: ``{"itos": [...]}``.
        cache_dir: gpt2: the directory whose gpt2-bpe is looked in next; then the Hub is asked.

    Raises:
        ModelError: the tokenizer is missing, malformed, or of a kind that is not implemented.
    """
    if kind == "hf" and path is not None:
        return hf_tokenizer(path)
    if kind == "gguf" and data is not None:
        return gguf_tokenizer(data)
    if kind == "chars" and data is not None:
        return char_tokenizer(data)
    if kind == "gpt2":
        return gpt2_tokenizer(path, cache_dir)
    raise ModelError(
        f"there is no tokenizer of kind {shown(kind)} from path {path} and {len(data or {})} metadata fields"
    )
