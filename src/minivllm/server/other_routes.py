"""The routes beside completions: models, tokens, health, metrics, version."""

from fastapi import APIRouter, Response

import minivllm
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
    service.check_model(model)
    return _card(service)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, service: ServiceOf) -> Tokenized:
    """The token ids of a prompt or a conversation."""
    service.check_model(body.model)
    engine, tokenizer = service.engine, service.tokenizer

    def encode() -> list[int]:
        if body.messages is not None:
            return chat_prompt(engine, body.messages, body)
        return engine.encode(body.prompt or "", body.add_special_tokens is not False)

    tokens = await service.prepare(encode)
    texts = [tokenizer.token_text(token_id) for token_id in tokens] if body.return_token_strs else None
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
    tokenizer = service.tokenizer
    for token_id in body.tokens:
        if not 0 <= token_id < service.engine.vocab_size:
            last = service.engine.vocab_size - 1
            raise bad_request(f"tokens has {token_id}; token ids are 0 to {last:,}", "tokens")
    text = await service.prepare(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
    return {"prompt": text}


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
