"""Work that goes on when the client has left: its events are kept, so that whoever comes back can follow them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from penstock.config import limits
from penstock.config.errors import OverloadedError
from penstock.server.lifecycle import Lifecycle


@dataclass(slots=True)
class Job:
    """One piece of work.

    Attributes:
        owner: whose it is.
        snapshot: its result as it is now.
        events: what has happened, encoded, in order.
    """

    owner: str
    snapshot: dict[str, Any]
    events: list[bytes] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None

    def tell(self, event: bytes) -> None:
        """Adds an event and wakes those who follow."""
        self.events.append(event)
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, start: int = 0) -> AsyncIterator[bytes]:
        """The events from number `start`, those to come included."""
        while True:
            while start < len(self.events):
                yield self.events[start]
                start += 1
            if self._task is None or self._task.done():
                return
            await self._news.wait()

    async def cancel(self) -> None:
        """Ends the work; returns when it has ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])


class Jobs:
    """The jobs that run, by id."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._running: dict[str, Job] = {}

    def get(self, owner: str, name: str) -> Job | None:
        """The job of that name, None unless it runs and is this owner's."""
        job = self._running.get(name)
        return job if job is not None and job.owner == owner else None

    def check_room(self) -> None:
        """Raises OverloadedError while as many run as may."""
        if len(self._running) >= limits.MAX_BACKGROUND_JOBS:
            raise OverloadedError(f"{len(self._running)} responses run in the background already; retry later.")

    def start(
        self,
        name: str,
        job: Job,
        work: Callable[[], Coroutine[Any, Any, None]],
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """Runs `work`, which tells the job's events; whoever stops the server waits for it as for a request.

        `release` is called when it has ended.
        """

        async def logged() -> None:
            try:
                await work()
            except Exception:
                logging.getLogger("penstock.server").exception("work in the background failed")

        held = contextlib.ExitStack()
        held.enter_context(self._lifecycle.track())
        held.callback(self._running.pop, name)
        held.callback(release)

        def ended(_: asyncio.Task[None]) -> None:
            held.close()
            job._wake()

        self._running[name] = job
        job._task = asyncio.create_task(logged())
        # Not in the task itself: one that is cancelled before its first turn never runs a line.
        job._task.add_done_callback(ended)

    async def aclose(self) -> None:
        """Ends all that run."""
        await asyncio.gather(*(job.cancel() for job in tuple(self._running.values())))
