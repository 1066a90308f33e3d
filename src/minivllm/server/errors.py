"""Errors as OpenAI's clients expect them: ``{"error": {"message", "type", "param", "code"}}``.

Whatever a caller did wrong is a 400 (or 401, 404, 405, 408, 413, 429), never a 422 and never a 500.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from minivllm.engine.async_engine import EngineStoppedError
from minivllm.errors import ContextLengthError, ModelError, RequestError

logger = logging.getLogger(__name__)


class ApiError(HTTPException):
    """An answer that is an error."""

    def __init__(
        self,
        status_code: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status_code, message, dict(headers or {}))
        self.error = {"message": message, "type": kind, "param": param, "code": code}

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {"error": self.error}

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body(), self.status_code, self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400."""
    return ApiError(400, message, param=param, code=code)


def queue_full(num_waiting: int) -> ApiError:
    """429, with the seconds after which to ask again."""
    return ApiError(
        429,
        f"as many requests wait already as this server lets wait, {num_waiting:,}; try again soon",
        kind="rate_limit_error",
        code="queue_full",
        headers={"Retry-After": "1"},
    )


def unavailable(message: str, code: str) -> ApiError:
    """503: not yet, or not any more."""
    return ApiError(503, message, kind="server_error", code=code, headers={"Retry-After": "5"})


def timed_out(seconds: float) -> ApiError:
    """408, for a request that took longer than the server allows."""
    return ApiError(
        408, f"the answer took longer than {seconds:g} seconds", kind="timeout_error", code="timeout"
    )


def internal_error(message: str = "the server had an error; its log says more") -> ApiError:
    """500."""
    return ApiError(500, message, kind="server_error", code="internal_error")


def as_api_error(error: Exception) -> ApiError:
    """What a caller is told about an exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthError):
        return bad_request(str(error), error.param, "context_length_exceeded")
    if isinstance(error, RequestError):
        return bad_request(str(error), error.param)
    if isinstance(error, EngineStoppedError):
        return unavailable(str(error), "engine_stopped")
    if isinstance(error, ModelError):
        return internal_error(str(error))
    if isinstance(error, RequestValidationError):
        return _invalid_field(error.errors())
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    logger.error("a request failed", exc_info=error)
    return internal_error()


def install(app: FastAPI) -> None:
    """Let every error of the application leave it in this shape."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException) and not isinstance(error, ApiError):
            error = _routing_error(request, error)
        return as_api_error(error).response()

    for kind in (HTTPException, RequestValidationError, RequestError, EngineStoppedError, Exception):
        app.add_exception_handler(kind, answer)


def _routing_error(request: Request, error: HTTPException) -> ApiError:
    route = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 404:
        return ApiError(404, f"there is no {route} on this server", code="unknown_url")
    if error.status_code == 405:
        message = f"{route} is not allowed; see /docs"
        return ApiError(405, message, code="method_not_allowed", headers=error.headers)
    return ApiError(error.status_code, str(error.detail), headers=error.headers)


def _invalid_field(errors: Sequence[Any]) -> ApiError:
    """The first of pydantic's complaints, with the field's place as ``messages[0].role``."""
    first = errors[0]
    param = ""
    for part in first["loc"][1:]:  # the first part is "body"
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else str(part)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "unknown_field":
        name = first["ctx"]["field"].strip("'")
        return bad_request(message, f"{param}.{name}" if param else name)
    if first["type"] == "missing":
        message = "this field is required" if param else "the request has no body; send a JSON object"
    return bad_request(f"{param}: {message}" if param else message, param or None)
