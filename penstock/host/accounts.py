"""The last requests of several HTTP processes, for whichever of them is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final, Protocol

from penstock.host import front_messages as front

PATIENCE_S: Final = 1.0  # for processes that say nothing


class Telling(Protocol):
    """An HTTP process that remembers requests."""

    def tell(self, message: front.Down) -> None:
        """Sends it a message."""


@dataclass
class _Round:
    """One question: who has not told yet, and what the others told."""

    missing: set[Telling]
    told: list[bytes] = field(default_factory=list)
    complete: asyncio.Event = field(default_factory=asyncio.Event)

    def drop(self, process: Telling) -> None:
        self.missing.discard(process)
        if not self.missing:
            self.complete.set()


class Accounts:
    """Asks all HTTP processes for their last requests when one of them wants them. What a dead one knew is lost."""

    def __init__(self, there: Callable[[], Collection[Telling]]) -> None:
        """`there` are the processes that answer now."""
        self._there = there
        self._rounds: dict[int, _Round] = {}
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def asked(self, process: Telling, asked: front.AskRequests) -> None:
        """A process wants the requests of all, under its own number."""
        task = asyncio.create_task(self._collect(process, asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def told(self, process: Telling, told: front.OwnRequests) -> None:
        """A process told its own."""
        found = self._rounds.get(told.round)
        if found is not None and process in found.missing:
            found.told.append(told.requests)
            found.drop(process)

    def left(self, process: Telling) -> None:
        """A process has gone."""
        for found in self._rounds.values():
            found.drop(process)

    async def close(self) -> None:
        """Asks nobody any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _collect(self, process: Telling, asked: front.AskRequests) -> None:
        self._number += 1
        number, there = self._number, list(self._there())
        found = self._rounds[number] = _Round(set(there))
        try:
            for each in there:
                each.tell(front.TellRequests(number, asked.owner, asked.order, asked.name))
            if there:
                waiting = asyncio.ensure_future(found.complete.wait())
                await asyncio.wait((waiting,), timeout=PATIENCE_S)
                waiting.cancel()
            process.tell(front.Requests(asked.number, found.told))
        finally:
            del self._rounds[number]
