"""The routes beside completions: models, tokens, health, metrics, version."""

from fastapi import APIRouter, HTTPException, Response

import minivllm
from minivllm.errors import shown
from minivllm.server.chat import chat_prompt
from minivllm.server.errors import bad_request
from minivllm.server.json_body import JSONRoute
from minivllm.server.protocol import DetokenizeRequest, TokenizeRequest
from minivllm.server.responses import (
    ERRORS,
    Detokenized,
    Health,
    ModelCard,
    ModelList,
    Tokenized,
    Version,
)
from minivllm.server.service import Service, ServiceOf

router = APIRouter(route_class=JSONRoute, responses=ERRORS)


@router.get("/v1/models")
async def list_models(service: ServiceOf) -> ModelList:
    """The model that is served."""
    return {"object": "list", "data": [_card(service)]}


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, service: ServiceOf) -> ModelCard:
    """The model, if it is the one that is served."""
    if not model:
        raise HTTPException(404)  # as of any other route that there is not
    service.check_model(model)
    return _card(service)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, service: ServiceOf) -> Tokenized:
    """The token ids of a prompt or a conversation."""
    service.check_model(body.model)
    engine, tokenizer = service.engine, service.tokenizer

    def encode() -> tuple[list[int], list[str] | None]:
        if body.messages is not None:
            tokens = chat_prompt(engine, body.messages, body)
        else:
            tokens = engine.encode(body.prompt or "", body.add_special_tokens is not False)
        return tokens, [tokenizer.token_text(i) for i in tokens] if body.return_token_strs else None

    tokens, texts = await service.prepare(encode)
    return {
        "count": len(tokens),
        "max_model_len": engine.max_model_len,
        "tokens": tokens,
        "token_strs": texts,
    }


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, service: ServiceOf) -> Detokenized:
    """The text of token ids, special tokens included."""
    service.check_model(body.model)
    tokenizer, vocab_size = service.tokenizer, service.engine.vocab_size

    def decode() -> str:
        for token_id in body.tokens:
            if not 0 <= token_id < vocab_size:
                message = f"tokens has {shown(token_id)}; token ids are 0 to {vocab_size - 1:,}"
                raise bad_request(message, "tokens")
        return tokenizer.decode(body.tokens, skip_special_tokens=False)

    return {"prompt": await service.prepare(decode)}


@router.get("/health")
async def health(service: ServiceOf) -> Health:
    """Whether requests would be answered now: 503 if not."""
    service.health()
    return {"status": "ok"}


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(service: ServiceOf) -> Response:
    """Counts and times for Prometheus."""
    return Response(service.metrics.text(), media_type=service.metrics.content_type)


@router.get("/version")
async def version() -> Version:
    """Of mini-vllm."""
    return {"version": minivllm.__version__}


def _card(service: Service) -> ModelCard:
    return {
        "id": service.settings.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "mini-vllm",
        "max_model_len": service.engine.max_model_len,
    }
