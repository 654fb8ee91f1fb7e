"""Brings what a tier has from before into the pool while nothing is asked for, what was used last first."""

from __future__ import annotations

from typing import Any, Final, Protocol

from penstock.config.errors import RequestError
from penstock.config.sampling import SamplingParams
from penstock.core.kv.cache import KVCache
from penstock.core.kv.node import Node
from penstock.core.policies.bounded_tier import BoundedTier
from penstock.core.policies.pace import Pace
from penstock.core.request import EngineRequest

MOST_PREFIXES: Final = 64
_SHARE: Final = 0.5  # of the pool
_ONE: Final = SamplingParams(max_tokens=1, temperature=0.0)


class Idle(Protocol):
    """An engine for which there is nothing to do."""

    @property
    def has_work(self) -> bool:
        """Whether there is any now."""

    def add(self, request: EngineRequest) -> bool:
        """Queues a request."""

    def step(self) -> Any:
        """Makes one step."""

    def pace(self) -> Pace | None:
        """How fast steps are, once that is known."""


class Warming:
    """Asks for one prefix at a time, as who sent it would, so that it is loaded like any other."""

    def __init__(self, engine: Idle, cache: KVCache, tier: BoundedTier) -> None:
        self._engine = engine
        size = cache.block_size
        room = int(cache.capacity * _SHARE)
        self._asked: list[EngineRequest] = []
        for node in tier.ends(MOST_PREFIXES):
            request = _request(len(self._asked), node)
            if request is not None and len(request.prompt_ids) + size <= room:
                room -= len(request.prompt_ids) + size
                self._asked.insert(0, request)

    def __call__(self) -> bool:
        """Loads the next prefix; False if there was none."""
        if not self._asked:
            return False
        try:
            self._engine.add(self._asked.pop())
        except RequestError:  # of a longer context, or with other owners
            return True
        while self._engine.has_work:
            self._engine.step()
        return True


def _request(number: int, node: Node) -> EngineRequest | None:
    """What its owner would ask; None of prefixes with adapters or media, which this does not have."""
    parts: list[tuple[int, ...]] = []
    owner: Any = None
    up: Node | None = node
    while up is not None and up.parent is not None:
        if up.key:
            parts.append(up.key)
        elif isinstance(up.name, tuple):
            owner = up.name[1]
        up = up.parent
    ids = tuple(token for part in reversed(parts) for token in part)
    plain = up is not None and up.name == "" and all(0 <= token < 1 << 31 for token in ids)
    if not plain or not isinstance(owner, tuple):
        return None
    salt, name = owner
    return EngineRequest(f"warming {number}", (*ids, ids[-1]), _ONE, cache_salt=salt, owner=name)
