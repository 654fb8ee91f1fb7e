"""The engine's side of events: a socket a client, and the news that go to each."""

from __future__ import annotations

import logging
import time

import zmq

from penstock.config.errors import RESULT_TOO_LARGE, RequestError
from penstock.core.policies.pace import Pace
from penstock.core.request import EngineOutput, FinishReason
from penstock.engine import messages, request_names
from penstock.engine.messages import MessageError

_PROGRESS_S = 0.1
_log = logging.getLogger(__name__)


class EventSocket:
    """The way of events to one client. Not thread-safe: one a thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, linger_ms: int = 1000) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.LINGER, linger_ms)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError:
            self._socket.close(0)
            raise
        self._last_progress = 0.0

    def send(self, event: messages.Event) -> None:
        self._socket.send(messages.encode(event))

    def outputs(self, outputs: list[EngineOutput]) -> None:
        """In one message, or in several where one would be too long; a result too long for any ends its request."""
        try:
            self.send(messages.Outputs(outputs))
        except MessageError as error:
            half = len(outputs) // 2
            if half:
                self.outputs(outputs[:half])
                self.outputs(outputs[half:])
                return
            _log.warning("a result cannot be sent: %s", error)
            name, sequence = outputs[0].request_id, outputs[0].sequence
            failed = EngineOutput(name, sequence, finish_reason=FinishReason.ERROR, error=RESULT_TOO_LARGE)
            self.send(messages.Outputs([failed]))

    def progress(self, done: int, total: int) -> None:
        """Reports loading, at most ten times a second, and its end."""
        now = time.monotonic()
        if done >= total or now - self._last_progress >= _PROGRESS_S:
            self._last_progress = now
            self.send(messages.Progress(done, total))

    def close(self) -> None:
        self._socket.close()


class Clients:
    """The driver's sink: every client's news go to its own socket, and what concerns all to all."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], first: EventSocket) -> None:
        """`first` is that of the client that started the engine, which closes it."""
        self._context = context
        self._sockets = {"": first}
        self._gone: set[str] = set()  # names are never used again, and what says that one is there may come later

    def __contains__(self, client: str) -> bool:
        return client in self._sockets

    def attach(self, client: str, endpoint: str) -> None:
        """A client is there, unless it has gone already; where no socket can be had for it the first is told."""
        if client in self._gone or client in self._sockets:
            return
        try:
            self._sockets[client] = EventSocket(self._context, endpoint, linger_ms=0)
        except zmq.ZMQError as error:
            _log.error("a client cannot be attached: %s", error)
            self.send("", messages.Unattached(client))

    def detach(self, client: str) -> None:
        """A client has gone, and what was on its way to it."""
        self._gone.add(client)
        if client and (socket := self._sockets.pop(client, None)) is not None:
            socket.close()

    def send(self, client: str, event: messages.Event) -> None:
        """Sends an event to a client, if it is there."""
        if (socket := self._sockets.get(client)) is not None:
            socket.send(event)

    def outputs(self, outputs: list[EngineOutput]) -> None:
        if len(self._sockets) == 1 and not self._gone:
            self._sockets[""].outputs(outputs)
            return
        of: dict[str, list[EngineOutput]] = {}
        for output in outputs:
            of.setdefault(request_names.client_of(output.request_id), []).append(output)
        for client, own in of.items():
            if (socket := self._sockets.get(client)) is not None:
                socket.outputs(own)

    def refused(self, request_id: str, error: RequestError) -> None:
        self.send(request_names.client_of(request_id), messages.refusal(request_id, error))

    def paced(self, pace: Pace) -> None:
        for socket in self._sockets.values():
            socket.send(messages.Paced(pace))

    def close(self) -> None:
        """Closes all but the first."""
        for client in [client for client in self._sockets if client]:
            self.detach(client)
