"""What the server answers: OpenAI's objects, as typed dicts, which cost nothing to make."""

from typing import Any, Literal

from typing_extensions import NotRequired, TypedDict

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(TypedDict):
    """Of the prompt tokens."""

    cached_tokens: int  #: taken from the prefix cache


class Usage(TypedDict):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(TypedDict):
    """A token that could have been chosen, in a chat."""

    token: str
    logprob: float  #: -9999.0 stands for -infinity, which JSON does not have
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token that was chosen, in a chat."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Of a chat's choice."""

    content: list[TokenLogprob]
    refusal: None


class FunctionCall(TypedDict):
    """What is called."""

    name: str
    arguments: str  #: JSON text


class ToolCall(TypedDict):
    """A call that the model asks for."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(TypedDict):
    """The answer."""

    role: Literal["assistant"]
    content: str | None  #: null if there are calls and no text
    refusal: None
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    """One of n answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class PromptLogprob(TypedDict):
    """A token at a place of the prompt, as vLLM has it."""

    logprob: float
    rank: int  #: 1: the likeliest
    decoded_token: str | None


#: For each token of the prompt: token id → logprob, its own and those of the likeliest; null for the first.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ChatCompletion(TypedDict):
    """``POST /v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobs]  #: if they were asked for


class FunctionDelta(TypedDict):
    """What is new in a call."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """A call that begins, with its id, type and name; or a piece of its arguments."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class Delta(TypedDict):
    """What is new in a choice."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChunkChoice(TypedDict):
    """A piece of one choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


class ChatCompletionChunk(TypedDict):
    """An event of a chat's stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]


class CompletionLogprobs(TypedDict):
    """Parallel lists, one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  #: characters of the text before the token


class CompletionChoice(TypedDict):
    """One text, or a piece of it when streaming."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    prompt_logprobs: NotRequired[PromptLogprobs]  #: if they were asked for


class Completion(TypedDict):
    """``POST /v1/completions``; also an event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class Embedding(TypedDict):
    """Of one input."""

    object: Literal["embedding"]
    index: int  #: of the input
    embedding: list[float] | str  #: base64: of its numbers as little-endian float32


class EmbeddingUsage(TypedDict):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(TypedDict):
    """``POST /v1/embeddings``."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class ModelCard(TypedDict):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    """``GET /v1/models``."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(TypedDict):
    """``POST /tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    """``POST /detokenize``."""

    prompt: str


class Version(TypedDict):
    """``GET /version``."""

    version: str


class Health(TypedDict):
    """``GET /health``."""

    status: Literal["ok"]


class Error(TypedDict):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """Every answer that is an error."""

    error: Error


#: For the documentation: the errors that any route may answer with.
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": description}
    for status, description in {
        400: "The request is wrong; `param` names the field.",
        401: "No valid API key.",
        404: "No such model.",
        408: "The body did not arrive, or the answer was not ready in time.",
        413: "The body is too large.",
        415: "The body is compressed.",
        429: "Too many requests are waiting.",
        500: "The server's or the model's error.",
        503: "The model is still being loaded, or the server is about to end.",
    }.items()
}
