"""uvicorn's httptools protocol with the limits it lacks: header size, header time, and bodies nobody reads."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from penstock.config import limits
from penstock.server.errors import encode_json, error_object
from penstock.server.patience import PatientTimer
from penstock.server.watching import WatchingProtocol

ABORT = "penstock.abort"
_LINGER_S = 1.0


class _HeadTooLarge(Exception):
    """Raised inside a parser callback; the parser turns it into a parser error."""


class LimitedProtocol(WatchingProtocol):
    """One connection.

    Request line and headers must come within `limits.HEADER_TIMEOUT_S` and `limits.MAX_HEADER_BYTES`. When a response
    is complete before the request's body is, the connection is closed a moment later, so that the client can read
    the response but cannot go on sending. The scope's extension `ABORT` drops the connection with what is unsent.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: PatientTimer | None = None
        self._in_head = True
        self._head_bytes = 0
        self._field_bytes = 0
        self._too_large = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm(limits.HEADER_TIMEOUT_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > limits.MAX_HEADER_BYTES and not self.transport.is_closing():
            self._too_large = True
            self.send_400_response("")

    def on_message_begin(self) -> None:
        self._in_head, self._field_bytes = True, 0
        self._arm(limits.HEADER_TIMEOUT_S, self._head_timed_out)
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: {"call": self.transport.abort}}

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if self._in_head:  # what follows a chunked body must not change what was decided from the head
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        self._disarm()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._disarm()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle is not None and self.cycle.response_complete and self.cycle.more_body:
            self._arm(_LINGER_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP (400) or has too large a head (431), unless a response has begun; then closes."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            if self._too_large:
                message = f"The request line and headers are larger than {limits.MAX_HEADER_BYTES} bytes; send less."
                self._answer(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message)
            else:
                self._answer(HTTPStatus.BAD_REQUEST, "The request is not valid HTTP.")
        self.transport.close()

    def _head_timed_out(self) -> None:
        if not self.transport.is_closing():
            self._answer(HTTPStatus.REQUEST_TIMEOUT, "The request's headers came in too slowly.")
        self.transport.close()

    def _answer(self, status: HTTPStatus, message: str) -> None:
        body = encode_json(error_object(status, message))
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)

    def _count(self, size: int) -> None:
        self._field_bytes += size
        if self._field_bytes > limits.MAX_HEADER_BYTES:
            self._too_large = True
            raise _HeadTooLarge

    def _arm(self, seconds: float, action: Any) -> None:
        self._disarm()
        self._timer = PatientTimer(self.loop, seconds, action)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
