"""``POST /v1/chat/completions``."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from fastapi import APIRouter, Response

from minivllm.engine.inference_engine import InferenceEngine
from minivllm.engine.outputs import RequestOutput
from minivllm.sampling_params import SamplingParams
from minivllm.server.conversion import chat_params
from minivllm.server.generation import Format, Generation, Head, finish_reason
from minivllm.server.json_body import JSONRoute
from minivllm.server.logprobs import chat_logprobs, prompt_logprobs
from minivllm.server.protocol import ChatCompletionRequest, Message, TemplateFields
from minivllm.server.responses import (
    ERRORS,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChunkChoice,
    Usage,
)
from minivllm.server.service import ServiceOf
from minivllm.text.tokenizer import Tokenizer

router = APIRouter(route_class=JSONRoute)


@router.post(
    "/v1/chat/completions",
    responses={200: {"model": ChatCompletion, "content": {"text/event-stream": {}}}, **ERRORS},
)
async def create_chat_completion(body: ChatCompletionRequest, service: ServiceOf) -> Response:
    """Answer a conversation."""
    service.check_model(body.model)
    params = chat_params(body)
    engine = service.engine
    chat = ChatFormat(Head.new("chatcmpl", service), service.tokenizer, params, body.wants_usage)
    return Generation(service, body, params, lambda: [chat_prompt(engine, body.messages, body)], chat)


def chat_prompt(engine: InferenceEngine, messages: Seq[Message], wishes: TemplateFields) -> list[int]:
    """The conversation as the model wants it. Its template spells out the begin token: none is added."""
    continues = bool(wishes.continue_final_message)
    add = wishes.add_generation_prompt
    return engine.chat_prompt(
        [_template_message(message) for message in messages],
        add_generation_prompt=not continues if add is None else add,
        continue_final_message=continues,
        template_kwargs=wishes.chat_template_kwargs,
    )


def _template_message(message: Message) -> dict[str, Any]:
    """With the names that templates know: "developer" is OpenAI's newer word for "system"."""
    plain = message.model_dump(exclude_unset=True)
    if message.role == "developer":
        plain["role"] = "system"
    if message.role == "assistant" and message.content is None and not plain.get("tool_calls"):
        plain["content"] = ""
    return plain


class ChatFormat(Format):
    """Chat completions and their chunks."""

    def __init__(self, head: Head, tokenizer: Tokenizer, params: SamplingParams, usage_asked: bool) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._num_choices = params.n
        self._num_top = params.logprobs or 0
        self._usage_asked = usage_asked

    def opening(self, num_prompts: int) -> list[Mapping[str, Any]]:
        """Every choice's role."""
        return [
            self._chunk(
                {
                    "index": index,
                    "delta": {"role": "assistant", "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                }
            )
            for index in range(self._num_choices)
        ]

    def chunks(self, prompt: int, output: RequestOutput) -> list[Mapping[str, Any]]:
        """What is new in each choice; its last event has no more than the reason."""
        chunks: list[Mapping[str, Any]] = []
        for completion in output.outputs:
            logprobs = chat_logprobs(completion, self._tokenizer, self._num_top)
            if completion.text or (logprobs is not None and logprobs["content"]):
                chunks.append(
                    self._chunk(
                        {
                            "index": completion.index,
                            "delta": {"content": completion.text},
                            "logprobs": logprobs,
                            "finish_reason": None,
                        }
                    )
                )
            reason = finish_reason(completion)
            if reason is not None:
                chunks.append(
                    self._chunk(
                        {"index": completion.index, "delta": {}, "logprobs": None, "finish_reason": reason}
                    )
                )
        return chunks

    def usage_chunk(self, usage: Usage) -> Mapping[str, Any]:
        """Without a choice."""
        return self._chunk(None) | {"usage": usage}

    def whole(self, outputs: Seq[RequestOutput], usage: Usage) -> Mapping[str, Any]:
        """Every choice."""
        choices: list[ChatChoice] = [
            {
                "index": completion.index,
                "message": {"role": "assistant", "content": completion.text, "refusal": None},
                "logprobs": chat_logprobs(completion, self._tokenizer, self._num_top),
                "finish_reason": finish_reason(completion) or "stop",
            }
            for completion in sorted(outputs[0].outputs, key=lambda completion: completion.index)
        ]
        answer: ChatCompletion = {
            "id": self._head.id,
            "object": "chat.completion",
            "created": self._head.created,
            "model": self._head.model,
            "system_fingerprint": self._head.system_fingerprint,
            "choices": choices,
            "usage": usage,
        }
        if outputs[0].prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(outputs[0].prompt_logprobs)
        return answer

    def _chunk(self, choice: ChunkChoice | None) -> ChatCompletionChunk:
        chunk: ChatCompletionChunk = {
            "id": self._head.id,
            "object": "chat.completion.chunk",
            "created": self._head.created,
            "model": self._head.model,
            "system_fingerprint": self._head.system_fingerprint,
            "choices": [] if choice is None else [choice],
        }
        if self._usage_asked:
            chunk["usage"] = None
        return chunk
