"""Brings what a tier has from before into the pool while nothing is asked for, what was used last first."""

from __future__ import annotations

from contextlib import suppress
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

    def add(self, request: EngineRequest) -> bool:
        """Queues a request."""

    def pace(self) -> Pace | None:
        """How fast steps are, once that is known."""


class Warming:
    """Asks for one prefix at a time, as who sent it would, so that it is loaded like any other.

    It is asked for among the requests that come meanwhile, none of which waits for it; no client has a request of its
    name, and so its outputs are dropped, and no metrics count it. No more is asked for once a load has failed.
    """

    def __init__(self, engine: Idle, cache: KVCache, tier: BoundedTier) -> None:
        self._engine = engine
        size = cache.block_size
        room = int(cache.capacity * _SHARE)
        self._tier = tier
        self._size = size
        self._asked: list[tuple[Node, EngineRequest]] = []
        for node in tier.ends(MOST_PREFIXES):
            request = _request(len(self._asked), node)
            if request is not None and len(request.prompt_ids) + size <= room:
                room -= len(request.prompt_ids) + size
                self._asked.insert(0, (node, request))

    def __call__(self) -> bool:
        """Asks for the next prefix, once the one before it is there; False if there was none."""
        if self._tier.counters.failed:
            self._asked.clear()
        while self._asked:
            node, request = self._asked.pop()
            missing = self._missing(node)
            if not missing or not self._tier.worth(missing[0].depth - self._size, missing):
                continue  # it was forgotten meanwhile, somebody asked for it, or computing it is sooner done
            with suppress(RequestError):  # of a longer context
                self._engine.add(request)
                return True
        return False

    @staticmethod
    def _missing(node: Node) -> list[Node]:
        """The blocks at the end of a prefix that lie below alone."""
        found: list[Node] = []
        up: Node | None = node
        while up is not None and up.below and not up.filled:
            found.insert(0, up)
            up = up.parent
        return found


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
    return EngineRequest(f"\0warming {number}", (*ids, ids[-1]), _ONE, cache_salt=salt, owner=name, counted=False)
