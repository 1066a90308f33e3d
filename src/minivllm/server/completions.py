"""``POST /v1/completions``."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from fastapi import APIRouter, Response

from minivllm.engine.admission import numbered
from minivllm.engine.inference_engine import InferenceEngine
from minivllm.engine.outputs import CompletionOutput, RequestOutput
from minivllm.sampling_params import SamplingParams
from minivllm.server.conversion import completion_params, several
from minivllm.server.generation import Format, Generation, Head, finish_reason
from minivllm.server.json_body import JSONRoute
from minivllm.server.logprobs import CompletionLogprobsBuilder, joined, prompt_logprobs
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
    engine, prompts = service.engine, several(body.prompt)
    # Without a tokenizer ids can be continued, but logprobs have no names to go by.
    tokenizer = engine.tokenizer if params.logprobs is None else service.tokenizer
    texts = CompletionFormat(Head.new("cmpl", service), tokenizer, params, body)
    return Generation(service, body, params, lambda: token_ids(engine, prompts), len(prompts), texts)


def token_ids(engine: InferenceEngine, prompts: Seq[str | list[int]]) -> list[list[int]]:
    """The prompts as token ids. Raises as ``InferenceEngine.encode``, and says which one is meant."""
    result = []
    for i, prompt in enumerate(prompts):
        with numbered("prompt", i, len(prompts)):
            result.append(engine.encode(prompt) if isinstance(prompt, str) else prompt)
    return result


class CompletionFormat(Format):
    """Text completions, whole and in pieces. Choice i of prompt p is number p * n + i."""

    def __init__(
        self, head: Head, tokenizer: Tokenizer | None, params: SamplingParams, body: CompletionRequest
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._params = params
        self._prompts: Seq[str | list[int]] = several(body.prompt)
        self._echo = bool(body.echo)
        self._scored_echo = self._echo and params.logprobs is not None
        self._tells_prompt_logprobs = body.prompt_logprobs is not None
        self._usage_asked = body.wants_usage
        self._builders: dict[int, CompletionLogprobsBuilder] = {}  # by the choice's number

    def opening(self, num_prompts: int) -> list[Mapping[str, Any]]:
        """The prompts, if they are echoed. With logprobs they come once these are known."""
        if not self._echo or self._scored_echo:
            return []
        return [chunk for prompt in range(num_prompts) for chunk in self._echoes(prompt, None)]

    def chunks(self, prompt: int, output: RequestOutput) -> list[Mapping[str, Any]]:
        """What is new in each choice; its last event has no more than the reason."""
        chunks: list[Mapping[str, Any]] = []
        if self._scored_echo and output.prompt_logprobs is not None:
            chunks += self._echoes(prompt, self._prompt_part(prompt, output))
        for completion in output.outputs:
            index = prompt * self._params.n + completion.index
            logprobs = self._own_part(index, prompt, output, completion)
            if completion.text or (logprobs is not None and logprobs["tokens"]):
                chunks.append(self._completion([_choice(index, completion.text, logprobs)]))
            reason = finish_reason(completion)
            if reason is not None:
                chunks.append(self._completion([_choice(index, "", None, reason)]))
        return chunks

    def usage_chunk(self, usage: Usage) -> Mapping[str, Any]:
        """Without a choice."""
        return self._completion([]) | {"usage": usage}

    def whole(self, outputs: Seq[RequestOutput], usage: Usage) -> Mapping[str, Any]:
        """Every choice of every prompt."""
        choices = []
        for prompt, output in enumerate(outputs):
            before = self._echo_text(prompt) if self._echo else ""
            for completion in sorted(output.outputs, key=lambda completion: completion.index):
                index = prompt * self._params.n + completion.index
                logprobs = self._own_part(index, prompt, output, completion)
                if self._scored_echo and logprobs is not None:
                    logprobs = joined(self._prompt_part(prompt, output), logprobs)
                reason = finish_reason(completion) or "stop"
                choice = _choice(index, before + completion.text, logprobs, reason)
                if self._tells_prompt_logprobs:
                    choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or [])
                choices.append(choice)
        return self._completion(choices) | {"usage": usage}

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

    def _echoes(self, prompt: int, logprobs: CompletionLogprobs | None) -> list[Mapping[str, Any]]:
        first, text = prompt * self._params.n, self._echo_text(prompt)
        return [self._completion([_choice(first + i, text, logprobs)]) for i in range(self._params.n)]

    def _echo_text(self, prompt: int) -> str:
        given = self._prompts[prompt]
        if isinstance(given, str):
            return given
        return "" if self._tokenizer is None else self._tokenizer.decode(given)

    def _prompt_part(self, prompt: int, output: RequestOutput) -> CompletionLogprobs | None:
        if self._tokenizer is None or output.prompt_logprobs is None:
            return None
        given, tokens = self._prompts[prompt], output.prompt_token_ids
        skipped = self._tokenizer.special_ids
        if isinstance(given, str):  # then only the begin token that was put before it is not in the text
            spelled = given.startswith(self._tokenizer.bos_token)
            skipped = frozenset() if spelled or tokens[0] not in skipped else frozenset(tokens[:1])
        builder = CompletionLogprobsBuilder(
            self._tokenizer, skipped, start=0, continues_text=False, num_top=self._params.logprobs or 0
        )
        return builder.add(tokens, output.prompt_logprobs)

    def _own_part(
        self, index: int, prompt: int, output: RequestOutput, completion: CompletionOutput
    ) -> CompletionLogprobs | None:
        tokenizer = self._tokenizer
        if completion.logprobs is None or tokenizer is None:
            return None
        if index not in self._builders:
            has_text = any(
                tokenizer.token_bytes(i) for i in output.prompt_token_ids if i not in tokenizer.special_ids
            )
            self._builders[index] = CompletionLogprobsBuilder(
                tokenizer,
                tokenizer.special_ids if self._params.skip_special_tokens else frozenset(),
                start=len(self._echo_text(prompt)) if self._echo else 0,
                continues_text=has_text,
                num_top=self._params.logprobs or 0,
            )
        return self._builders[index].add(completion.token_ids, completion.logprobs)


def _choice(
    index: int, text: str, logprobs: CompletionLogprobs | None = None, reason: FinishReason | None = None
) -> CompletionChoice:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
