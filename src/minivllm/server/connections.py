"""Connections: how many there may be, and how long one may go without a request.

A client that sends nothing, or half a head, costs a file and gets ten seconds; one that comes when files run
short is sent away, so that the server never lacks a file for its own work. Knows nothing of the API but the
shape of its errors.
"""

import asyncio
import logging
import resource
import socket
import time
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from minivllm.server.errors import ApiError, bad_request
from minivllm.server.middleware import new_request_id

logger = logging.getLogger(__name__)

HEAD_SECONDS = 10.0  # longer than uvicorn keeps a connection on which nothing comes after an answer
BACKLOG = 128  # connections that the system holds ready; asyncio accepts as many in one go
MAX_FILES = 4096
SPARE_FILES = 32  # for what is no connection: the model, the prefix store, what libraries open
COMPLAINT_SECONDS = 60.0


class Listener(socket.socket):
    """A listening socket whose connections leave some of the process's files over.

    Files are numbered from the lowest free one, so the number of a new one says how many there are,
    connections in the middle of a TLS handshake among them.
    """

    _complained_at = float("-inf")

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection.

        Raises:
            ConnectionAbortedError: it was closed at once; there are too many.
        """
        connection, address = super().accept()
        max_files = _max_files()
        if connection.fileno() < max_files:
            return connection, address
        connection.close()
        if time.monotonic() - self._complained_at > COMPLAINT_SECONDS:
            self._complained_at = time.monotonic()
            logger.warning(
                "there are too many connections, and new ones are closed: this process may have %d files "
                "for them and all else (`ulimit -n`, and at most %d)",
                max_files,
                MAX_FILES,
            )
        raise ConnectionAbortedError


class Framing(h11.Connection):
    """h11's, with a short way for what a stream is made of: a piece of a body that goes out in chunks.

    Such a piece changes nothing about the connection's state, which h11 takes 4 µs to find out.
    """

    _in_chunks = False  # the body that is being sent

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        """h11's: the bytes of an event, which come next in the answer."""
        if type(event) is h11.Data and event.data and self._in_chunks and self.our_state is h11.SEND_BODY:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data)
        output = super().send(event)
        if type(event) is h11.Response and output is not None:
            self._in_chunks = b"\r\ntransfer-encoding: chunked\r\n" in output.lower()
        return output


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1, with a deadline for a request's head, and errors in the API's shape."""

    _deadline: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = Framing(h11.SERVER)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """asyncio's."""
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's."""
        self._unwatch()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """uvicorn's, for what has arrived."""
        super().handle_events()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's, for what is no HTTP."""
        self._refuse(bad_request(msg, code="invalid_http"))

    def _should_upgrade(self) -> bool:
        """A wish for another protocol is ignored, as HTTP has it; uvicorn would log how to fulfil it."""
        return False

    def _watch(self) -> None:
        """See that there is a deadline while, and only while, no request is being answered."""
        if self.transport.is_closing() or not (self.cycle is None or self.cycle.response_complete):
            self._unwatch()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self._is_late)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _is_late(self) -> None:
        unread, _ = self.conn.trailing_data
        if unread:
            message = f"the request's head has not arrived within {HEAD_SECONDS:g} seconds"
            self._refuse(ApiError(408, message, kind="timeout_error"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer without the application, unless an answer is under way, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = error.response()
            headers = [
                *response.raw_headers,
                (b"x-request-id", new_request_id().encode()),
                (b"connection", b"close"),
            ]
            reason = HTTPStatus(error.status_code).phrase.encode()
            for event in (
                h11.Response(status_code=error.status_code, headers=headers, reason=reason),
                h11.Data(data=bytes(response.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _max_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_FILES
    return min(soft - min(SPARE_FILES, soft // 4), MAX_FILES)
