"""An engine in a process of its own, supervised: what `penstock serve` uses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import zmq

from penstock.config.errors import EngineDeadError, PenstockError, RequestError
from penstock.config.options import EngineOptions
from penstock.core.request import EngineRequest, EngineStats, FinishReason
from penstock.engine import messages
from penstock.engine.api import EngineInfo, EngineState
from penstock.engine.counting import ended, together
from penstock.engine.messages import MessageError
from penstock.engine.streams import OutputStream, StreamTable
from penstock.host.child import EngineChild
from penstock.host.resumption import CANNOT_GO_ON, Resumption

HEARTBEAT_TIMEOUT_S = 5.0
STATS_TIMEOUT_S = 1.0
FIRST_RESTART_DELAY_S = 0.5
LAST_RESTART_DELAY_S = 30.0
STABLE_S = 30.0
MAX_START_FAILURES = 5
_log = logging.getLogger(__name__)


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
    ) -> None:
        """`on_progress` is told (bytes loaded, bytes in all) while weights load.

        `max_queue_seconds` of work may wait before calls are refused, None for any.
        """
        self._options = options
        self._on_progress = on_progress
        self._streams = StreamTable(self.cancel, max_queue_seconds)
        self._resumption = Resumption(self._streams, self._send)
        self._restarts = 0
        self._state = EngineState.STARTING
        self._info: EngineInfo | None = None
        self._past = EngineStats()  # counters of engines that are gone
        self._latest = EngineStats()
        self._stats_answer: asyncio.Future[None] | None = None
        self._child: EngineChild | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._why_stopped = "The engine has not started."
        self._gave_up = asyncio.Event()

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
    def pid(self) -> int:
        """The engine's process id; 0 while there is none."""
        return self._child.pid if self._child is not None else 0

    async def given_up(self) -> EngineDeadError:
        """Returns, with why, when the engine could not be started again and nobody tries any more."""
        await self._gave_up.wait()
        return EngineDeadError(self._why_stopped)

    def submit(self, request: EngineRequest) -> OutputStream:
        if self.state is not EngineState.READY or self._child is None:
            raise EngineDeadError(self._unavailable())
        try:
            frame = messages.encode(messages.Submit(request))
        except MessageError as error:
            raise RequestError(f"The request cannot be sent to the engine: {error}") from error
        stream = self._streams.open(request)
        if not self._resumption.hold(stream):
            self._child.send(frame)
        return stream

    def _send(self, stream: OutputStream) -> None:
        """Sends a request; to an engine that has gone it is as if it had not been."""
        try:
            frame = messages.encode(messages.Submit(stream.request, stream.so_far() if stream.admitted else None))
        except MessageError:
            _log.exception("a request cannot go on in another engine")
            self._streams.end(stream, FinishReason.ERROR, CANNOT_GO_ON)
            return
        if self._child is not None:
            with contextlib.suppress(EngineDeadError):
                self._child.send(frame)

    def arriving(self, owner: str) -> AbstractContextManager[None]:
        return self._streams.waiting.arriving(owner)

    def check_room(self, owner: str) -> None:
        self._streams.waiting.check_room(owner)

    def cancel(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is None:
            return
        held = self._resumption.holds(stream)
        if held:
            self._resumption.drop(stream)
        if held or self._child is None or self._state is not EngineState.READY:
            self._streams.end(stream, FinishReason.CANCELLED)  # no engine has it
            return
        with contextlib.suppress(EngineDeadError, MessageError):
            self._child.send(messages.encode(messages.Cancel(request_id)))

    async def stats(self) -> EngineStats:
        """The newest snapshot: the last known one of an engine silent for STATS_TIMEOUT_S.

        Counters go on from those last known of engines that are gone; nothing runs in these.
        """
        if self.state is EngineState.READY and self._child is not None:
            if self._stats_answer is None:
                self._stats_answer = asyncio.get_running_loop().create_future()
                self._child.send(messages.encode(messages.StatsQuery()))
            await asyncio.wait((self._stats_answer,), timeout=STATS_TIMEOUT_S)
        return replace(
            together(self._past, self._latest),
            waiting_seconds=self._streams.waiting.seconds(),
            restarts=self._restarts,
            resumed=self._resumption.resumed,
        )

    async def close(self) -> None:
        """Ends the process and its supervision; unfinished sequences get an ERROR output."""
        self._state, self._why_stopped = EngineState.STOPPED, "The engine was closed."
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        await self._drop_child()
        self._streams.fail_all(self._why_stopped)
        if self._context is not None:
            self._context.term()
            self._context = None

    async def _launch(self) -> None:
        """Starts a process and waits until it serves; raises its error if it cannot."""
        assert self._context is not None
        try:
            self._child = EngineChild(self._options, self._context, self._on_event)
            self._info = await self._child.start()
        except PenstockError:
            await self._drop_child()
            raise
        except (OSError, zmq.ZMQError) as error:
            await self._drop_child()
            raise EngineDeadError(f"The engine process cannot be started: {error}.") from error
        self._state = EngineState.READY

    async def _drop_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.close()
        self._past, self._latest = ended(together(self._past, self._latest)), EngineStats()
        self._answer_stats()

    async def _supervise(self) -> None:
        try:
            await self._start_again_and_again()
        except Exception:  # nobody may wait for an engine that nobody starts
            _log.exception("the engine is not watched any more")
            self._give_up()

    def _give_up(self) -> None:
        self._state = EngineState.STOPPED  # the reason may name paths: it is for the log, not for clients
        self._why_stopped = "The engine stopped and could not be started again; its log says why."
        self._streams.fail_all(self._why_stopped)
        self._gave_up.set()

    async def _start_again_and_again(self) -> None:
        """Returns when that is given up."""
        delay, failures = FIRST_RESTART_DELAY_S, 0
        while True:
            if self._child is not None:
                started = time.monotonic()
                await self._child.wait()
                self._state = EngineState.RESTARTING
                _log.error("%s It is started again.", self._child.ending())
                worked_on = self._child.worked_on()
                await self._drop_child()
                self._resumption.died(worked_on)
                if time.monotonic() - started > STABLE_S:
                    delay = FIRST_RESTART_DELAY_S
            await asyncio.sleep(delay)
            delay = min(delay * 2, LAST_RESTART_DELAY_S)
            try:
                await self._launch()
                failures = 0
                self._restarts += 1
                self._resumption.go_on()
            except PenstockError as error:
                failures += 1
                _log.error("start %d of %d failed: %s", failures, MAX_START_FAILURES, error)
                if failures == MAX_START_FAILURES:
                    return self._give_up()

    def _on_event(self, event: messages.Event) -> None:
        match event:
            case messages.Outputs(outputs=outputs):
                self._streams.deliver(outputs)
                self._resumption.go_on()
            case messages.Refused(request_id=request_id):
                self._streams.refuse(request_id, messages.refusal_error(event))
                self._resumption.go_on()
            case messages.Paced(pace=pace):
                self._streams.waiting.pace = pace
            case messages.Stats(stats=stats):
                self._latest = stats
                self._answer_stats()
            case messages.Progress(done=done, total=total) if self._on_progress is not None:
                self._on_progress(done, total)

    def _answer_stats(self) -> None:
        answer, self._stats_answer = self._stats_answer, None
        if answer is not None and not answer.done():
            answer.set_result(None)

    def _unavailable(self) -> str:
        match self.state:
            case EngineState.STARTING:
                return "The engine is still starting; retry in a few seconds."
            case EngineState.STOPPED:
                return self._why_stopped
            case _:
                return "The engine is being restarted; retry in a few seconds."
