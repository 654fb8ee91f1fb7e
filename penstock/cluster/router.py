"""Deals requests to engines: what is known of them is gathered here, and a policy decides. No engines, no clocks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.cluster.known_prefixes import MOST_BLOCKS, KnownPrefixes, PromptNames
from penstock.cluster.policies import Asked, Policy, Seen
from penstock.config.adapters import adapters_key
from penstock.core.request import EngineRequest
from penstock.transfer.prefix_names import PrefixNames

_MEMORY: Final = 64  # requests an engine after which what it was given counts 1/e


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine has to do yet.

    Attributes:
        seconds: of work, as far as is known.
        requests: that it answers.
        price: seconds that a token of a prompt takes.
        computed: tokens of prompts that it has computed, since it was first there.
    """

    seconds: float
    requests: int
    price: float
    computed: int = 0


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request may go.

    Attributes:
        engines: their numbers, the best first.
        cached: by number, tokens of the prompt that each is thought to have.
        names: of the prompt's blocks.
    """

    engines: Sequence[int]
    cached: Mapping[int, int]
    names: Sequence[int]


class Router:
    """What is known of engines, by their numbers. A decision costs a look a block of the prompt and engine."""

    def __init__(
        self, policy: Policy, names: PrefixNames, engines: int, block_size: int, *, shared: bool, caching: bool = True
    ) -> None:
        """`names` are those by which engines tell what they have cached, which they do if `caching`; `shared` as of
        PromptNames.
        """
        self._policy = policy
        self._names = names
        self._block_size = block_size
        self._shared = shared
        self._most = MOST_BLOCKS if caching else 0
        self._known = [KnownPrefixes() for _ in range(engines)]
        self._late = [0.0] * engines  # tokens that were computed: what they cost is told anew each time
        self._computed = [0] * engines
        self._keep = 1.0 - 1.0 / (_MEMORY * engines)

    def route(self, request: EngineRequest, loads: Mapping[int, Load]) -> Route:
        """Where a request goes, of the engines that there are loads of; at least one."""
        prompt = PromptNames(self._names, request, self._block_size, self._most, shared=self._shared)
        cached = {number: self._known[number].cached(prompt) for number in loads}
        for number, load in loads.items():
            self._late[number] += load.computed - self._computed[number]
            self._computed[number] = load.computed
        least = min(self._late[number] for number in loads)
        seen = []
        for number, load in loads.items():
            late = load.price * (self._late[number] - least)
            seen.append(Seen(number, load.seconds, load.requests, late, cached[number], load.price))
        adapters = adapters_key(request.adapters)
        asked = Asked(len(request.prompt_ids), _session(request), str(adapters) if request.adapters else "")
        order = [engine.number for engine in self._policy.order(asked, seen)]
        return Route(order, cached, prompt.own)

    def took(self, number: int, request: EngineRequest, route: Route) -> None:
        """An engine was sent the request, whose prompt it will have."""
        self._late = [late * self._keep for late in self._late]
        if request.pooling is None:  # of which mostly nothing is kept
            self._known[number].expect(route.names)

    def hear(self, number: int, news: Sequence[int]) -> None:
        """An engine tells which blocks came and went."""
        self._known[number].hear(news)

    def forget(self, number: int) -> None:
        """An engine has gone, and all it had cached."""
        self._known[number].forget()


def _session(request: EngineRequest) -> Hashable:
    """What requests of one session have in common."""
    return (request.owner, request.session or request.cache_salt)
