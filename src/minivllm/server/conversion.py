"""From a request's body to SamplingParams: the one place where OpenAI's names become the engine's."""

import re
from typing import Any

from minivllm.errors import shown
from minivllm.sampling_params import MAX_LOGPROBS, SamplingParams
from minivllm.server.errors import bad_request
from minivllm.server.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest

#: Fields that mean the same on both sides. Null, or absent: the default of SamplingParams.
_SAME = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
    "include_stop_str_in_output", "skip_special_tokens", "min_tokens", "presence_penalty",
    "frequency_penalty", "repetition_penalty",
)  # fmt: skip
#: What the engine cannot do yet: the values at which a field asks for nothing.
_NOT_YET: dict[str, tuple[object, ...]] = {
    "n": (None, 1),
    "prompt_logprobs": (None,),
    "cache_salt": (None,),
    "priority": (None, 0),
}
COMPLETION_MAX_TOKENS = 16
_TOKEN_ID = re.compile(r"[0-9]{1,10}")


def chat_params(body: ChatCompletionRequest) -> SamplingParams:
    """Of a chat completion; without a limit the answer goes on up to the context's end.

    Raises:
        RequestError: a value is out of its range.
        ApiError: fields contradict each other.
    """
    if (
        None not in (body.max_tokens, body.max_completion_tokens)
        and body.max_tokens != body.max_completion_tokens
    ):
        raise bad_request(
            f"max_tokens is {shown(body.max_tokens)} and max_completion_tokens is "
            f"{shown(body.max_completion_tokens)}; give one of them",
            "max_tokens",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    most = _number_of_logprobs("top_logprobs", body.top_logprobs)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return _params(body, max_tokens, (most or 0) if body.logprobs else None)


def completion_params(body: CompletionRequest) -> SamplingParams:
    """Of a text completion. Raises as ``chat_params``."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_request(
            f"best_of is {shown(body.best_of)}; all samples that are drawn are answered, so it must be n",
            "best_of",
        )
    if body.echo and body.logprobs is not None:
        raise bad_request("echo with logprobs is not supported; leave one of them out", "echo")
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return _params(body, max_tokens, _number_of_logprobs("logprobs", body.logprobs))


def _params(body: GenerationRequest, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    for name, neutral in _NOT_YET.items():
        if getattr(body, name) not in neutral:
            raise bad_request(f"{name} is not supported; leave it out", name)
    values = {name: getattr(body, name) for name in _SAME if getattr(body, name) is not None}
    if body.logit_bias is not None:
        values["logit_bias"] = _logit_bias(body.logit_bias)
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **values)


def _number_of_logprobs(name: str, value: int | None) -> int | None:
    """Checked here, where the field has its own name."""
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise bad_request(f"{name} must be from 0 to {MAX_LOGPROBS}, not {shown(value)}", name)
    return value


def _logit_bias(value: Any) -> Any:
    """JSON has token ids as strings. Whatever is no object is left to SamplingParams to refuse."""
    if not isinstance(value, dict):
        return value
    for key in value:
        if not _TOKEN_ID.fullmatch(key):
            raise bad_request(f"logit_bias has {shown(key)} as a key; keys are token ids", "logit_bias")
    return {int(key): bias for key, bias in value.items()}
