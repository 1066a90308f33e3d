"""From a request's body to SamplingParams: the one place where OpenAI's names become the engine's."""

import re
from dataclasses import replace
from typing import Any

from minivllm.errors import shown
from minivllm.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams
from minivllm.server.errors import bad_request
from minivllm.server.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest

#: Fields that mean the same on both sides. Null, or absent: the default of SamplingParams.
_SAME = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
    "include_stop_str_in_output", "skip_special_tokens", "min_tokens", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "n",
)  # fmt: skip
COMPLETION_MAX_TOKENS = 16
MAX_CHOICES = 1024  # of all prompts together
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
    num_choices = len(several(body.prompt)) * (body.n or 1)
    if num_choices > MAX_CHOICES:
        raise bad_request(
            f"the prompts times n are {shown(num_choices)} texts; a request may have {MAX_CHOICES:,}", "n"
        )
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = _params(body, max_tokens, _number_of_logprobs("logprobs", body.logprobs))
    if body.echo and params.logprobs is not None:
        most = max(params.logprobs, params.prompt_logprobs or 0)
        params = replace(params, prompt_logprobs=most)
    return params


def several(prompt: Any) -> list[Any]:
    """The prompts of a text completion, whether there was one or a list of them."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def _params(body: GenerationRequest, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    if body.stream and body.prompt_logprobs is not None:
        raise bad_request("a stream has no prompt_logprobs; leave out one of both", "prompt_logprobs")
    values = {name: getattr(body, name) for name in _SAME if getattr(body, name) is not None}
    if body.logit_bias is not None:
        values["logit_bias"] = _logit_bias(body.logit_bias)
    prompt_logprobs = _number_of_logprobs("prompt_logprobs", body.prompt_logprobs)
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **values)


def _number_of_logprobs(name: str, value: int | None) -> int | None:
    """Checked here, where the field has its own name."""
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise bad_request(f"{name} must be from 0 to {MAX_LOGPROBS}, not {shown(value)}", name)
    return value


def _logit_bias(value: Any) -> Any:
    """JSON has token ids as strings. What is no object, or too large, is left to SamplingParams to refuse."""
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        return value
    for key in value:
        if not _TOKEN_ID.fullmatch(key):
            raise bad_request(f"logit_bias has {shown(key)} as a key; keys are token ids", "logit_bias")
    return {int(key): bias for key, bias in value.items()}
