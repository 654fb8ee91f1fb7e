"""An engine in a thread of this process: what `LLM` and `penstock run` use. Needs neither sockets nor a codec."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from penstock.config.counting import ended
from penstock.config.engine_stats import EngineStats
from penstock.config.errors import EngineDeadError, RequestError
from penstock.core.policies.pace import Pace
from penstock.core.policies.pause import Control
from penstock.core.request import EngineOutput, EngineRequest
from penstock.engine.api import EngineInfo, EngineState
from penstock.engine.driver import EngineDriver
from penstock.engine.streams import OutputStream, StreamTable

if TYPE_CHECKING:
    from penstock.engine.loop import Engine

THREAD_NAME = "penstock-engine"
_log = logging.getLogger(__name__)


_Item = Callable[[EngineDriver], None] | asyncio.Future[EngineStats] | None
"""What the thread is told: something to do, a future to fill with statistics, or None to end."""


class ThreadClient:
    """EngineClient over one thread. All methods belong to the event loop that awaited `start`.

    Example:
        client = ThreadClient(functools.partial(build_engine, EngineOptions()))
        info = await client.start()
    """

    def __init__(
        self, engine_factory: Callable[[], tuple[Engine, EngineInfo]], *, max_queue_seconds: float | None = None
    ) -> None:
        """`engine_factory` runs in the engine's thread: all tensor work happens there.

        `max_queue_seconds` of work may wait before calls are refused, None for any.
        """
        self._factory = engine_factory
        self._inbox: SimpleQueue[_Item] = SimpleQueue()
        self._streams = StreamTable(self.cancel, max_queue_seconds)
        self._state = EngineState.STARTING
        self._info: EngineInfo | None = None
        self._latest = EngineStats()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._finished = asyncio.Event()

    async def start(self) -> EngineInfo:
        """Builds the engine in its thread; whatever that raises is raised here."""
        if self._thread is not None:
            raise EngineDeadError("This engine was started before; make a new one.")
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, args=(ready,), name=THREAD_NAME, daemon=True)
        self._thread.start()
        try:
            self._info = await ready
        except BaseException:
            self._state = EngineState.STOPPED
            self._inbox.put(None)
            raise
        if self._state is EngineState.STARTING:
            self._state = EngineState.READY
        return self._info

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDeadError("The engine has not started yet.")
        return self._info

    def submit(self, request: EngineRequest) -> OutputStream:
        if self._state is not EngineState.READY:
            raise EngineDeadError(f"The engine is {self._state.value}, not ready.")
        stream = self._streams.open(request)
        self._inbox.put(lambda driver: driver.submit(request))
        return stream

    def arriving(self, owner: str) -> AbstractContextManager[None]:
        return self._streams.waiting.arriving(owner)

    def check_room(self, owner: str) -> None:
        self._streams.waiting.check_room(owner)

    def cancel(self, request_id: str) -> None:
        self._inbox.put(lambda driver: driver.cancel(request_id))

    def end_reasoning(self, request_id: str) -> None:
        self._inbox.put(lambda driver: driver.end_reasoning(request_id))

    def control(self, control: Control) -> None:
        self._inbox.put(lambda driver: driver.control(control))

    async def stats(self) -> EngineStats:
        if self._state is EngineState.READY and self._loop is not None:
            answer: asyncio.Future[EngineStats] = self._loop.create_future()
            self._inbox.put(answer)
            self._latest = await answer
        return replace(self._latest, waiting_seconds=self._streams.waiting.seconds())

    async def close(self) -> None:
        """Ends the thread after the step it is in; unfinished sequences get an ERROR output."""
        self._inbox.put(None)
        if self._thread is not None:
            await self._finished.wait()
            self._thread.join()
        self._state = EngineState.STOPPED

    # ---- below: the engine's thread

    def outputs(self, outputs: list[EngineOutput]) -> None:
        self._post(self._streams.deliver, outputs)

    def refused(self, request_id: str, error: RequestError) -> None:
        self._post(self._streams.refuse, request_id, error)

    def paced(self, pace: Pace) -> None:
        self._post(self._paced, pace)

    def _paced(self, pace: Pace) -> None:
        self._streams.waiting.pace = pace

    def _main(self, ready: asyncio.Future[EngineInfo]) -> None:
        try:
            engine, info = self._factory()
        except BaseException as error:
            self._post(_settle, ready, error)
            self._post(self._ended, "The engine could not start.")
            return
        driver = EngineDriver(engine, self)
        self._post(_settle, ready, info)
        message = "The engine was closed."
        try:
            while self._take(driver):
                driver.step()
        except Exception:
            _log.exception("the engine stopped")
            message = "The engine stopped after an internal error."
        finally:
            driver.close()
            self._post(self._ended, message)

    def _take(self, driver: EngineDriver) -> bool:
        """Handles what lies in the inbox, waiting for it if there is nothing else to do; False at the end."""
        while not (driver.has_work and self._inbox.empty()):
            item = self._inbox.get()
            if item is None:
                return False
            if isinstance(item, asyncio.Future):
                self._post(_settle, item, driver.stats())
            else:
                item(driver)
        return True

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        """Runs function in the client's event loop; a loop that was closed has nobody left to tell."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            self._inbox.put(None)

    def _ended(self, message: str) -> None:
        """In the event loop: nothing will come from the thread any more."""
        self._state = EngineState.STOPPED
        self._latest = ended(self._latest)
        self._finished.set()
        self._streams.fail_all(message)
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, asyncio.Future):
                _settle(item, self._latest)


def _settle(future: asyncio.Future[Any], outcome: Any) -> None:
    """Gives a future its result or, for an exception, its error; one that was cancelled meanwhile is left alone."""
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
