"""What a client asks of its own running requests: each HTTP process of a server is asked, since any may answer them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.server.siblings import Siblings

Order = Callable[[str, str], Any]
"""Carries out an order of an owner about what has that name; what it answers is told as JSON."""


@dataclass(slots=True)
class Orders:
    """The orders of one process, and how the others are given them.

    Attributes:
        siblings: the other processes; None for one alone.
    """

    siblings: Siblings | None = None
    _known: dict[str, Order] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.siblings is not None:
            self.siblings.carry_out = self._carry_out

    def learn(self, order: str, how: Order) -> None:
        """From now on this process knows how to carry out an order."""
        self._known[order] = how

    async def give(self, order: str, owner: str, name: str) -> list[Any]:
        """What each process answers, this one among them; raises HttpError 503 where the host is silent."""
        if self.siblings is None:
            return [self._carry_out(order, owner, name)]
        return await self.siblings.carried_out(order, owner, name)

    def _carry_out(self, order: str, owner: str, name: str) -> Any:
        how = self._known.get(order)
        return None if how is None else how(owner, name)
