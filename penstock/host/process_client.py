"""An engine in a process of its own, supervised: what `penstock serve` uses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import zmq

from penstock.config.cores import CoreBoard
from penstock.config.engine_stats import EngineStats
from penstock.config.errors import EngineDeadError, PenstockError
from penstock.config.options import EngineOptions
from penstock.core.policies.pause import Control
from penstock.core.request import EngineRequest
from penstock.engine import messages
from penstock.engine.api import EngineInfo, EngineState
from penstock.engine.streams import OutputStream
from penstock.host.child import EngineChild
from penstock.host.engine_line import EngineLine

HEARTBEAT_TIMEOUT_S = 5.0
FIRST_RESTART_DELAY_S = 0.5
LAST_RESTART_DELAY_S = 30.0
STABLE_S = 30.0
MAX_START_FAILURES = 5
STARTING = "The engine is still starting; retry in a few seconds."
SLEEPING = "The engine sleeps; POST /wake_up, then send the request again."
RESTARTING = "The engine is being restarted; retry in a few seconds."
_log = logging.getLogger(__name__)


class Watcher(Protocol):
    """Told of the lives of an engine process."""

    def serving(self, info: EngineInfo, commands: str, past: EngineStats) -> None:
        """A process serves, and takes commands at this endpoint; `past` is what those before it have counted."""

    def died(self, worked_on: Set[str] | None) -> None:
        """It has gone, and worked on these requests; None where nobody knows on which."""

    def unattached(self, client: str) -> None:
        """It serves, but cannot tell this other client anything."""

    def stopped(self, why: str) -> None:
        """It was closed, or nobody tries to start it again any more."""


@dataclass(frozen=True, slots=True)
class ToldPrefixes:
    """Who is told which blocks an engine has cached.

    Attributes:
        seed: of their names (`transfer.prefix_names`).
        tell: called with names of blocks that came, and less than 0 of those that went, in order.
    """

    seed: str
    tell: Callable[[list[int]], None]


class ProcessClient:
    """EngineClient over one engine process, restarted when it dies. Belongs to the event loop that awaited `start`.

    While the process is down or silent (nothing heard for HEARTBEAT_TIMEOUT_S) the state is RESTARTING and new
    requests are refused; those there are go on in the next process (`Resumption`). Restarts wait 0.5 s, doubling to
    30 s; MAX_START_FAILURES failed starts in a row end in STOPPED, and all requests with finish_reason ERROR.
    """

    def __init__(
        self,
        options: EngineOptions,
        *,
        on_progress: Callable[[int, int], None] | None = None,
        max_queue_seconds: float | None = None,
        watcher: Watcher | None = None,
        cores: CoreBoard | None = None,
        told_prefixes: ToldPrefixes | None = None,
    ) -> None:
        """`on_progress` is told (bytes loaded, bytes in all) while weights load.

        `max_queue_seconds` of work may wait before calls are refused, None for any. `cores` are shared with the other
        engines that note there when they work. `told_prefixes` are who wants to know what it has cached.
        """
        self._options = options
        self._on_progress = on_progress
        self._watcher = watcher
        self._cores = cores
        self._told_prefixes = told_prefixes
        self._place = None if cores is None else cores.take()
        self._line = EngineLine(max_queue_seconds=max_queue_seconds)
        self._state = EngineState.STARTING
        self._info: EngineInfo | None = None
        self._child: EngineChild | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._why_stopped = "The engine has not started."
        self._gave_up = asyncio.Event()
        self._sleep = asyncio.Lock()  # of those who put it to sleep or wake it

    async def start(self) -> EngineInfo:
        if self._context is not None or self._state is EngineState.STOPPED:
            raise EngineDeadError("This engine was started before; make a new one.")
        self._context = zmq.Context()
        try:
            await self._launch()
        except BaseException:
            await self.close()
            raise
        self._supervisor = asyncio.create_task(self._supervise())
        return self.info

    @property
    def state(self) -> EngineState:
        """Safe to read from any thread."""
        state, child = self._state, self._child
        if state is EngineState.READY and child is not None and child.silence > HEARTBEAT_TIMEOUT_S:
            return EngineState.RESTARTING
        return state

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDeadError(self._why_stopped)
        return self._info

    @property
    def line(self) -> EngineLine:
        """The requests of this client."""
        return self._line

    @property
    def pid(self) -> int:
        """The engine's process id; 0 while there is none."""
        return self._child.pid if self._child is not None else 0

    async def given_up(self) -> EngineDeadError:
        """Returns, with why, when the engine could not be started again and nobody tries any more."""
        await self._gave_up.wait()
        return EngineDeadError(self._why_stopped)

    def submit(self, request: EngineRequest) -> OutputStream:
        if self.state is not EngineState.READY:
            raise EngineDeadError(self._unavailable())
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

    def detach(self, client: str) -> None:
        """Another client of the engine has gone: its requests end."""
        if self._child is not None and self._line.is_open:
            with contextlib.suppress(EngineDeadError):
                self._child.send(messages.encode(messages.Detach(client)))

    @property
    def can_sleep(self) -> bool:
        """Whether nobody else uses this engine, who would take its sleep for its death."""
        return self._watcher is None

    async def sleep(self) -> None:
        """Ends the process, and with it all it holds; requests that wait go on once `wake` has started another.

        Raises:
            EngineDeadError: the engine is not ready.
        """
        async with self._sleep:
            if self._state is EngineState.SLEEPING:
                return
            if self._state is not EngineState.READY or self._supervisor is None:
                raise EngineDeadError(self._unavailable())
            self._state = EngineState.SLEEPING
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
            await self._drop_child()
            self._line.cut(frozenset())
            _log.info("the engine sleeps")

    async def wake(self) -> None:
        """Starts a sleeping engine again; does nothing where it is awake.

        Raises:
            PenstockError: it cannot be started; it sleeps on.
        """
        async with self._sleep:
            if self._state is not EngineState.SLEEPING:
                return
            self._state = EngineState.STARTING
            try:
                await self._launch(restarts=self._line.restarts)
            except BaseException:
                await self._drop_child()
                if self._state is EngineState.STARTING:
                    self._state = EngineState.SLEEPING
                raise
            self._supervisor = asyncio.create_task(self._supervise())
            _log.info("the engine is awake")

    async def stats(self) -> EngineStats:
        return await self._line.stats(ask=self.state is EngineState.READY)

    async def close(self) -> None:
        """Ends the process and its supervision; unfinished sequences get an ERROR output."""
        self._state, self._why_stopped = EngineState.STOPPED, "The engine was closed."
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        await self._drop_child()
        if self._cores is not None and self._place is not None:
            self._cores.give_back(self._place)
            self._place = None
        self._stop()
        if self._context is not None:
            self._context.term()
            self._context = None

    async def _launch(self, restarts: int = 0) -> None:
        """Starts a process and waits until it serves; raises its error if it cannot."""
        assert self._context is not None
        try:
            shared = None if self._cores is None or self._place is None else (self._cores.file, self._place)
            seed = "" if self._told_prefixes is None else self._told_prefixes.seed
            self._child = EngineChild(self._options, self._context, self._on_event, shared, seed)
            self._info = await self._child.start()
        except PenstockError:
            await self._drop_child()
            raise
        except (OSError, zmq.ZMQError) as error:
            await self._drop_child()
            raise EngineDeadError(f"The engine process cannot be started: {error}.") from error
        self._state = EngineState.READY
        self._line.restarts = restarts
        self._line.open(self._child.send)
        if self._watcher is not None:
            past = replace(self._line.past, restarts=self._line.restarts)
            self._watcher.serving(self._info, self._child.commands, past)

    async def _drop_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.close()
        if self._cores is not None and self._place is not None:
            self._cores.clear(self._place)

    async def _died(self, child: EngineChild) -> None:
        """The process has ended unasked."""
        self._state = EngineState.RESTARTING
        _log.error("%s It is started again.", child.ending())
        worked_on = child.worked_on()
        await self._drop_child()
        self._line.cut(worked_on)
        if self._watcher is not None:
            self._watcher.died(worked_on)

    async def _supervise(self) -> None:
        try:
            await self._start_again_and_again()
        except Exception:  # nobody may wait for an engine that nobody starts
            _log.exception("the engine is not watched any more")
            self._give_up()

    def _give_up(self) -> None:
        self._state = EngineState.STOPPED  # the reason may name paths: it is for the log, not for clients
        self._why_stopped = "The engine stopped and could not be started again; its log says why."
        self._stop()
        self._gave_up.set()

    def _stop(self) -> None:
        """There will be no engine any more."""
        self._line.end(self._why_stopped)
        if self._watcher is not None:
            self._watcher.stopped(self._why_stopped)

    async def _start_again_and_again(self) -> None:
        """Returns when that is given up."""
        delay, failures = FIRST_RESTART_DELAY_S, 0
        while True:
            if self._child is not None:
                started = time.monotonic()
                await self._child.wait()
                await self._died(self._child)
                if time.monotonic() - started > STABLE_S:
                    delay = FIRST_RESTART_DELAY_S
            await asyncio.sleep(delay)
            delay = min(delay * 2, LAST_RESTART_DELAY_S)
            try:
                await self._launch(restarts=self._line.restarts + 1)
                failures = 0
            except PenstockError as error:
                failures += 1
                _log.error("start %d of %d failed: %s", failures, MAX_START_FAILURES, error)
                if failures == MAX_START_FAILURES:
                    return self._give_up()

    def _on_event(self, event: messages.Event) -> None:
        match event:
            case messages.Progress(done=done, total=total):
                if self._on_progress is not None:
                    self._on_progress(done, total)
            case messages.Prefixes(news=news):
                if self._told_prefixes is not None:
                    self._told_prefixes.tell(news)
            case messages.Unattached(client=client):
                if self._watcher is not None:
                    self._watcher.unattached(client)
            case _:
                self._line.on_event(event)

    def _unavailable(self) -> str:
        match self.state:
            case EngineState.STARTING:
                return STARTING
            case EngineState.STOPPED:
                return self._why_stopped
            case EngineState.SLEEPING:
                return SLEEPING
            case _:
                return RESTARTING
