"""Texts of a grammar, drawn without a model."""

import random

import numpy as np

from minivllm.text.grammar import Grammar, Matcher

END = 255  #: no text has this byte


def allowed(matcher: Matcher) -> set[int]:
    """The tokens that may come next."""
    mask = np.full(matcher.num_words, 0xABCDABCD, np.uint32)  # whatever was there before
    matcher.write_mask(mask)
    return {i for i in range(32 * len(mask)) if int(mask[i // 32]) >> i % 32 & 1}


def random_text(grammar: Grammar, seed: int) -> str:
    """One of a grammar over ``byte_tokenizer``'s vocabulary."""
    rng, matcher, text = random.Random(seed), grammar.matcher(frozenset({END})), b""
    while not matcher.complete:
        token_id = rng.choice(sorted(allowed(matcher)))
        assert matcher.failure is None
        if token_id == END:
            break
        matcher.accept(token_id)
        text += bytes([token_id])
    return text.decode()
