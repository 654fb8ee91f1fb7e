"""The HTTP processes of a server beside this one: what all have counted is summed where figures are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from penstock.config.engine_stats import EngineStats
from penstock.host import front_messages as front
from penstock.server.errors import not_ready
from penstock.server.patience import patience

_PATIENCE_S = 5.0


class Siblings:
    """What this process and those beside it ask each other, through their host. Belongs to an event loop."""

    def __init__(
        self, place: int, count: int, send: Callable[[front.Up], None], own: Callable[[], Mapping[str, EngineStats]]
    ) -> None:
        """This process is number `place` of `count`; `send` tells the host, `own` is what it knows of its requests, by
        model.
        """
        self.first = place == 0
        self.count = count
        self.own = own
        self._send = send
        self.carry_out: Callable[[str, str, str], Any] = lambda order, owner, name: None
        self._figures: Callable[[], Awaitable[bytes]] | None = None
        self._requests: Callable[[str | None], list[dict[str, Any]]] = lambda owner: []
        self._turn = asyncio.Lock()  # what is told later is no less
        self._telling: set[asyncio.Task[None]] = set()
        self._asked: dict[int, asyncio.Future[front.Figures | front.Requests]] = {}
        self._number = 0

    def answer(
        self, figures: Callable[[], Awaitable[bytes]], requests: Callable[[str | None], list[dict[str, Any]]]
    ) -> None:
        """From now on the host is told this process's own figures, and its last requests of an owner, when it asks."""
        self._figures, self._requests = figures, requests

    async def figures(self) -> front.Figures:
        """What engines have counted, and what all processes have; raises HttpError 503 where the host is silent."""
        answer = await self._answer(front.AskFigures)
        assert isinstance(answer, front.Figures)
        return answer

    async def requests(self, owner: str | None) -> list[list[dict[str, Any]]]:
        """The last requests of an owner, or with None of all, of each process; raises HttpError 503 as `figures`."""
        answer = await self._answer(lambda number: front.AskRequests(number, owner))
        assert isinstance(answer, front.Requests)
        return [msgspec.json.decode(told) for told in answer.told]

    async def carried_out(self, order: str, owner: str, name: str) -> list[Any]:
        """What each process answers to an order of an owner; raises HttpError 503 as `figures`."""
        answer = await self._answer(lambda number: front.AskRequests(number, owner, order, name))
        assert isinstance(answer, front.Requests)
        return [msgspec.json.decode(told) for told in answer.told]

    async def _answer(self, question: Callable[[int], front.Up]) -> front.Figures | front.Requests:
        self._number += 1
        number = self._number
        answer: asyncio.Future[front.Figures | front.Requests] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self._send(question(number))
        try:
            async with patience(_PATIENCE_S):
                return await answer
        except TimeoutError:
            what = "What other processes know cannot be had at the moment; retry shortly."
            raise not_ready(what, "not_ready", 1) from None
        finally:
            del self._asked[number]

    def heard(self, message: front.OfSiblings) -> None:
        """The host has asked, or answered."""
        if isinstance(message, front.TellFigures):
            task = asyncio.ensure_future(self._tell())
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)
        elif isinstance(message, front.TellRequests):
            self._send(front.OwnRequests(message.round, msgspec.json.encode(self._told(message))))
        elif (answer := self._asked.get(message.number)) is not None and not answer.done():
            answer.set_result(message)

    def _told(self, message: front.TellRequests) -> Any:
        if message.order:
            return self.carry_out(message.order, message.owner or "", message.name)
        return self._requests(message.owner)

    async def _tell(self) -> None:
        async with self._turn:
            self._send(front.OwnFigures(b"" if self._figures is None else await self._figures()))
