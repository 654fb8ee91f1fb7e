"""A further client of an engine process that a host watches: what an HTTP process uses where there are several."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import zmq
import zmq.asyncio

from penstock.config.engine_stats import EngineStats
from penstock.config.errors import EngineDeadError
from penstock.core.policies.pause import Control
from penstock.core.request import EngineRequest
from penstock.engine import messages
from penstock.engine.api import EngineInfo, EngineState
from penstock.engine.messages import MessageError
from penstock.engine.streams import OutputStream
from penstock.host import front_messages as front
from penstock.host.engine_line import EngineLine
from penstock.host.process_client import RESTARTING, STARTING

_DRAIN_S = 0.05  # for what a process sent before it died
_log = logging.getLogger(__name__)


class AttachedClient:
    """EngineClient over an engine process that somebody else starts, and tells of. Belongs to one event loop."""

    def __init__(
        self,
        client: str,
        folder: Path,
        through: Callable[[front.Through], None],
        *,
        model: str = "",
        max_queue_seconds: float | None = None,
        processes: int = 1,
    ) -> None:
        """`client` is its name among those of so many `processes`, `folder` where its sockets lie.

        `through` is called when its requests have gone on in an engine that it was told of, of which `model` is the
        name.
        """
        self._line = EngineLine(client, max_queue_seconds, processes)
        self._generation = 0
        self._through = through
        self._model = model
        self._state = EngineState.STARTING
        self._silent = False
        self._info: EngineInfo | None = None
        self._why_stopped = STARTING
        self._known = asyncio.Event()
        self._folder = folder
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._commands: zmq.Socket[bytes] | None = None
        self._events: zmq.asyncio.Socket | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._going_on = False

    # -- what the host tells ------------------------------------------------------------------------------------------

    async def heard(self, told: front.OfEngine) -> None:
        """The host has told of the engine."""
        match told:
            case front.Serving():
                self.serving(told)
            case front.Turn():
                self.turn()
            case front.Silent():
                self.silent(told)
            case front.Died():
                await self.died(told)
            case front.Stopped(why=why):
                self.stopped(why)

    def serving(self, told: front.Serving) -> None:
        """An engine is there: new requests, and those of one before it, are held until it is their turn."""
        self._events = events = zmq.asyncio.Socket(self._context, zmq.PULL)  # kept at once: `close` waits for them
        events.set(zmq.RCVHWM, 0)
        events.set(zmq.MAXMSGSIZE, messages.MAX_FRAME_BYTES)
        endpoint = f"ipc://{self._folder / secrets.token_hex(8)}"
        events.bind(endpoint)
        self._commands = commands = self._context.socket(zmq.PUSH)
        commands.set(zmq.SNDHWM, 0)
        commands.set(zmq.LINGER, 0)
        commands.connect(told.commands)
        self._receiver = asyncio.create_task(self._receive(events))
        self._info, self._silent = told.info, False
        self._state = EngineState.READY
        self._known.set()
        self._line.past, self._line.restarts = told.past, told.past.restarts
        self._generation = told.generation
        self._send(messages.encode(messages.Attach(self._line.client, endpoint)))
        self._line.open(self._send, waits=True)

    def turn(self) -> None:
        """Requests may go on."""
        if self._line.is_open:
            self._going_on = True
            self._line.turn()
            self._look()

    def silent(self, told: front.Silent) -> None:
        """Whether the engine gives no sign of life."""
        self._silent = told.silent

    async def died(self, told: front.Died) -> None:
        """The engine has gone."""
        self._state, self._going_on = EngineState.RESTARTING, False
        await asyncio.sleep(_DRAIN_S)
        self._hang_up()
        self._line.cut(None if told.worked_on is None else frozenset(told.worked_on))

    def stopped(self, why: str) -> None:
        """There will be no engine any more."""
        self._state, self._why_stopped = EngineState.STOPPED, why
        self._known.set()
        self._hang_up()
        self._line.end(why)

    # -- the engine, for this process ---------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        """Returns once there is an engine."""
        await self._known.wait()
        return self.info

    @property
    def state(self) -> EngineState:
        return EngineState.RESTARTING if self._state is EngineState.READY and self._silent else self._state

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDeadError(self._why_stopped)
        return self._info

    def submit(self, request: EngineRequest) -> OutputStream:
        state = self.state
        if state is not EngineState.READY:
            starting = STARTING if state is EngineState.STARTING else RESTARTING
            raise EngineDeadError(self._why_stopped if state is EngineState.STOPPED else starting)
        return self._line.submit(request)

    def arriving(self, owner: str) -> AbstractContextManager[None]:
        return self._line.arriving(owner)

    def check_room(self, owner: str) -> None:
        self._line.check_room(owner)

    def cancel(self, request_id: str) -> None:
        self._line.cancel(request_id)

    def end_reasoning(self, request_id: str) -> None:
        self._line.end_reasoning(request_id)

    def control(self, control: Control) -> None:
        self._line.control(control)

    def own(self) -> EngineStats:
        """What this process knows of its requests, which no engine counts."""
        return self._line.own()

    async def stats(self) -> EngineStats:
        return await self._line.stats(ask=self.state is EngineState.READY)

    async def close(self) -> None:
        """Hangs up; unfinished sequences get an ERROR output."""
        self.stopped("The server was closed.")
        self._context.term()

    def _hang_up(self) -> None:
        if self._receiver is not None:
            self._receiver.cancel()
        for socket in (self._events, self._commands):
            if socket is not None:
                socket.close(0)
        self._receiver = self._events = self._commands = None

    def _send(self, frame: bytes) -> None:
        if self._commands is None:
            raise EngineDeadError("The engine process is gone.")
        self._commands.send(frame, zmq.NOBLOCK)

    async def _receive(self, events: zmq.asyncio.Socket) -> None:
        while True:
            frame = await events.recv()
            try:
                self._line.on_event(messages.decode_event(frame))
            except MessageError as error:
                _log.warning("dropped: %s", error)
            except Exception:
                _log.exception("an event could not be handled")
            self._look()

    def _look(self) -> None:
        if self._going_on and not self._line.resumption.goes_on:
            self._going_on = False
            self._through(front.Through(self._generation, self._model))
