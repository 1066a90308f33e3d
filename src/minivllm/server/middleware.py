"""What every request passes before it is looked at, outermost first: its id, the key, the body's size.

Plain ASGI, so that answers stream through untouched. Each layer answers by itself what it refuses.
"""

import asyncio
import hashlib
import hmac
import logging
import re
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minivllm.errors import shown
from minivllm.server.errors import ApiError, bad_request, internal_error, shutting_down

logger = logging.getLogger(__name__)

BODY_SECONDS = 60.0  # a body that has not arrived by then is not waited for
DISCARDED_BYTES = 64 * 2**20  # of a body that is too large: read and forgotten, so that the answer is heard
_CLOSE = {"Connection": "close"}  # with a refusal of what is still being sent
_PLAIN_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


def new_request_id() -> str:
    """One that no other answer has."""
    return f"req-{uuid.uuid4().hex}"


class HeadAsGet:
    """Lets whoever answers GET answer HEAD; the connection leaves the body out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope.get("method") == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class CrossOrigin(CORSMiddleware):
    """Starlette's, which refuses in the shape of all errors."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """What a browser is told that asks for permission."""
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        return bad_request(bytes(response.body).decode(), code="cors").response()


class RequestId:
    """Puts ``x-request-id`` on every answer, the caller's or a new one, and answers what nobody else did.

    Args:
        draining: is set once the server is to end; what is cancelled then was not done in time.
    """

    def __init__(self, app: ASGIApp, draining: asyncio.Event) -> None:
        self._app = app
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        wanted = Headers(scope=scope).get("x-request-id", "")
        request_id = wanted if _PLAIN_ID.fullmatch(wanted) else new_request_id()
        status, complete = 0, False

        async def send_with_id(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            else:
                complete = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            if complete and status == 500:  # Starlette raises what it has had answered, and so logged
                return
            if status:
                raise  # the connection is closed in the middle of the answer, which tells that it is broken
            logger.exception("request %s failed", request_id)
            await internal_error().response()(scope, receive, send_with_id)
        except asyncio.CancelledError:
            if not self._draining.is_set():
                raise
            if not status:
                await shutting_down().response()(scope, receive, send_with_id)


class Authentication:
    """Lets in who has one of the keys, as ``Authorization: Bearer KEY``. /health is open to all."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http" and scope["path"] != "/health" and not self._has_key(scope):
            error = ApiError(
                401,
                "this server wants an API key, as in `Authorization: Bearer KEY`; the one given is not valid",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        """The time that this takes does not depend on the keys: digests are compared, and always all."""
        kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = _digest(key.strip().encode("latin-1"))
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(matches) and kind.lower() == "bearer"


class BodyLimit:
    """Reads the body, as far as it may go, before anything else sees the request.

    Args:
        max_size: bytes.
        draining: once it is set, bodies that have not arrived are not waited for.
    """

    def __init__(self, app: ASGIApp, max_size: int, draining: asyncio.Event) -> None:
        self._app = app
        self._max_size = max_size
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            _check_framing(Headers(scope=scope))
            if scope["method"] not in ("GET", "OPTIONS"):
                body = await self._read_in_time(scope, receive)
                if body is None:
                    return
                receive = _giving(body, receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _read_in_time(self, scope: Scope, receive: Receive) -> bytes | None:
        """As ``_read``.

        Raises:
            ApiError: 408, 413, 503.
        """
        reading = asyncio.ensure_future(self._read(scope, receive))
        draining = asyncio.ensure_future(self._draining.wait())
        try:
            await asyncio.wait({reading, draining}, timeout=BODY_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                return reading.result()
            if draining.done():
                raise shutting_down(_CLOSE)
            message = f"the body has not arrived within {BODY_SECONDS:g} seconds"
            raise ApiError(408, message, kind="timeout_error", headers=_CLOSE)
        finally:
            reading.cancel()
            draining.cancel()
            await asyncio.gather(reading, draining, return_exceptions=True)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None: the client has gone.

        Raises:
            ApiError: 413.
        """
        headers = Headers(scope=scope)
        announced = headers.get("content-length", "")
        # Of 20 digits any number is too large; of more than 4300 Python makes none.
        if announced.isdecimal() and int(announced[:20]) > self._max_size and "expect" in headers:
            raise self._too_large()  # it waits to be asked for the body
        chunks: list[bytes] = []
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunk = message.get("body", b"")
            size += len(chunk)
            more = message.get("more_body", False)
            if size <= self._max_size:
                chunks.append(chunk)
            elif size > DISCARDED_BYTES:
                break
            else:
                chunks.clear()
        if size > self._max_size:
            raise self._too_large()
        return b"".join(chunks)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body is larger than the {self._max_size:,} bytes that this server takes",
            code="body_too_large",
            headers=_CLOSE,
        )


def _giving(body: bytes, receive: Receive) -> Receive:
    """``receive`` after a body that has been read."""
    given = False

    async def receive_again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


def _check_framing(headers: Headers) -> None:
    """Refuse bodies whose end or form others may see otherwise.

    Raises:
        ApiError: 400, 415.
    """
    if "content-length" in headers and "transfer-encoding" in headers:  # RFC 9112, 6.1: may be an attack
        message = "the request has content-length and transfer-encoding; it can have one"
        raise ApiError(400, message, headers=_CLOSE)
    encoding = headers.get("content-encoding", "identity")
    if encoding.lower() not in ("", "identity"):
        message = f"the content-encoding is {shown(encoding)}; send the body as it is"
        raise ApiError(415, message, headers=_CLOSE)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
