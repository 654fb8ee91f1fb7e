"""Where a server is in its life: answering, draining, aborting."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from penstock.server.patience import patience
from penstock.server.slots import Slots
from penstock.server.told import ToldLogprobs


@dataclass(slots=True)
class Lifecycle:
    """State shared by the request handlers and whoever stops the server.

    Attributes:
        draining: new work is refused, running work goes on.
        aborted: set when running work must end at once.
        in_flight: requests with a body now being answered.
        told: log-probabilities that they tell.
        slots: what they leave in llama-server's slots; None where nobody may save that.
    """

    draining: bool = False
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    in_flight: int = 0
    told: ToldLogprobs = field(default_factory=ToldLogprobs)
    slots: Slots | None = None
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    @contextmanager
    def track(self) -> Iterator[None]:
        """Counts a request while it is answered."""
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    async def drain(self, timeout: float) -> bool:
        """Refuses new work and waits for running work, at most `timeout` seconds or until aborted.

        Returns:
            whether everything finished.
        """
        self.draining = True
        if self.in_flight:
            waiting = [asyncio.ensure_future(self._idle.wait()), asyncio.ensure_future(self.aborted.wait())]
            with suppress(TimeoutError):
                async with patience(timeout):
                    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
        return not self.in_flight
