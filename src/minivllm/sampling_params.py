"""SamplingParams: how the next token of one request is chosen, and when the request ends.

Knows nothing of models or tensors. What a value means exactly is defined by ``minivllm.sampler``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from minivllm.errors import RequestError

MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024  # characters
MAX_LOGPROBS = 20
MAX_TOKENS_LIMIT = 2**31 - 1
MAX_LOGIT_BIAS = 1024  # entries


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of one request, with vLLM's names and meanings.

    Every value is checked on construction; what depends on the model (token ids) is checked by
    ``check_vocabulary`` when the request is added.

    Raises:
        RequestError: a value is out of range; ``param`` names the field.
    """

    max_tokens: int | None = 16  #: tokens to generate at most; None: up to max_model_len
    temperature: float = 1.0  #: 0 is greedy (ties go to the lowest id)
    top_k: int = 0  #: keep the k likeliest tokens; 0 or -1: all
    top_p: float = 1.0  #: keep the smallest set of likeliest tokens whose probability reaches top_p
    min_p: float = 0.0  #: keep tokens at least min_p times as likely as the likeliest
    seed: int | None = None  #: None: derived from the engine's seed and the request's ordinal
    stop: str | tuple[str, ...] | list[str] = ()  #: strings that end the text; normalised to a tuple
    stop_token_ids: tuple[int, ...] | list[int] = ()  #: tokens that end it, kept out of the text
    ignore_eos: bool = False  #: go on after the model's end token
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0  #: no end token, stop token or stop string ends the text before this many
    repetition_penalty: float = 1.0  #: over prompt and output
    presence_penalty: float = 0.0  #: over the output
    frequency_penalty: float = 0.0  #: over the output
    logit_bias: Mapping[int, float] = field(default_factory=dict)  #: token id → added to its logit
    logprobs: int | None = None  #: the chosen token's logprob and this many of the likeliest (0–20)
