"""Several engines of one model as one: an EngineClient that deals requests to them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final, Protocol

from penstock.cluster.everywhere import AllAnswers
from penstock.cluster.router import Load, Route, Router
from penstock.config.cache_asks import Ask
from penstock.config.counting import of_all
from penstock.config.engine_stats import EngineStats
from penstock.config.errors import EngineDeadError, OverloadedError, PenstockError
from penstock.config.resolve import Decision
from penstock.core.policies.pace import Pace
from penstock.core.policies.pause import Control
from penstock.core.request import EngineRequest
from penstock.engine.api import EngineInfo, EngineState, Outputs
from penstock.engine.streams import OutputStream
from penstock.host.engine import HostedEngine, RestingEngine
from penstock.host.engine_line import EngineLine
from penstock.host.process_client import RESTARTING, SLEEPING, STARTING
from penstock.host.resumption import Past, needs_its_engine

_UNKNOWN: Final = Pace(step=0.005, prompt=1e-4, output=1e-3, rows=8.0, budget=2048)
"""Of engines that have not worked for long enough: what counts are its proportions."""
_ORDER: Final = (EngineState.READY, EngineState.STARTING, EngineState.RESTARTING, EngineState.SLEEPING)
_LOOK_S: Final = 0.02  # between two looks at whether an engine has nothing left
_log = logging.getLogger(__name__)


class Backend(HostedEngine, RestingEngine, Protocol):
    """An engine that requests are dealt to, and from which they can go on elsewhere."""

    @property
    def line(self) -> EngineLine:
        """The requests that it has."""


class Watching(Protocol):
    """Told of the lives of engines, by their numbers."""

    def serving(self, number: int) -> None:
        """An engine serves."""

    def died(self, number: int) -> None:
        """It has gone."""


class Life:
    """The `Watcher` of one engine: tells its number."""

    def __init__(self, number: int, watching: Watching) -> None:
        self._number, self._watching = number, watching

    def serving(self, info: EngineInfo, commands: str, past: EngineStats) -> None:
        self._watching.serving(self._number)

    def died(self, worked_on: Set[str] | None) -> None:
        self._watching.died(self._number)

    def unattached(self, client: str) -> None:
        """Nobody else is attached to it."""

    def stopped(self, why: str) -> None:
        """Whoever waits for it is told by `given_up`."""


class ClusterClient:
    """HostedEngine over several, which are equal. Belongs to the event loop that awaits `start`.

    A request has one engine from its first token to its last, unless that dies or is drained: then it goes on in
    another from what is known of its answers (`host.resumption`), with the same bits. Engines that died are started
    again and get requests as before.
    """

    can_sleep = True

    def __init__(
        self, make: Callable[[Watching], Sequence[Backend]], router: Router, *, closing: Callable[[], None]
    ) -> None:
        """`make` makes the engines, and takes a while; `closing` is called when all have ended."""
        self._make = make
        self._router = router
        self._closing = closing
        self._engines: Sequence[Backend] = ()
        self._info: EngineInfo | None = None
        self._control: Control | None = None  # what holds engines still
        self._retired: set[int] = set()  # for good: what they still tell of requests that have left counts for nothing
        self._asked: set[asyncio.Task[None]] = set()
        self._resting = self._closed = False

    async def start(self) -> EngineInfo:
        """Starts the first engine, then the others, which find what it has packed."""
        if self._engines or self._closed:
            raise EngineDeadError("These engines were started before; make new ones.")
        try:
            self._engines = await asyncio.to_thread(self._make, self)
            for number, engine in enumerate(self._engines):
                engine.line.resumption.move = functools.partial(self._move, number)
            first = await self._engines[0].start()
            await _all(engine.start() for engine in self._engines[1:])
        except BaseException:
            await self.close()
            raise
        count = len(self._engines)
        told = Decision("engines", str(count), "--data-parallel-size; memory told is that of one")
        self._info = replace(first, settings=(*first.settings, told))
        return self._info

    @property
    def engines(self) -> Sequence[Backend]:
        """All of them, by their numbers."""
        return self._engines

    @property
    def state(self) -> EngineState:
        """READY while any engine is."""
        if self._closed:
            return EngineState.STOPPED
        if self._info is None:
            return EngineState.STARTING
        there = {engine.state for engine in self._engines}
        return next((state for state in _ORDER if state in there), EngineState.STOPPED)

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDeadError("The engines have not started.")
        return self._info

    async def given_up(self) -> EngineDeadError:
        """Returns, with why, when no engine is left that anybody tries to start."""
        while not self._engines:
            await asyncio.sleep(0.05)
        return (await asyncio.gather(*(self._gone(number) for number in range(len(self._engines)))))[-1]

    async def _gone(self, number: int) -> EngineDeadError:
        why = await self._engines[number].given_up()
        _log.error("engine %d of %d is not started any more: %s", number, len(self._engines), why)
        return why

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest) -> Outputs:
        if request.ask is not None and request.ask.kind != "match":
            return AllAnswers([engine.submit(request) for engine in self._there()])
        if (has := self._having(request.request_id)) is not None:
            return has.submit(request)  # which refuses an id that is in use
        route = self._route(request, self._ready())
        refused: OverloadedError | EngineDeadError | None = None
        for number in route.engines:
            try:
                stream = self._engines[number].submit(request)
            except (OverloadedError, EngineDeadError) as error:
                refused = refused or error
            else:
                if request.ask is None:
                    self._router.took(number, request, route)
                if request.pin is not None:
                    self._unpin(request, request.pin.name, number)
                return stream
        raise refused or EngineDeadError(self._unavailable())

    def _unpin(self, request: EngineRequest, name: str, number: int) -> None:
        """The owner's pin of this name is in that engine from now on, and in no other one."""
        ask = replace(request, request_id=f"{request.request_id}~{name}", pin=None, ask=Ask("unpin", name))
        for other in self._ready():
            if other != number:
                with contextlib.suppress(PenstockError):
                    outputs = self._engines[other].submit(ask)
                    self._asked.add(task := asyncio.ensure_future(outputs.aclose()))
                    task.add_done_callback(self._asked.discard)

    def arriving(self, owner: str) -> AbstractContextManager[None]:
        return self._freest().arriving(owner)

    def check_room(self, owner: str) -> None:
        self._freest().check_room(owner)

    def cancel(self, request_id: str) -> None:
        for engine in self._engines:
            engine.cancel(request_id)

    def end_reasoning(self, request_id: str) -> None:
        for engine in self._engines:
            engine.end_reasoning(request_id)

    def control(self, control: Control) -> None:
        if control is not Control.FLUSH:
            self._control = None if control is Control.RESUME else control
        for engine in self._engines:
            engine.control(control)

    def _having(self, request_id: str) -> Backend | None:
        there = (engine for engine in self._engines if engine.line.streams.get(request_id) is not None)
        return next(there, None)

    def _ready(self) -> list[int]:
        return [
            number
            for number, engine in enumerate(self._engines)
            if number not in self._retired and engine.state is EngineState.READY
        ]

    def _there(self) -> list[Backend]:
        """Engines that answer; raises EngineDeadError where there is none."""
        if not (ready := self._ready()):
            raise EngineDeadError(self._unavailable())
        return [self._engines[number] for number in ready]

    def _unavailable(self) -> str:
        match self.state:
            case EngineState.STARTING:
                return STARTING
            case EngineState.SLEEPING:
                return SLEEPING
            case EngineState.STOPPED:
                return "The engines have stopped."
            case _:
                return RESTARTING

    def _freest(self) -> Backend:
        """The engine with the least work that waits, of those that answer."""
        engines = [self._engines[number] for number in self._ready()] or self._engines
        if not engines:
            raise EngineDeadError(self._unavailable())
        return min(engines, key=lambda engine: engine.line.streams.waiting.seconds())

    # -- who gets a request -------------------------------------------------------------------------------------------

    def _route(self, request: EngineRequest, numbers: Sequence[int]) -> Route:
        if not numbers:
            raise EngineDeadError(self._unavailable())
        return self._router.route(request, self._loads(numbers))

    def _loads(self, numbers: Sequence[int]) -> Mapping[int, Load]:
        """What these have to do, at the pace that all are taken to have: they are equal, and share the cores, so that
        what one of them measured says how busy the others were.
        """
        lines = {number: self._engines[number].line.streams for number in numbers}
        known = [line.waiting.pace for line in lines.values() if line.waiting.pace is not None]
        pace = sorted(known, key=_price)[len(known) // 2] if known else _UNKNOWN
        loads = {}
        for number, line in lines.items():
            work = line.waiting.left(len(line))
            seconds, computed = pace.seconds(work.prompt, work.output), line.waiting.computed_tokens
            loads[number] = Load(seconds, len(line), _price(pace), computed)
        return loads

    # -- engines that come and go -------------------------------------------------------------------------------------

    def serving(self, number: int) -> None:
        """An engine serves, and has nothing cached yet; what is held for others that are not there goes on in it."""
        self._router.forget(number)
        if self._control is not None:
            self._engines[number].control(self._control)
        for other, engine in enumerate(self._engines):
            if other != number and engine.state is not EngineState.READY:
                engine.line.resumption.move_held()

    def died(self, number: int) -> None:
        self._router.forget(number)

    def _move(self, number: int, stream: OutputStream, past: Past) -> bool:
        """Has a request of an engine go on in another one; whether there is one."""
        others = [other for other in self._ready() if other != number]
        if not others or self._resting or self._closed:
            return False
        self._send_on(stream, self._engines[number].line.streams.give_away, others, past)
        return True

    def _send_on(
        self, stream: OutputStream, leave: Callable[[OutputStream], None], others: Sequence[int], past: Past
    ) -> None:
        """Has a request go on in one of these, once it has left the engine that it had."""
        route = self._route(stream.request, others)
        leave(stream)
        self._router.took(route.engines[0], stream.request, route)
        self._engines[route.engines[0]].line.adopt(stream, past)

    async def retire(self, number: int, seconds: float = math.inf) -> None:
        """Ends an engine: its requests go on in others. Those that cannot have so long to end where they are.

        Raises:
            EngineDeadError: there is no other engine.
        """
        if not [other for other in self._ready() if other != number]:
            raise EngineDeadError("The only engine there is cannot be ended; close all of them.")
        self._retired.add(number)
        line, until = self._engines[number].line, time.monotonic() + seconds
        try:
            for stream in line.streams.live():
                if not (stream.closed or stream.request.ask or needs_its_engine(stream.request)):
                    self._send_on(stream, line.leave, self._ready(), line.resumption.past(stream))
            while len(line.streams) and time.monotonic() < until:
                await asyncio.sleep(_LOOK_S)
        finally:
            await self._engines[number].close()
            self._router.forget(number)

    # -- all of them --------------------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """As RestingEngine; all of them."""
        self._resting = True
        try:
            if any(engine.state is EngineState.RESTARTING for engine in self._engines):
                raise EngineDeadError(RESTARTING)
            await _all(engine.sleep() for engine in self._there())
        except BaseException:
            await asyncio.gather(*(engine.wake() for engine in self._engines), return_exceptions=True)
            self._resting = False
            raise

    async def wake(self) -> None:
        """As RestingEngine; all of them."""
        try:
            await _all(engine.wake() for engine in self._engines)
        finally:  # those that are awake serve, even where one could not be woken
            self._resting = all(engine.state is EngineState.SLEEPING for engine in self._engines)

    async def stats(self) -> EngineStats:
        return of_all(await asyncio.gather(*(engine.stats() for engine in self._engines)))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await _all(engine.close() for engine in self._engines)
        finally:
            self._closing()


def _price(pace: Pace) -> float:
    """Seconds that a token of a prompt takes."""
    return pace.seconds(1.0, 0.0)


async def _all(work: Any) -> None:
    """Waits for all of these; raises what the first one that failed has raised, once none of them runs any more."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
