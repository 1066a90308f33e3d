"""The character tokenizer of NanoGPT's char-level data sets: token id = place in a list of characters."""

from collections.abc import Mapping
from typing import Any

from minivllm.errors import ModelError, RequestError, shown
from minivllm.text.vocabulary import Tokenizer, utf8


def char_tokenizer(data: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer whose id i is the character ``data["itos"][i]``.

    Raises:
        ModelError: ``itos`` is not a list of different single characters.
    """
    itos = data.get("itos")
    if not isinstance(itos, list | tuple) or not itos:
        raise ModelError("the character vocabulary (itos) must be a list of characters, and not empty")
    ids: dict[str, int] = {}
    for token_id, character in enumerate(itos):
        if not isinstance(character, str) or len(character) != 1 or character in ids:
            raise ModelError(
                f"entry {token_id} of the character vocabulary (itos) is {shown(character)}; "
                f"it must be one character that is not in the list before"
            )
        ids[character] = token_id

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        try:
            return [ids[character] for character in text]
        except KeyError as error:
            character = error.args[0]
            raise RequestError(
                f"the prompt has the character {character!r} (U+{ord(character):04X}), which is not among "
                f"the {len(ids)} characters that this model knows",
                "prompt",
            ) from None

    return Tokenizer(encode, [utf8(character) for character in itos])
