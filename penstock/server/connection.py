"""uvicorn's httptools protocol with the limits and the strictness it lacks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NoReturn

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from penstock.config import limits
from penstock.server.body import most_bytes
from penstock.server.encoding import encode_json
from penstock.server.error_shapes import error_object
from penstock.server.framing import (
    Chunks,
    Refused,
    WithoutUpgrade,
    authority_of,
    body_length,
    check_fields,
    check_start,
)
from penstock.server.patience import PatientTimer
from penstock.server.watching import WatchingProtocol
from penstock.server.websocket import Incoming, LimitedWebSocket, opening

ABORT = "penstock.abort"
ANNOUNCED = "penstock.announced"
_LINGER_S = 1.0
_HEAD_END = b"\r\n\r\n"


class LimitedProtocol(WatchingProtocol):
    """One connection.

    Request line and headers must come within `limits.HEADER_TIMEOUT_S` and `limits.MAX_HEADER_BYTES`, and what they say
    of the body must be what `framing` takes. When a response is complete before the request's body is, the connection
    is closed a moment later, so that the client can read the response but cannot go on sending. The scope's extension
    `ABORT` drops the connection with what is unsent; `ANNOUNCED` tells how long a chunked body will be at least.
    A request that opens a WebSocket, while no other is being answered, hands the connection on to `LimitedWebSocket`.
    """

    def __init__(self, *args: Any, incoming: Incoming, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._incoming = incoming
        self._opening: bytes | None = None  # the head of a request for a WebSocket
        self._timer: PatientTimer | None = None
        self._in_head = True
        self._head_bytes = 0
        self._field_bytes = 0
        self._tail = b""  # of a head that has not ended
        self._lines = WithoutUpgrade()
        self._body_left = 0
        self._chunks: Chunks | None = None
        self._unparsed = bytearray()
        self._refusal: Refused | None = None
        self._deaf = False  # nothing more is read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm(limits.HEADER_TIMEOUT_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._goes_on(data):
            self._body_left -= len(data)
            super().data_received(data)
        else:
            self._unparsed += data
            self._parse()
        if self._opening is not None:
            return
        answered = self.cycle is None or self.cycle.response_complete
        if answered and self._timer is None and self.timeout_keep_alive_task is None:  # what came began no request
            self._arm(limits.HEADER_TIMEOUT_S, self.transport.close)

    def _goes_on(self, data: bytes) -> bool:
        """Whether all of this is more of a body that does not end with it: a large one is copied less often."""
        held = self._unparsed or self._deaf or self.crowded or self.transport.is_closing()
        return len(data) < self._body_left and not held

    def _parse(self) -> None:
        """Takes what has come until the connection is crowded; the rest is taken as its requests are answered."""
        data, start = self._unparsed, 0
        try:
            while start < len(data) and not (self._deaf or self.crowded or self.transport.is_closing()):
                start = self._feed_part(data, start)
                if self._opening is not None:
                    self._hand_on(self._opening, bytes(data[start:]))
                    return
        except Refused as refusal:
            self._refuse(refusal)
        if self._deaf or self.transport.is_closing():
            start = len(data)
        del data[:start]
        self.flow.hold(len(data) > HIGH_WATER_LIMIT)

    def _feed_part(self, data: bytearray, start: int) -> int:
        """Feeds the parser one head or body, so that it is known where each of them begins; returns where it ends.

        Raises:
            Refused: what is to be read of it, or was, is too much or no HTTP.
        """
        in_body = self._chunks is not None or self._body_left > 0
        end = self._part_end(data, start)
        if end is None:
            return start
        part = bytes(data[start:end])
        super().data_received(part if in_body else self._lines.take(part, last=not self._tail))
        if self._chunks is not None and self._chunks.complete:
            self._chunks = None
        if self._head_bytes > limits.MAX_HEADER_BYTES and not (self._deaf or self.transport.is_closing()):
            raise _head_too_large()
        return end

    def _part_end(self, data: bytearray, start: int) -> int | None:
        """Where the head or body that `data` goes on with at `start` ends in it; None where no more is to be read."""
        if self._chunks is not None:
            end = self._chunks.take(data, start)
            self.scope["extensions"][ANNOUNCED]["bytes"] = self._chunks.announced
            if self._chunks.announced > most_bytes(self.scope):  # is refused by whoever reads the body
                self._deaf = True
                self.cycle.message_event.set()
                return None
            return end
        if self._body_left:
            end = min(len(data), start + self._body_left)
            self._body_left -= end - start
            return end
        end = self._head_end(data, start)
        self._head_bytes += end - start
        return end

    def _head_end(self, data: bytearray, start: int) -> int:
        across = (self._tail + data[start : start + 3]).find(_HEAD_END)
        begin = start + across - len(self._tail) if across >= 0 else data.find(_HEAD_END, start)
        if across < 0 and begin < 0:
            self._tail = (self._tail + data[max(start, len(data) - 3) :])[-3:]
            return len(data)
        self._tail = b""
        return begin + len(_HEAD_END)

    def on_message_begin(self) -> None:
        self._in_head, self._field_bytes = True, 0
        self._arm(limits.HEADER_TIMEOUT_S, self._head_timed_out)
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: {"call": self.transport.abort}, ANNOUNCED: {"bytes": 0}}

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if self._in_head:  # what follows a chunked body must not change what was decided from the head
            super().on_header(name, value)
            if len(self.headers) > limits.MAX_HEADERS:
                self._raise(_head_too_large())

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        self._disarm()
        version = self.parser.get_http_version()
        try:
            check_start(self.parser.get_method().decode("ascii"), version)
            check_fields(version, self.headers)
            authority = authority_of(self.url)
        except Refused as refusal:
            self._raise(refusal)
        if authority is not None:
            self.headers[:] = [*((n, v) for n, v in self.headers if n != b"host"), (b"host", authority)]
        if version == "1.1" and (self.cycle is None or self.cycle.response_complete):
            method = self.parser.get_method().decode("ascii")
            self._opening = opening(method, self.url, self.headers, WithoutUpgrade.NAME)
            if self._opening is not None:
                return
        self.expect_100_continue = self.expect_100_continue and version != "1.0"
        self._in_head = False
        chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        self._chunks, self._body_left = (Chunks(), 0) if chunked else (None, body_length(self.headers))
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._disarm()
        if self._opening is None:
            super().on_message_complete()

    def _hand_on(self, head: bytes, rest: bytes) -> None:
        """Leaves the connection to the protocol of WebSockets, with what has come behind the request."""
        self._disarm()
        self._unset_keepalive_if_required()
        self.connections.discard(self)
        made = LimitedWebSocket(
            self.config, self.server_state, self.app_state, incoming=self._incoming, socket=self.socket_calls()
        )
        made.connection_made(self.transport)
        self.transport.set_protocol(made)
        made.data_received(head)
        if rest:
            made.data_received(rest)

    def socket_calls(self) -> dict[str, Callable[[], None]]:
        """What a WebSocket calls of the connection that it came on."""
        return {"abort": self.transport.abort, "busy": _nothing, "rest": _nothing, "closed": _nothing}

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._parse()
        if self.cycle is not None and self.cycle.response_complete and self.cycle.more_body:
            self._arm(_LINGER_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """Called for what the parser does not take."""
        self._refuse(self._refusal or Refused(HTTPStatus.BAD_REQUEST, "The request is not valid HTTP."))

    def _refuse(self, refusal: Refused) -> None:
        """Answers, unless a response has begun, and closes; requests before this one are answered first."""
        self._deaf = True
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and (self._in_head or not cycle.more_body):
            cycle.keep_alive = False
            return
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self._answer(refusal.status, str(refusal))
        self.transport.close()

    def _raise(self, refusal: Refused) -> NoReturn:
        """Ends parsing from within one of the parser's callbacks, none of whose errors reach us as they are."""
        self._refusal = refusal
        raise refusal

    def _head_timed_out(self) -> None:
        if not self.transport.is_closing():
            self._refuse(Refused(HTTPStatus.REQUEST_TIMEOUT, "The request's headers came in too slowly."))

    def _answer(self, status: HTTPStatus, message: str) -> None:
        body = encode_json(error_object(status, message))
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)

    def _count(self, size: int) -> None:
        self._field_bytes += size
        if self._field_bytes > limits.MAX_HEADER_BYTES:
            self._raise(_head_too_large())

    def _arm(self, seconds: float, action: Any) -> None:
        self._disarm()
        self._timer = PatientTimer(self.loop, seconds, action)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _nothing() -> None:
    """Where nobody counts connections."""


def _head_too_large() -> Refused:
    most = f"{limits.MAX_HEADER_BYTES} bytes or {limits.MAX_HEADERS} fields"
    message = f"The request line and headers are larger than {most}; send less."
    return Refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message)
