"""Changes of a server's adapters, carried out in each of its HTTP processes in the same order."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from penstock.config.adapters import AdapterUse
from penstock.config.errors import RequestError
from penstock.host.adapters import AdapterNames, use_of
from penstock.server.orders import Orders

_ORDER = "adapters"


class AdapterOrders:
    """Belongs to the event loop of its process."""

    def __init__(self, names: AdapterNames, orders: Orders) -> None:
        self._names, self._orders = names, orders
        orders.learn(_ORDER, self._carry_out)

    async def add(self, name: str, use: AdapterUse, rank: int, base: str, *, again: bool) -> None:
        """As AdapterNames.add, everywhere."""
        await self._give(add=name, use=asdict(use), rank=rank, base=base, again=again)

    async def remove(self, name: str) -> bool:
        """As AdapterNames.remove, everywhere."""
        return bool(await self._give(remove=name))

    async def scale(self, scales: list[tuple[int, float]]) -> None:
        """As AdapterNames.scale, everywhere."""
        await self._give(scale=scales)

    async def learn(self) -> None:
        """Takes over what processes beside this one know: it may have come later than their adapters."""
        known = [one for one in await self._orders.give(_ORDER, "", "{}") if isinstance(one, dict)]
        most = max(known, key=lambda one: int(one["numbers"]), default=None)
        if most is not None and int(most["numbers"]) > self._names.numbers:
            self._names.take_over(most)

    async def _give(self, **change: Any) -> Any:
        """What this change gave; raises RequestError where it is refused, as all do then or none does."""
        answers = await self._orders.give(_ORDER, "", json.dumps(change))
        refused = next((one["refused"] for one in answers if isinstance(one, dict) and "refused" in one), None)
        if refused is not None:
            raise RequestError(refused["message"], param=refused["param"], code=refused["code"])
        return next((one for one in answers if one is not None), None)

    def _carry_out(self, owner: str, told: str) -> Any:
        change = json.loads(told)
        try:
            if "add" in change:
                use, base = use_of(change["use"]), change["base"]
                self._names.add(change["add"], use, change["rank"], base, again=change["again"])
                return True
            if "remove" in change:
                return self._names.remove(change["remove"])
            if "scale" in change:
                self._names.scale(map(tuple, change["scale"]), "scales")
                return True
        except RequestError as error:
            return {"refused": {"message": str(error), "param": error.param, "code": error.code}}
        return self._names.known()
