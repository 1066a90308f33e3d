"""``POST /v1/completions``."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from fastapi import APIRouter, Response

from minivllm.engine.admission import numbered
from minivllm.engine.inference_engine import InferenceEngine
from minivllm.engine.outputs import CompletionOutput, RequestOutput
from minivllm.sampling_params import SamplingParams
from minivllm.server.conversion import completion_params
from minivllm.server.generation import Format, Generation, Head, finish_reason
from minivllm.server.json_body import JSONRoute
from minivllm.server.logprobs import CompletionLogprobsBuilder
from minivllm.server.protocol import CompletionRequest
from minivllm.server.responses import (
    ERRORS,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FinishReason,
    Usage,
)
from minivllm.server.service import ServiceOf
from minivllm.text.tokenizer import Tokenizer

router = APIRouter(route_class=JSONRoute)


@router.post(
    "/v1/completions",
    responses={200: {"model": Completion, "content": {"text/event-stream": {}}}, **ERRORS},
)
async def create_completion(body: CompletionRequest, service: ServiceOf) -> Response:
    """Continue one or several texts."""
    service.check_model(body.model)
    params = completion_params(body)
    engine, usage_asked = service.engine, bool(body.stream_options and body.stream_options.include_usage)
    prompts = _several(body.prompt)
    return Generation(
        service,
        CompletionFormat(
            Head.new("cmpl", service),
            engine.tokenizer,
            prompts if body.echo else None,
            params,
            body.n or 1,
            usage_asked,
        ),
        lambda: _token_ids(engine, prompts),
        params,
        stream=bool(body.stream),
        include_usage=usage_asked,
    )


def _several(prompt: Any) -> list[Any]:
    """The prompts, whether there was one or a list of them."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def _token_ids(engine: InferenceEngine, prompts: Seq[str | list[int]]) -> list[list[int]]:
    result = []
    for i, prompt in enumerate(prompts):
        with numbered("prompt", i, len(prompts)):
            result.append(engine.encode(prompt) if isinstance(prompt, str) else prompt)
    return result


class CompletionFormat(Format):
    """Text completions, whole and in pieces.

    Args:
        echoed: the prompts, if the texts are to begin with them.
    """

    def __init__(
        self,
        head: Head,
        tokenizer: Tokenizer | None,
        echoed: Seq[str | list[int]] | None,
        params: SamplingParams,
        num_choices: int,
        usage_asked: bool,
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._params = params
        self._echoed = [self._text(prompt) for prompt in echoed or ()]
        self._num_choices = num_choices
        self._usage_asked = usage_asked
        self._logprobs: dict[int, CompletionLogprobsBuilder] = {}  # by choice

    def opening(self, num_prompts: int) -> list[Mapping[str, Any]]:
        """The prompts, if they were asked for."""
        return [
            self._completion([self._choice(prompt * self._num_choices + i, text)])
            for prompt, text in enumerate(self._echoed)
            for i in range(self._num_choices)
        ]

    def chunks(self, prompt: int, output: RequestOutput) -> list[Mapping[str, Any]]:
        """What is new in each choice; its last event has no more than the reason."""
        chunks: list[Mapping[str, Any]] = []
        for completion in output.outputs:
            index = prompt * self._num_choices + completion.index
            logprobs = self._new_logprobs(index, output, completion)
            if completion.text or (logprobs is not None and logprobs["tokens"]):
                chunks.append(self._completion([self._choice(index, completion.text, logprobs)]))
            reason = finish_reason(completion)
            if reason is not None:
                chunks.append(self._completion([self._choice(index, "", None, reason)]))
        return chunks

    def usage_chunk(self, usage: Usage) -> Mapping[str, Any]:
        """Without a choice."""
        return self._completion([]) | {"usage": usage}

    def whole(self, outputs: Seq[RequestOutput], usage: Usage) -> Mapping[str, Any]:
        """Every choice of every prompt."""
        choices = []
        for prompt, output in enumerate(outputs):
            before = self._echoed[prompt] if self._echoed else ""
            for completion in sorted(output.outputs, key=lambda completion: completion.index):
                index = prompt * self._num_choices + completion.index
                logprobs = self._new_logprobs(index, output, completion)
                reason = finish_reason(completion) or "stop"
                choices.append(self._choice(index, before + completion.text, logprobs, reason))
        return self._completion(choices) | {"usage": usage}

    def _choice(
        self,
        index: int,
        text: str,
        logprobs: CompletionLogprobs | None = None,
        reason: FinishReason | None = None,
    ) -> CompletionChoice:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        completion: Completion = {
            "id": self._head.id,
            "object": "text_completion",
            "created": self._head.created,
            "model": self._head.model,
            "system_fingerprint": self._head.system_fingerprint,
            "choices": choices,
        }
        if self._usage_asked:
            completion["usage"] = None
        return completion

    def _text(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        return "" if self._tokenizer is None else self._tokenizer.decode(prompt)

    def _new_logprobs(
        self, index: int, output: RequestOutput, completion: CompletionOutput
    ) -> CompletionLogprobs | None:
        if completion.logprobs is None or self._tokenizer is None:
            return None
        if index not in self._logprobs:
            special = self._tokenizer.special_ids
            self._logprobs[index] = CompletionLogprobsBuilder(
                self._tokenizer,
                self._params.skip_special_tokens,
                start=0,
                continues_text=any(
                    self._tokenizer.token_bytes(i) for i in output.prompt_token_ids if i not in special
                ),
            )
        return self._logprobs[index].add(
            completion.token_ids, [*completion.logprobs], self._params.logprobs or 0
        )
