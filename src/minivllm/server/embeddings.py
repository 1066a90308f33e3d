"""``POST /v1/embeddings``."""

import asyncio
import base64
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Literal

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Response
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from minivllm.engine.outputs import RequestOutput
from minivllm.errors import RequestError
from minivllm.sampling_params import EmbeddingParams
from minivllm.server.answer import Answer, check
from minivllm.server.completions import token_ids
from minivllm.server.conversion import several
from minivllm.server.json_body import JSONRoute
from minivllm.server.protocol import EmbeddingRequest
from minivllm.server.responses import ERRORS, Embedding, EmbeddingList
from minivllm.server.service import Service, ServiceOf

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/embeddings", responses={200: {"model": EmbeddingList}, **ERRORS})
async def create_embeddings(body: EmbeddingRequest, service: ServiceOf) -> Response:
    """A vector for each of one or several texts."""
    service.check_model(body.model)
    params = EmbeddingParams(body.pooling or "mean", body.normalize is not False)
    engine, prompts = service.engine, several(body.input)
    return Embeddings(service, body, params, lambda: token_ids(engine, prompts), len(prompts))


class Embeddings(Answer):
    """Embeddings to be computed, and then sent all at once."""

    def __init__(
        self,
        service: Service,
        body: EmbeddingRequest,
        params: EmbeddingParams,
        make_prompts: Callable[[], Seq[Seq[int]]],
        num_prompts: int,
    ) -> None:
        super().__init__(service, body, params, make_prompts, num_prompts)
        self._encoding = body.encoding_format or "float"

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._answers(whole=True) as answers:
                outputs = await answers.all()
        except RequestError as error:  # what is a prompt to the engine has another name here
            raise type(error)(str(error), "input" if error.param == "prompt" else error.param) from None
        for output in outputs:
            check(output)
        text = await asyncio.to_thread(_json, self._service.settings.model_name, self._encoding, outputs)
        self._started = True
        await Response(text, media_type="application/json")(scope, receive, send)


def _json(model: str, encoding: Literal["float", "base64"], outputs: Seq[RequestOutput]) -> bytes:
    data: list[Embedding] = []
    num_tokens = 0
    for index, output in enumerate(outputs):
        assert output.embedding is not None, "else it was ended, and check would have said so"
        encoded = output.embedding.tolist() if encoding == "float" else _base64(output.embedding)
        data.append({"object": "embedding", "index": index, "embedding": encoded})
        num_tokens += len(output.prompt_token_ids)
    answer: EmbeddingList = {
        "object": "list",
        "model": model,
        "data": data,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    return to_json(answer)


def _base64(embedding: npt.NDArray[np.float32]) -> str:
    return base64.b64encode(embedding.astype("<f4").tobytes()).decode()
