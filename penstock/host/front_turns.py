"""Whose requests go on in a new engine: those of one HTTP process after those of another."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Generic, TypeVar

TURN_S: Final = 5.0  # without a word of the process whose turn it is, before it is the next one's
Member = TypeVar("Member")


class FrontTurns(Generic[Member]):
    """The turns of HTTP processes in an engine, so that a request that ends engines is found among those of one.

    Whoever had not gone on when an engine died comes first in the next one: nobody else's requests are there then, and
    what is tried is to blame if that dies too. One that says nothing keeps the others for TURN_S; one that speaks as
    long as it takes, for a prompt on trial may be long, and with others' requests beside it nobody could be blamed.
    """

    def __init__(self, give: Callable[[Member], None], speaks: Callable[[Member], bool]) -> None:
        """`give` tells a process that it is its turn; `speaks` is whether it was heard in the last TURN_S."""
        self._give = give
        self._speaks = speaks
        self._waiting: deque[Member] = deque()
        self._now: Member | None = None
        self._going_on: list[Member] = []  # who had their turn and have not gone on
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, members: Iterable[Member]) -> None:
        """There is an engine."""
        self.end()
        first, self._going_on = self._going_on, []
        self._waiting = deque(sorted(members, key=lambda member: member not in first))
        self._next()

    def end(self) -> None:
        """It has gone."""
        self._waiting.clear()
        self._pass()

    def join(self, member: Member) -> None:
        """A process is there since the engine is."""
        self._waiting.append(member)
        self._next()

    def through(self, member: Member) -> None:
        """The requests of a process have gone on, or it has gone itself."""
        if member in self._going_on:
            self._going_on.remove(member)
        if member in self._waiting:
            self._waiting.remove(member)
        if member == self._now:
            self._pass()
            self._next()

    def _next(self) -> None:
        if self._now is None and self._waiting:
            self._now = self._waiting.popleft()
            self._going_on.append(self._now)
            self._wait()
            self._give(self._now)

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TURN_S, self._look)

    def _look(self) -> None:
        if self._now is not None and self._speaks(self._now):
            self._wait()
        else:
            self._pass()
            self._next()

    def _pass(self) -> None:
        self._now = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
