"""uvicorn's WebSocket protocol with the limits it lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from penstock.config import limits

SOCKET: Final = "penstock.socket"
"""Extension of a WebSocket's scope: under "abort" what drops the connection, under "busy" and "rest" what to call when
something is done for its client and when nothing is."""
PIECES: Final = "penstock.pieces"
"""Where a message is that came in several pieces, of which nothing long has been made yet."""
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
_PIECE: Final = 64 * 2**10  # bytes of a frame that are handed on in one go: four bytes of the mask fit into it evenly
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


class Cutter:
    """Hands a client's frames on in shorter ones, as any party on the way may (RFC 6455, 5.4), where they are long.

    So none of them is copied and unmasked in one go: with 32 MiB that would take tens of milliseconds.
    """

    def __init__(self, most: int) -> None:
        """A frame of more than `most` bytes is handed on as it comes: it is refused by its head."""
        self._most = most
        self._head = bytearray()  # of a frame, not complete
        self._left = 0  # bytes of the frame whose head has come
        self._rest: _Rest | None = None  # of a frame that is cut

    def cut(self, data: bytes) -> bytes:
        """What can be handed on, now that these bytes have come."""
        told, view = bytearray(), memoryview(data)
        while view:
            if not self._left:
                view = self._headed(view, told)
                continue
            taken, view = view[: self._left], view[self._left :]
            self._left -= len(taken)
            if self._rest is None:
                told += taken
            else:
                self._rest.add(taken, told, last=not self._left)
        return bytes(told)

    def _headed(self, view: memoryview, told: bytearray) -> memoryview:
        """Takes of a frame's head what is there; what is behind it."""
        missing = _head_bytes(self._head) - len(self._head)
        self._head += view[:missing]
        view = view[missing:]
        if len(self._head) < _head_bytes(self._head):
            return view
        head, self._head = bytes(self._head), bytearray()
        length = head[1] & 127
        if length > 125:
            length = int.from_bytes(head[2 : 4 if length == 126 else 10], "big")
        self._left = length
        self._rest = None
        if head[1] & 128 and _PIECE < length <= self._most:
            self._rest = _Rest(head[0], head[-4:])
        else:
            told += head
        return view


class _Rest:
    """A long frame, of which pieces are handed on: the first is of its kind, the others continue it."""

    def __init__(self, first: int, mask: bytes) -> None:
        self._kind, self._final = first & 127, first & 128
        self._mask = mask
        self._held = bytearray()

    def add(self, data: memoryview, told: bytearray, *, last: bool) -> None:
        """Takes more of the frame, of which this may be the last."""
        self._held += data
        whole = len(self._held) if last else len(self._held) // _PIECE * _PIECE
        for start in range(0, whole, _PIECE):
            piece = self._held[start : min(start + _PIECE, whole)]
            final = self._final if last and start + _PIECE >= whole else 0
            told += bytes((self._kind | final, 128 | 127)) + len(piece).to_bytes(8, "big") + self._mask + piece
            self._kind = 0
        del self._held[:whole]


def _head_bytes(begun: bytearray) -> int:
    """How long a frame's head is, of which so much has come."""
    if len(begun) < 2:
        return 2
    length = begun[1] & 127
    return 2 + (2 if length == 126 else 8 if length == 127 else 0) + (4 if begun[1] & 128 else 0)


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
        self._cut = Cutter(limits.MAX_BODY_BYTES)

    def data_received(self, data: bytes) -> None:
        if not self._incoming.grow(len(data)):
            self._fail(_TRY_LATER, "Too many large messages are in flight; try again later.")
            return
        self._held += len(data)
        super().data_received(self._cut.cut(data) if self.handshake_initiated else data)
        if self.conn.handshake_exc is not None:  # of which nothing is told otherwise
            self.transport.close()

    def send_receive_event_to_app(self) -> None:
        self._give_back()
        pieces, self.frames = self.frames, []
        if self.close_sent:
            return
        told: Any = {"type": "websocket.receive", "bytes": pieces[0]}
        if len(pieces) > 1:
            told[PIECES] = pieces
        self.queue.put_nowait(told)
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

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
