"""The HTTP processes of a server beside this one: what all have counted is summed where figures are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from penstock.core.request import EngineStats
from penstock.host import front_messages as front
from penstock.server.errors import not_ready
from penstock.server.patience import patience

_PATIENCE_S = 5.0


class Siblings:
    """What this process and those beside it ask each other, through their host. Belongs to an event loop."""

    def __init__(
        self, place: int, count: int, send: Callable[[front.Up], None], own: Callable[[], EngineStats]
    ) -> None:
        """This process is number `place` of `count`; `send` tells the host, `own` is what it knows of its requests."""
        self.first = place == 0
        self.count = count
        self.own = own
        self._send = send
        self._figures: Callable[[], Awaitable[bytes]] | None = None
        self._turn = asyncio.Lock()  # what is told later is no less
        self._telling: set[asyncio.Task[None]] = set()
        self._asked: dict[int, asyncio.Future[front.Figures]] = {}
        self._number = 0

    def answer(self, figures: Callable[[], Awaitable[bytes]]) -> None:
        """From now on the host is told this process's own figures when it asks."""
        self._figures = figures

    async def figures(self) -> front.Figures:
        """What the engine has counted, and what all processes have; raises HttpError 503 where the host is silent."""
        self._number += 1
        number = self._number
        answer: asyncio.Future[front.Figures] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self._send(front.AskFigures(number))
        try:
            async with patience(_PATIENCE_S):
                return await answer
        except TimeoutError:
            raise not_ready("Figures cannot be had at the moment; retry shortly.", "not_ready", 1) from None
        finally:
            del self._asked[number]

    def heard(self, message: front.TellFigures | front.Figures) -> None:
        """The host has asked, or answered."""
        if isinstance(message, front.TellFigures):
            task = asyncio.ensure_future(self._tell())
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)
        elif (answer := self._asked.get(message.number)) is not None and not answer.done():
            answer.set_result(message)

    async def _tell(self) -> None:
        async with self._turn:
            self._send(front.OwnFigures(b"" if self._figures is None else await self._figures()))
