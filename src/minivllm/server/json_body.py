"""Request bodies: strict JSON or a 400, quickly.

``jiter`` refuses what JSON does not have or leaves open (NaN, numbers without end, keys given twice, nesting
deeper than 200, lone surrogates, bytes that are no UTF-8), in time and memory proportional to the body, whose
size the middleware has limited.
"""

from collections.abc import Callable, Coroutine
from typing import Any

import jiter
from fastapi import Request, Response
from fastapi.routing import APIRoute

from minivllm.errors import shown
from minivllm.server.errors import bad_request


class JSONRoute(APIRoute):
    """A route whose body is parsed by ``parsed``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's, given a request that parses its body itself."""
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly


class _StrictRequest(Request):
    async def body(self) -> bytes:
        body = await super().body()
        content_type = self.headers.get("content-type", "")
        if body and content_type.split(";")[0].strip().lower() != "application/json":
            raise bad_request(f"the content-type is {shown(content_type)}; send application/json")
        return body

    async def json(self) -> Any:
        return parsed(await self.body())


def parsed(body: bytes, name: str = "the body") -> Any:
    """The value of a JSON text, which messages call ``name``.

    Raises:
        ApiError: 400, with what is wrong and where.
    """
    try:
        return jiter.from_json(body, allow_inf_nan=False, catch_duplicate_keys=True, cache_mode="none")
    except ValueError as error:
        raise bad_request(f"{name} is not JSON: {error}"[:300], code="invalid_json") from None
