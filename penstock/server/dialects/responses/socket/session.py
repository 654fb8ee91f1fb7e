"""A client's WebSocket: `response.create` messages, answered one after the other in each of its streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from starlette.types import ASGIApp, Message
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from penstock.config import limits
from penstock.config.errors import PenstockError, RequestError, format_value
from penstock.server.connected import cancel_all
from penstock.server.dialects.responses.socket.exchange import Exchange, body_of, error_message
from penstock.server.dialects.responses.socket.turn import TURN, RecentResponses, Turn
from penstock.server.encoding import encode_json
from penstock.server.errors import HttpError, bad_value
from penstock.server.strict_json import parse_json
from penstock.server.websocket import PIECES, SOCKET

_INLINE_BYTES: Final = 16 * 2**10
_STEER, _CREATE = "response.steer", "response.create"


@dataclass(frozen=True, slots=True)
class _Asked:
    """A `response.create` as it waits for its turn."""

    stream: str
    generate: bool
    previous: str | None
    body: dict[str, Any]
    message: bytes


class Session:
    """One connection, from its acceptance to its end."""

    def __init__(self, socket: WebSocket, answer: ASGIApp, recent: RecentResponses) -> None:
        """`answer` takes each turn as a request of its own, with its own key, room and account."""
        self._socket, self._answer = socket, answer
        self._recent = recent
        self._gone = asyncio.Event()
        self._streams: dict[str, asyncio.Queue[_Asked | None]] = {}
        self._workers: list[asyncio.Task[None]] = []
        self._running = 0
        self._waiting = self._waiting_bytes = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._sending = asyncio.Lock()

    async def run(self) -> None:
        """Answers until the client leaves, or the connection has been open as long as it may be."""
        await self._socket.accept()
        reading = asyncio.ensure_future(self._read())
        try:
            await asyncio.wait([reading], timeout=limits.SOCKET_S)
            if not reading.done():
                await self._expire(reading)
            if reading.done():
                reading.result()
        except WebSocketDisconnect:
            pass
        finally:
            self._gone.set()
            await cancel_all([reading])
            await self._end_turns()
            for stream in self._streams:
                self._recent.drop(self, stream)

    async def _end_turns(self) -> None:
        """Waits until no turn runs: each sees that its client has gone, as one over HTTP does, and tells the engine.

        None is cancelled from here, since a call that begins just then would be nobody's, and would go on.
        """
        for queue in self._streams.values():
            queue.put_nowait(None)
        await asyncio.gather(*self._workers, return_exceptions=True)

    async def _expire(self, reading: asyncio.Future[None]) -> None:
        """Says that time is up, and closes when what runs has ended."""
        most = limits.SOCKET_S / 60
        message = f"The connection has been open for {most:g} minutes, the most there is; open another and go on there."
        await self._tell(error_message(HttpError(400, message, code="websocket_connection_limit_reached")))
        quiet = asyncio.ensure_future(self._quiet.wait())
        either: tuple[asyncio.Future[Any], ...] = (reading, quiet)
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        quiet.cancel()
        if not reading.done() and self._socket.application_state is WebSocketState.CONNECTED:
            await self._socket.close(1000, "websocket_connection_limit_reached")

    async def _read(self) -> None:
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(message.get("code", 1005))
            try:
                await self._take(await _message(message))
            except PenstockError as error:
                await self._tell(error_message(error))

    async def _take(self, raw: bytes) -> None:
        """Gives a message to its stream; raises RequestError for what is none."""
        asked = await asyncio.to_thread(parse_json, raw) if len(raw) > _INLINE_BYTES else parse_json(raw)
        kind = asked.get("type")
        if kind == _STEER:
            await self._tell(_not_steered(asked))
            return
        if kind != _CREATE:
            raise bad_value("type", kind, f'"{_CREATE}"')
        stream = asked.get("stream_id") or ""
        try:
            if not isinstance(stream, str) or len(stream) > limits.MAX_STREAM_ID_CHARS:
                stream, given = "", stream
                raise bad_value("stream_id", given, f"a string of up to {limits.MAX_STREAM_ID_CHARS} characters")
            self._wait(_checked(asked, stream, raw))
        except PenstockError as error:
            await self._tell(error_message(error, stream))

    def _wait(self, asked: _Asked) -> None:
        """Puts it behind the others of its stream; raises HttpError where too many are there."""
        queue = self._streams.get(asked.stream)
        if queue is None:
            if len(self._streams) >= limits.MAX_STREAMS_OF_A_SOCKET:
                most = f"{limits.MAX_STREAMS_OF_A_SOCKET} streams, the most a connection may have"
                raise HttpError(429, f"There are {most}; use one of them.", code="too_many_streams")
            queue = self._streams[asked.stream] = asyncio.Queue()
            self._workers.append(asyncio.create_task(self._work(queue)))
        if self._running:
            many = self._waiting >= limits.MAX_WAITING_MESSAGES
            if many or self._waiting_bytes + len(asked.message) > limits.MAX_WAITING_BYTES:
                message = "Too much waits behind the responses that run; send the next turn when one has ended."
                raise HttpError(429, message, code="response_already_in_flight")
        self._waiting += 1
        self._waiting_bytes += len(asked.message)
        self._quiet.clear()
        queue.put_nowait(asked)

    async def _work(self, queue: asyncio.Queue[_Asked | None]) -> None:
        """Answers what comes in one stream, in its order."""
        calls: dict[str, Callable[[], None]] = self._socket.scope["extensions"].get(SOCKET, {})
        while (asked := await queue.get()) is not None and not self._gone.is_set():
            self._waiting -= 1
            self._waiting_bytes -= len(asked.message)
            self._running += 1
            calls.get("busy", _nothing)()
            try:
                await self._turn(asked, calls.get("abort", _nothing))
            finally:
                self._running -= 1
                if not (self._running or self._waiting):
                    self._quiet.set()
                    calls.get("rest", _nothing)()

    async def _turn(self, asked: _Asked, abort: Callable[[], None]) -> None:
        streams = (asked.stream, *(name for name in self._streams if name != asked.stream))
        turn = Turn(self._recent, self, asked.stream, streams, asked.generate, len(asked.message))
        exchange = Exchange(asked.message, asked.body, asked.stream, self._gone, self._tell)
        scope = exchange.scope(self._socket.scope, abort)
        scope[TURN] = turn
        await self._answer(scope, exchange.receive, exchange.send)
        if exchange.failed and asked.previous is not None:
            turn.forget(asked.previous)

    async def _tell(self, message: bytes) -> None:
        """Sends one message; once the client has gone, none."""
        async with self._sending:
            if not self._gone.is_set():
                await self._socket.send({"type": "websocket.send", "text": message.decode()})


def _checked(asked: dict[str, Any], stream: str, raw: bytes) -> _Asked:
    """What a `response.create` asks for, besides what the route reads; raises RequestError."""
    generate = asked.get("generate")
    if generate not in (None, True, False):
        raise bad_value("generate", generate, "true or false")
    if asked.get("background"):
        message = "background is true, which a WebSocket does not have; send it to POST /v1/responses."
        raise RequestError(message, param="background", code="unsupported_value")
    previous = asked.get("previous_response_id")
    previous = previous if isinstance(previous, str) else None
    return _Asked(stream, generate is not False, previous, body_of(asked), raw)


async def _message(told: Message) -> bytes:
    """What a message of the client says."""
    if pieces := told.get(PIECES):
        return await asyncio.to_thread(b"".join, pieces)
    message: bytes = told.get("bytes") or (told.get("text") or "").encode()
    return message


def _not_steered(asked: dict[str, Any]) -> bytes:
    """The answer to a `response.steer`."""
    named = format_value(asked.get("previous_response_id"))
    message = f"Responses are not steered here ({named} goes on); send a response.create when it has ended."
    steer = {"input": asked.get("input"), "previous_response_id": str(asked.get("previous_response_id") or "")}
    error = {"code": "steering_not_supported", "message": message}
    return encode_json({"type": "response.steer.failed", "sequence_number": 0, "steer": steer, "error": error})


def _nothing() -> None:
    """Where nobody counts connections."""
