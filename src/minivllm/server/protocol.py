"""What clients send: the bodies of the OpenAI API, and vLLM's names for what goes beyond it.

A field that is not listed here is refused, and so is one whose type is ``NotSupported``, unless it is null:
nothing that would change the answer is ignored. What a number may be is checked by ``SamplingParams``.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from minivllm.errors import shown

MAX_PROMPTS = 256
MAX_MESSAGES = 4096
MAX_TOOLS = 128


def _refuse(value: object) -> None:
    if value is not None:
        raise ValueError("this server does not support it; leave it out")


#: Only null, which clients send for "not asked for".
NotSupported = Annotated[None, BeforeValidator(_refuse)]
#: Checked by what uses it; this is only what the documentation says.
Stop = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
    ),
]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
LogitBias = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}]}
    ),
]
#: A JSON schema, or its text; checked where it is compiled.
Schema = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": kind} for kind in ("object", "string", "boolean", "null")]}),
]
Choices = Annotated[list[str] | None, Field(fail_fast=True)]
Content = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                    },
                },
                {"type": "null"},
            ]
        }
    ),
]


def _checked_prompts(value: object) -> object:
    """A string, a list of token ids, or a list of either; what is in the ids is checked with the prompt."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"must be a string, a list of strings, or (lists of) token ids, not {shown(value)}")
    if not value:
        raise ValueError("the list is empty; give at least one prompt")
    if isinstance(value[0], int):
        return value
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"there are {len(value):,} prompts; a request may have {MAX_PROMPTS}")
    for kind, kinds in ((str, "strings"), (list, "lists of token ids")):
        if isinstance(value[0], kind):
            for prompt in value:
                if not isinstance(prompt, kind):
                    raise ValueError(f"a list of {kinds} has {shown(prompt)} in it")
            return value
    raise ValueError(f"the list holds {shown(value[0])}; it must hold strings, token ids, or lists of these")


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
Prompts = Annotated[
    Any,
    BeforeValidator(_checked_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
            ]
        }
    ),
]


class Strict(BaseModel):
    """Takes no field that it does not know, and no type for another."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _known_fields_only(cls, data: Any) -> Any:
        """One complaint, however many fields are unknown."""
        if isinstance(data, dict):
            known = {field.alias or name for name, field in cls.model_fields.items()}
            for name in data:
                if name not in known:
                    raise PydanticCustomError(
                        "unknown_field", "{field} is no field of this request", {"field": shown(name)}
                    )
        return data


class StreamOptions(Strict):
    """How a stream ends."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  #: padding against eavesdroppers: there is none, as with false


class JSONSchemaFormat(Strict):
    """A schema, and what OpenAI has beside it. It is kept whether ``strict`` or not."""

    name: str
    description: str | None = None
    schema_: Schema = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """The form of an answer, as OpenAI has it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('json_schema goes with the type "json_schema", and with no other')
        return self


class StructuredOutputs(Strict):
    """The form of an answer, as vLLM has it."""

    json_: Schema = Field(None, alias="json")
    regex: str | None = None
    choice: Choices = None
    grammar: str | None = None
    json_object: bool | None = None


class ModelRequest(Strict):
    """What all requests to the model have in common. Null is the same as absent."""

    model: str | None = None  #: absent: the one that is served
    cache_salt: str | None = None
    priority: int | None = None
    user: str | None = None  #: whom OpenAI has it from; it changes no answer here


class EmbeddingRequest(ModelRequest):
    """``POST /v1/embeddings``."""

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None  #: absent: float
    pooling: Literal["mean", "last"] | None = None  #: absent: mean
    normalize: bool | None = None  #: absent: true
    dimensions: NotSupported = None


class GenerationRequest(ModelRequest):
    """What chat and text completions have in common."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: Stop = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias = None
    prompt_logprobs: int | None = None

    # What OpenAI keeps, bills or schedules by; it changes no answer here.
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    # The form of the answer; one of these at most.
    response_format: ResponseFormat | None = None
    guided_json: Schema = None
    guided_regex: str | None = None
    guided_choice: Choices = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream is to end with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams only; set stream to true, or leave it out")
        return self


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: NotSupported = None


class Function(Strict):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None  #: the JSON schema of its arguments; absent: any object
    strict: bool | None = None


class Tool(Strict):
    """A tool; functions are all there is."""

    type: Literal["function"]
    function: Function


@dataclass(frozen=True)
class NamedTool:
    """The choice of one function, which the model must call."""

    name: str


def _checked_tool_choice(value: object) -> object:
    """With one complaint, where pydantic's union would have one for each kind."""
    if value is None or (isinstance(value, str) and value in ("none", "auto", "required")):
        return value
    match value:
        case {"type": "function", "function": {"name": str() as name, **more}, **others}:
            if not more and not others:
                return NamedTool(name)
    raise ValueError(
        f'must be "none", "auto", "required", or {{"type": "function", "function": {{"name": …}}}}, '
        f"not {shown(value)}"
    )


ToolChoice = Annotated[
    Any,
    BeforeValidator(_checked_tool_choice),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["none", "auto", "required", None]},
                {
                    "type": "object",
                    "properties": {
                        "type": {"const": "function"},
                        "function": {
                            "type": "object",
                            "properties": {"name": {"type": "string"}},
                            "required": ["name"],
                            "additionalProperties": False,
                        },
                    },
                    "required": ["type", "function"],
                    "additionalProperties": False,
                },
            ]
        }
    ),
]


class CalledFunction(BaseModel):
    """In the history of a conversation."""

    model_config = ConfigDict(strict=True, extra="allow", hide_input_in_errors=True)

    name: str
    arguments: str | dict[str, Any] | None = None  #: JSON text


class ToolCall(BaseModel):
    """In the history of a conversation."""

    model_config = ConfigDict(strict=True, extra="allow", hide_input_in_errors=True)

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """One message of a conversation; further keys are the chat template's."""

    model_config = ConfigDict(strict=True, extra="allow", hide_input_in_errors=True)

    role: str
    content: Content = None
    tool_calls: list[ToolCall] | None = None  #: an assistant's
    tool_call_id: str | None = None  #: the call that a message of the role "tool" answers


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class TemplateFields(Strict):
    """How a conversation becomes a prompt."""

    add_generation_prompt: bool | None = None  #: absent: true, unless the final message is to be continued
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None


class ChatCompletionRequest(GenerationRequest, TemplateFields):
    """``POST /v1/chat/completions``."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    tool_choice: ToolChoice = None  #: absent: auto
    parallel_tool_calls: bool | None = None  #: false: one call at the most; without tools it says nothing
    functions: NotSupported = None
    function_call: NotSupported = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    audio: NotSupported = None
    prediction: NotSupported = None
    reasoning_effort: NotSupported = None
    verbosity: NotSupported = None
    web_search_options: NotSupported = None
    moderation: NotSupported = None


class TokenizeRequest(TemplateFields):
    """``POST /tokenize``: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """Of a prompt: put the begin token first where the model wants one, as by default. A conversation's
    template spells out its special tokens."""
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Strict):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: TokenIds
