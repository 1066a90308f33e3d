"""``POST /v1/chat/completions``."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Response

from minivllm.engine.inference_engine import InferenceEngine
from minivllm.engine.outputs import CompletionOutput, RequestOutput
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
    ChatFinishReason,
    ChatMessage,
    ChunkChoice,
    Delta,
    Usage,
)
from minivllm.server.service import ServiceOf
from minivllm.server.tools import AnswerParser, Tools, joined, tools_of, with_calls_as_text
from minivllm.text.tokenizer import Tokenizer

router = APIRouter(route_class=JSONRoute)


@router.post(
    "/v1/chat/completions",
    responses={200: {"model": ChatCompletion, "content": {"text/event-stream": {}}}, **ERRORS},
)
async def create_chat_completion(body: ChatCompletionRequest, service: ServiceOf) -> Response:
    """Answer a conversation."""
    service.check_model(body.model)
    tools = tools_of(body, service.tokenizer.chat_template)
    params = chat_params(body)
    if tools is not None and tools.form is not None:
        params = replace(params, structured_outputs=tools.form)
    engine = service.engine
    chat = ChatFormat(Head.new("chatcmpl", service), service.tokenizer, params, tools, body.wants_usage)
    told = body if tools is not None else body.model_copy(update={"tools": None})
    return Generation(service, body, params, lambda: [chat_prompt(engine, body.messages, told)], 1, chat)


def chat_prompt(engine: InferenceEngine, messages: Seq[Message], wishes: TemplateFields) -> list[int]:
    """The conversation as the model wants it. Its template spells out the begin token: none is added."""
    continues = bool(wishes.continue_final_message)
    add = wishes.add_generation_prompt
    template = None if engine.tokenizer is None else engine.tokenizer.chat_template
    return engine.chat_prompt(
        [with_calls_as_text(_template_message(message), template) for message in messages],
        tools=[tool.model_dump(exclude_none=True) for tool in wishes.tools] if wishes.tools else None,
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

    def __init__(
        self,
        head: Head,
        tokenizer: Tokenizer,
        params: SamplingParams,
        tools: Tools | None,
        usage_asked: bool,
    ) -> None:
        self._head = head
        self._parsers = [] if tools is None else [AnswerParser(tools) for _ in range(params.n)]
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
            deltas = self._deltas(completion)
            if not deltas and logprobs is not None and logprobs["content"]:
                deltas.append({"content": ""})
            for delta in deltas:
                chunks.append(
                    self._chunk(
                        {
                            "index": completion.index,
                            "delta": delta,
                            "logprobs": logprobs,
                            "finish_reason": None,
                        }
                    )
                )
                logprobs = None
            reason = self._finish_reason(completion)
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
        choices: list[ChatChoice] = []
        for completion in sorted(outputs[0].outputs, key=lambda completion: completion.index):
            content, calls = joined(self._deltas(completion))
            message: ChatMessage = {"role": "assistant", "content": content, "refusal": None}
            if calls:
                message["tool_calls"] = calls
            choices.append(
                {
                    "index": completion.index,
                    "message": message,
                    "logprobs": chat_logprobs(completion, self._tokenizer, self._num_top),
                    "finish_reason": self._finish_reason(completion) or "stop",
                }
            )
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

    def _deltas(self, completion: CompletionOutput) -> list[Delta]:
        """What is new in a choice."""
        if self._parsers:
            return self._parsers[completion.index].deltas(completion.text, completion.finished)
        return [{"content": completion.text}] if completion.text else []

    def _finish_reason(self, completion: CompletionOutput) -> ChatFinishReason | None:
        """After ``_deltas``."""
        reason = finish_reason(completion)
        if reason == "stop" and self._parsers and self._parsers[completion.index].has_calls:
            return "tool_calls"
        return reason

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
