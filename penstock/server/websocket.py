"""uvicorn's WebSocket protocol with the limits it lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from penstock.config import limits

SOCKET: Final = "penstock.socket"
"""Extension of a WebSocket's scope: under "abort" what drops the connection, under "busy" and "rest" what to call when
something is done for its client and when nothing is."""
PATHS: Final = ("/v1/responses",)
"""How paths end that a WebSocket is opened at."""
TOLD: Final = frozenset(
    (
        *(b"host", b"origin", b"authorization", b"x-api-key", b"x-admin-key", b"user-agent", b"traceparent"),
        *(b"x-request-id", b"x-request-timeout", b"x-envoy-expected-rq-timeout-ms"),
        *(b"sec-websocket-key", b"sec-websocket-version", b"sec-websocket-protocol"),
    )
)
"""Fields of the request that opens one which are handed on."""
_MOST_BYTES: Final = 4096  # of such a field, and of the path: the parser of WebSockets takes 8 KiB a line
_TRY_LATER: Final = 1013  # a code of closing


class Incoming:
    """What parts of messages that are not complete hold in memory, of all connections of a process."""

    def __init__(self, most: int = limits.MAX_BODIES_BYTES) -> None:
        self._most, self._held = most, 0

    def grow(self, more: int) -> bool:
        """Whether there is room for so many bytes, which are then held."""
        if self._held + more > self._most:
            return False
        self._held += more
        return True

    def give_back(self, held: int) -> None:
        self._held -= held


def opening(method: str, target: bytes, fields: list[tuple[bytes, bytes]], upgrade: bytes) -> bytes | None:
    """The head that opens a WebSocket, in the fields that matter; None where a request asks for none, or not here.

    `upgrade` is what the field Upgrade is called in `fields`.
    """
    asked = {token.strip().lower() for name, value in fields if name == b"connection" for token in value.split(b",")}
    wanted = any(name == upgrade and value.strip().lower() == b"websocket" for name, value in fields)
    path = target.partition(b"?")[0].decode("latin-1")
    if method != "GET" or b"upgrade" not in asked or not wanted or not path.endswith(PATHS):
        return None
    told = [(name, value) for name, value in fields if name in TOLD]
    if len(target) > _MOST_BYTES or any(len(value) > _MOST_BYTES for _, value in told):
        return None
    lines = [b"GET %s HTTP/1.1" % target, b"connection: Upgrade", b"upgrade: websocket"]
    return b"\r\n".join([*lines, *(b"%s: %s" % field for field in told), b"", b""])


class LimitedWebSocket(WebSocketsSansIOProtocol):
    """One connection.

    Messages are as long as bodies may be at the most, and what has come of those that are not complete is bounded, of
    all connections together. They are handed on as bytes: whoever reads them checks that they are UTF-8.
    """

    def __init__(self, *args: Any, incoming: Incoming, socket: dict[str, Callable[[], None]], **kwargs: Any) -> None:
        """`socket` is the scope's extension; its "closed" is called when the connection has ended."""
        super().__init__(*args, **kwargs)
        self._incoming, self._socket = incoming, socket
        self._held = 0  # bytes of a message that is not complete

    def data_received(self, data: bytes) -> None:
        if not self._incoming.grow(len(data)):
            self._fail(_TRY_LATER, "Too many large messages are in flight; try again later.")
            return
        self._held += len(data)
        super().data_received(data)
        if self.conn.handshake_exc is not None:  # of which nothing is told otherwise
            self.transport.close()

    def send_receive_event_to_app(self) -> None:
        self.curr_msg_data_type = "bytes"
        self._give_back()
        super().send_receive_event_to_app()

    def connection_lost(self, exc: Exception | None) -> None:
        self._give_back()
        self._socket["closed"]()
        super().connection_lost(exc)

    async def run_asgi(self) -> None:
        self.scope["extensions"] = {**self.scope["extensions"], SOCKET: self._socket}  # type: ignore[dict-item]
        await super().run_asgi()

    def _give_back(self) -> None:
        self._incoming.give_back(self._held)
        self._held = 0

    def _fail(self, code: int, reason: str) -> None:
        if self.handshake_complete and not self.close_sent:
            self.conn.fail(code, reason)
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.close_sent = True
        self.transport.close()
