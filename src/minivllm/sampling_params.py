"""SamplingParams, BeamSearchParams, EmbeddingParams: what is asked of one request, and when it ends.

Knows nothing of models or tensors. What a value means exactly is defined by ``minivllm.sampler``.
"""

import math
import numbers
from collections.abc import Mapping
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, get_args

from minivllm.errors import RequestError, shown
from minivllm.structured_outputs import StructuredOutputsParams

__all__ = ["BeamSearchParams", "EmbeddingParams", "SamplingParams", "StructuredOutputsParams"]

Pooling = Literal["mean", "last"]

MAX_N = 64
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024  # characters
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROBS = 20
MAX_TOKENS_LIMIT = 2**31 - 1
MAX_TOKEN_ID = 2**31 - 1  # token ids are int32 everywhere
MAX_LOGIT_BIAS = 1024  # entries
MAX_TEMPERATURE = 100.0  # far beyond the point where every token is about equally likely
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0  # keeps logits finite and float32 exact enough


class FrozenDict(dict[int, float]):
    """A dict that stays as it is, so that requests can share it; it can be hashed, copied and pickled."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("sampling parameters cannot be changed; make new ones, as with dataclasses.replace")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type, tuple[dict[int, float]]]:
        return FrozenDict, (dict(self),)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of one request, with vLLM's names and meanings.

    Every value is checked on construction, and None for ``stop``, ``stop_token_ids`` or ``logit_bias``, which
    vLLM takes too, becomes empty; what depends on the model (token ids) is checked by
    ``check_vocabulary`` when the request is added. Numbers may be numpy's; they are kept as Python's.
    Executors get the real numbers as float32, so a temperature below about 1e-45 is 0, greedy; any other
    positive one is used as it is (the arithmetic is float64 and cannot overflow).

    Raises:
        RequestError: a value is out of range; ``param`` names the field.
    """

    n: int = 1  #: answers, 1 to 64: each with random numbers of its own, all from one seed and one prompt
    max_tokens: int | None = 16
    """Tokens to generate at most; None: up to max_model_len, or what fits n times."""
    temperature: float = 1.0  #: 0 is greedy (ties go to the lowest id); at most 100
    top_k: int = 0  #: keep the k likeliest tokens; 0 or -1: all
    top_p: float = 1.0  #: keep the smallest set of likeliest tokens whose probability reaches top_p
    min_p: float = 0.0  #: keep tokens at least min_p times as likely as the likeliest
    seed: int | None = None
    """0 to 2**64 - 1; None: derived from the engine's seed and the request's ordinal. Negative seeds are
    refused: for vLLM -1 means "no seed", for others it is a seed like any other."""
    stop: str | tuple[str, ...] | list[str] = ()  #: strings that end the text; normalised to a tuple
    stop_token_ids: tuple[int, ...] | list[int] = ()  #: tokens that end it, kept out of the text
    ignore_eos: bool = False  #: go on after the model's end token
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0  #: no end token, stop token or stop string ends the text before this many
    repetition_penalty: float = 1.0  #: over prompt and output; 0.01 to 100
    presence_penalty: float = 0.0  #: over the output; -2 to 2
    frequency_penalty: float = 0.0  #: over the output; -2 to 2
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """token id → added to its logit, -100 to 100; kept as a copy that cannot be changed."""
    logprobs: int | None = None  #: the chosen token's logprob and this many of the likeliest (0–20)
    prompt_logprobs: int | None = None  #: the same for each token of the prompt but the first
    structured_outputs: StructuredOutputsParams | None = None
    """The form that the answer must have; it ends where that is complete. The model's end token may come only
    where it can be; ``min_tokens`` would contradict it."""

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "n": _integer("n", self.n, 1, MAX_N),
            "temperature": _real("temperature", self.temperature, 0.0, MAX_TEMPERATURE),
            "top_k": _integer("top_k", self.top_k, -1, MAX_TOKEN_ID),
            "top_p": _real("top_p", self.top_p, 0.0, 1.0, above_low=True),
            "min_p": _real("min_p", self.min_p, 0.0, 1.0),
            "stop": _stop_strings(() if self.stop is None else self.stop),
            "stop_token_ids": _stop_token_ids(() if self.stop_token_ids is None else self.stop_token_ids),
            "min_tokens": _integer("min_tokens", self.min_tokens, 0, MAX_TOKENS_LIMIT),
            "repetition_penalty": _real(
                "repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
            ),
            "presence_penalty": _real("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "logit_bias": _logit_bias({} if self.logit_bias is None else self.logit_bias),
        }
        if self.max_tokens is not None:
            checked["max_tokens"] = _integer("max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT)
        if self.seed is not None:
            checked["seed"] = _integer("seed", self.seed, 0, 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                checked[name] = _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, not {shown(getattr(self, name))}", name)
        if self.max_tokens is not None and checked["min_tokens"] > checked["max_tokens"]:
            raise RequestError(
                f"min_tokens must be at most max_tokens, not {self.min_tokens} with {self.max_tokens}",
                "min_tokens",
            )
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise RequestError(
                f"structured_outputs must be a StructuredOutputsParams, not {shown(self.structured_outputs)}",
                "structured_outputs",
            )
        if self.structured_outputs is not None and checked["min_tokens"]:
            raise RequestError(
                "min_tokens cannot be kept with structured outputs, whose form says where the answer ends; "
                "leave it out",
                "min_tokens",
            )
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def check_vocabulary(self, vocab_size: int, eos_token_ids: tuple[int, ...] = ()) -> None:
        """Check what depends on the model: its number of tokens and its end tokens.

        Raises:
            RequestError: a token id is outside the vocabulary, or ``min_tokens`` would leave no token
                to choose before it is reached.
        """
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise RequestError(
                        f"{name} has token id {token_id}, but the vocabulary ends at {vocab_size - 1}",
                        name,
                    )
        end_token_ids = {*self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids)}
        if self.min_tokens and len(end_token_ids) >= vocab_size:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, but every one of the {vocab_size} tokens ends the text",
                "min_tokens",
            )


@dataclass(frozen=True)
class BeamSearchParams:
    """Settings of a beam search, with the meanings that transformers gives them.

    Raises:
        RequestError: a value is out of range; ``param`` names the field.
    """

    beam_width: int  #: texts that are followed at a time, and answered with; 1 to 64
    max_tokens: int | None = 16  #: tokens to generate at most; None: up to max_model_len, or what fits
    length_penalty: float = 1.0  #: texts are ranked by logprob / length ** length_penalty; -5 to 5
    early_stopping: bool | Literal["never"] = False
    """When the search is over, once it has found as many ended texts as its width. True: at once. False: when
    the best beam, as long as it is now, would rank below them all. "never": when no beam can rank above the
    worst of them, however long it gets."""
    ignore_eos: bool = False  #: go on after the model's end token
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "beam_width": _integer("beam_width", self.beam_width, 1, MAX_N),
            "length_penalty": _real("length_penalty", self.length_penalty, -5.0, 5.0),
        }
        if self.max_tokens is not None:
            checked["max_tokens"] = _integer("max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise RequestError(
                f"early_stopping must be true, false or 'never', not {shown(self.early_stopping)}",
                "early_stopping",
            )
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, not {shown(getattr(self, name))}", name)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def sampling_params(self) -> SamplingParams:
        """What it has in common with other requests: a sequence for each beam, without randomness."""
        return SamplingParams(
            n=self.beam_width,
            max_tokens=self.max_tokens,
            temperature=0,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
        )


@dataclass(frozen=True)
class EmbeddingParams:
    """Settings of an embedding: one vector for a whole prompt, made of the model's last hidden states.

    Raises:
        RequestError: a value is none of those allowed; ``param`` names the field.
    """

    pooling: Pooling = "mean"  #: over all tokens of the prompt; "last": that of the last one, which sees all
    normalize: bool = True  #: scale it to length 1

    def __post_init__(self) -> None:
        if not isinstance(self.pooling, str) or self.pooling not in get_args(Pooling):
            raise RequestError(f"pooling must be 'mean' or 'last', not {shown(self.pooling)}", "pooling")
        if not isinstance(self.normalize, bool):
            raise RequestError(f"normalize must be true or false, not {shown(self.normalize)}", "normalize")

    def sampling_params(self) -> SamplingParams:
        """What it has in common with other requests. No token is drawn."""
        return SamplingParams(max_tokens=1, temperature=0)


#: What a request may ask for
RequestParams = SamplingParams | BeamSearchParams | EmbeddingParams


def _integer(name: str, value: object, low: int, high: int, said: str = "") -> int:
    """The value as an int within [low, high]; a bool is not an integer. ``said``: what it is, if not name."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) <= high:
        raise RequestError(
            f"{said or name} must be an integer from {low} to {high}, not {shown(value)}", name
        )
    return int(value)


def _real(
    name: str, value: object, low: float, high: float, said: str = "", *, above_low: bool = False
) -> float:
    """The value as a float within [low, high], or (low, high] if ``above_low``; NaN is in no interval."""
    number = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # an integer beyond 1e308
            number = math.inf
    if not low <= number <= high or (above_low and number == low):
        allowed = f"above {low:g} and at most {high:g}" if above_low else f"from {low:g} to {high:g}"
        raise RequestError(f"{said or name} must be a number {allowed}, not {shown(value)}", name)
    return number


def _listed(name: str, value: object, limit: int, what: str) -> AnySequence[object]:
    """The value, if it is a list or tuple of at most ``limit`` entries."""
    if not isinstance(value, list | tuple):
        raise RequestError(f"{name} must be a list of {what}, not {shown(value)}", name)
    if len(value) > limit:
        raise RequestError(f"{name} may have at most {limit} {what}, not {len(value)}", name)
    return value


def _stop_strings(value: object) -> tuple[str, ...]:
    strings: list[str] = []
    entries = [value] if isinstance(value, str) else value
    for stop in _listed("stop", entries, MAX_STOP_STRINGS, "stop strings"):
        if not isinstance(stop, str):
            raise RequestError(f"stop must hold strings, not {shown(stop)}", "stop")
        if not stop:
            raise RequestError("stop must not hold an empty string: it would end every text at once", "stop")
        if len(stop) > MAX_STOP_LENGTH:
            raise RequestError(
                f"a stop string may have at most {MAX_STOP_LENGTH} characters, not {len(stop)}", "stop"
            )
        if any("\ud800" <= character <= "\udfff" for character in stop):
            raise RequestError(f"stop has {shown(stop)}, which is no text: a lone surrogate is in it", "stop")
        strings.append(stop)
    return tuple(dict.fromkeys(strings))


def _stop_token_ids(value: object) -> tuple[int, ...]:
    entries = _listed("stop_token_ids", value, MAX_STOP_TOKEN_IDS, "token ids")
    said = "each of stop_token_ids"
    return tuple(dict.fromkeys(_integer("stop_token_ids", entry, 0, MAX_TOKEN_ID, said) for entry in entries))


def _logit_bias(value: object) -> FrozenDict:
    if not isinstance(value, Mapping):
        raise RequestError(
            f"logit_bias must map token ids to numbers from -100 to 100, not {shown(value)}", "logit_bias"
        )
    if len(value) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias may have at most {MAX_LOGIT_BIAS} entries, not {len(value)}", "logit_bias"
        )
    biases = {}
    for key, bias in value.items():
        token_id = _integer("logit_bias", key, 0, MAX_TOKEN_ID, "a token id in logit_bias")
        biases[token_id] = _real("logit_bias", bias, -100.0, 100.0, "a bias in logit_bias")
    return FrozenDict(biases)
