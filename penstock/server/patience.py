"""Timeouts that count only time in which the event loop ran, so that a pause of the server ends nobody's request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from penstock.engine.watched_time import WatchedTime

_LOOKS = 8  # at the clock within a timeout: a pause, however long, uses up a quarter of it at most


class PatientTimer:
    """As `loop.call_later`, by the time the loop ran: what came in during a pause is read before the timer fires."""

    __slots__ = ("_action", "_clock", "_handle", "_loop", "_seconds", "_step")

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, action: Callable[[], object]) -> None:
        self._loop = loop
        self._seconds = seconds
        self._action = action
        self._step = max(seconds, 0.0) / _LOOKS
        self._clock = WatchedTime(2 * self._step)
        self._handle: asyncio.TimerHandle | None = loop.call_later(self._step, self._look)

    def elapsed(self) -> float:
        """Seconds in which the loop ran since the timer was set."""
        return self._clock.seconds()

    def cancel(self) -> None:
        """Forgets the action; safe to call twice."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _look(self) -> None:
        left = self._seconds - self._clock.seconds()
        if left <= 0:
            self._handle = None
            self._action()
        else:
            self._handle = self._loop.call_later(min(self._step, left), self._look)


@asynccontextmanager
async def patience(seconds: float) -> AsyncIterator[PatientTimer]:
    """As `asyncio.timeout`, by the time the loop ran.

    Raises:
        TimeoutError: what is inside took longer.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        timer = PatientTimer(loop, seconds, lambda: limit.reschedule(loop.time()))
        try:
            yield timer
        finally:
            timer.cancel()
