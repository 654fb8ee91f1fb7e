"""Who gets a request: policies over what is known of each engine. Pure: no clocks, no engines.

The usual one has one cost, in seconds: what the engine has to do before it comes to the request, and what it then has
to compute of the prompt, which is what it has not cached. The others are there by name, as other routers have them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, Protocol

_COMPUTED: Final = 3.0  # how much a second of computing a prompt counts: those behind it wait for it too
_LATE: Final = 1.0  # the same of a second that an engine has worked of late, more than others
_MATCHED: Final = 0.3  # share of a prompt from which on the longest match decides, for "cache-aware"
_UNEVEN: Final = 1.5  # times as many requests,
_MANY: Final = 16  # and so many more: the fewest decide then


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of an engine.

    Attributes:
        number: its own.
        seconds: of work that it has to do yet.
        requests: that it answers.
        late: seconds of work that it was given of late, and the one that had the least was not.
        cached: tokens of the prompt that it has, or will have.
        price: seconds that a token of a prompt takes.
    """

    number: int
    seconds: float = 0.0
    requests: int = 0
    late: float = 0.0
    cached: int = 0
    price: float = 0.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What is known of a request.

    Attributes:
        tokens: of its prompt.
        session: who asks: requests of one conversation have equal ones.
        adapters: what tells its adapters from others, "" for none.
    """

    tokens: int
    session: Hashable = ""
    adapters: str = ""


class Policy(Protocol):
    """Puts engines into an order."""

    def order(self, asked: Asked, engines: Sequence[Seen]) -> list[Seen]:
        """The engines, the best first; none of them is left out."""


def cost_of(asked: Asked, engine: Seen) -> float:
    """Seconds until the engine has computed the prompt, and a share of what it has worked more than others.

    What is computed anew counts for more than what waits, so that a conversation does not leave its prefix for every
    short queue. Without that share engines that are never busy would all be the one that was first: what is common to
    many prompts is cached there alone.
    """
    return engine.seconds + _COMPUTED * engine.price * (asked.tokens - engine.cached) + _LATE * engine.late


class ByCost:
    """The one with the least cost."""

    def order(self, asked: Asked, engines: Sequence[Seen]) -> list[Seen]:
        return sorted(engines, key=lambda engine: (cost_of(asked, engine), engine.late, engine.number))


class CacheAware:
    """As SGLang's router: the longest match, if it is long; those with the fewest requests where that is uneven."""

    def order(self, asked: Asked, engines: Sequence[Seen]) -> list[Seen]:
        counts = [engine.requests for engine in engines]
        uneven = max(counts) - min(counts) > _MANY and max(counts) > _UNEVEN * min(counts)
        longest = max(engine.cached for engine in engines)
        if uneven or longest < _MATCHED * asked.tokens:
            return sorted(engines, key=lambda engine: (engine.requests, engine.late, engine.number))
        return sorted(engines, key=lambda engine: (-engine.cached, engine.requests, engine.number))


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def order(self, asked: Asked, engines: Sequence[Seen]) -> list[Seen]:
        first, self._next = self._next % len(engines), self._next + 1
        return [*engines[first:], *engines[:first]]


class PowerOfTwo:
    """The less busy one of two that are drawn (Mitzenmacher 2001, IEEE TPDS 12:10)."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def order(self, asked: Asked, engines: Sequence[Seen]) -> list[Seen]:
        drawn = self._random.sample(list(engines), len(engines))
        pair = sorted(drawn[:2], key=lambda engine: (engine.seconds, engine.requests))
        return [*pair, *drawn[2:]]


class BySession:
    """One and the same for a session, as long as it is there (rendezvous hashing: Thaler and Ravishankar 1998)."""

    def order(self, asked: Asked, engines: Sequence[Seen]) -> list[Seen]:
        return _by_hash(asked.session, engines)


class ByAdapter:
    """One and the same for an adapter; what has none goes by cost."""

    def __init__(self) -> None:
        self._others = ByCost()

    def order(self, asked: Asked, engines: Sequence[Seen]) -> list[Seen]:
        return _by_hash(asked.adapters, engines) if asked.adapters else self._others.order(asked, engines)


def _by_hash(key: Hashable, engines: Sequence[Seen]) -> list[Seen]:
    """In an order that is the key's own; engines that go or come change it for the keys that had them first alone."""
    return sorted(engines, key=lambda engine: blake2b(repr((key, engine.number)).encode(), digest_size=8).digest())


POLICIES: Final[Mapping[str, Callable[[], Policy]]] = {
    "cost": ByCost,
    "cache-aware": CacheAware,
    "session": BySession,
    "adapter": ByAdapter,
    "power-of-two": PowerOfTwo,
    "round-robin": RoundRobin,
}
"""By name, as `config.data_parallel.ROUTING_POLICIES` lists them."""
