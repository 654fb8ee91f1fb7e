"""Prefixes that owners keep for a time: their blocks are not evicted, nor their copies below, within a share of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any

from penstock.config.errors import RequestError
from penstock.core.kv.node import Node

if TYPE_CHECKING:
    from penstock.core.kv.cache import KVCache
    from penstock.core.request import EngineRequest
    from penstock.core.sequence import Sequence

SHARE = 0.5  # of each group's blocks, and of the slots for recurrent states
_OWNERS_SHARE = 0.5  # of those, which one key has at most
MOST_PINS = 1024  # of which a key has its share, too


@dataclass(slots=True)
class Held:
    """A pinned prefix.

    Attributes:
        request: that asked for it.
        node: where it ends.
        blocks: (group, block) of what it holds.
        until: when it ends, on the monotonic clock.
    """

    request: EngineRequest
    node: Node
    blocks: tuple[tuple[int, int], ...]
    until: float


class _Tally:
    """Blocks that pins hold, each counted once, however many hold it.

    Attributes:
        pins: how many there are.
        sizes: by group, how many blocks they hold.
    """

    def __init__(self) -> None:
        self._holds: Counter[tuple[int, int]] = Counter()
        self.pins = 0
        self.sizes: Counter[int] = Counter()

    def add(self, blocks: tuple[tuple[int, int], ...]) -> None:
        self.pins += 1
        for one in blocks:
            self._holds[one] += 1
            self.sizes[one[0]] += self._holds[one] == 1

    def remove(self, blocks: tuple[tuple[int, int], ...]) -> None:
        self.pins -= 1
        for one in blocks:
            self._holds[one] -= 1
            if not self._holds[one]:
                del self._holds[one]
                self.sizes[one[0]] -= 1


class Pins:
    """Who keeps what.

    Attributes:
        changed: told when a pin has come or gone.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._held: dict[tuple[str, str], Held] = {}  # by owner and name
        self._coming: dict[str, EngineRequest] = {}  # by request
        self._next = inf  # when one ends
        self._all = _Tally()
        self._of: dict[str, _Tally] = {}  # by owner
        self._ends: Counter[Node] = Counter()  # how many pins end there, where a state is kept for them
        self.changed: Callable[[], None] = lambda: None

    def reserved(self, group: int) -> int:
        """Blocks of a group that are pinned, or will be."""
        return self._all.sizes[group] + sum(self._need(request, group) for request in self._coming.values())

    def blocks(self) -> Iterator[tuple[int, int]]:
        """(group, block) of every reference that pins hold."""
        for held in self._held.values():
            yield from held.blocks

    def _need(self, request: EngineRequest, group: int) -> int:
        """Blocks of a group that pinning a prompt takes, whatever of it is there."""
        return self._cache.groups[group].peak_blocks(len(request.prompt_ids), 1)

    # -- coming and going ---------------------------------------------------------------------------------------------

    def reserve(self, request: EngineRequest, fit: Callable[[], None]) -> None:
        """Takes room for the pin of a request that is about to be queued.

        Args:
            request: asks for a pin.
            fit: raises RequestError where what is being computed would not fit any more beside it.

        Raises:
            RequestError: its name is taken, or there is no room.
        """
        pin = request.pin
        assert pin is not None
        coming = [one for one in self._coming.values() if one.owner == request.owner]
        named = {one.pin.name for one in coming if one.pin is not None}
        if (request.owner, pin.name) in self._held or pin.name in named:
            raise RequestError(f"You have a pin {pin.name!r} already; delete it first.", param="id", code="pin_exists")
        self._check_number(request.owner, len(coming), MOST_PINS, "places")
        if len(request.prompt_ids) < self._cache.block_size:
            raise RequestError(
                f"The prompt has {len(request.prompt_ids)} tokens, fewer than a block of the cache "
                f"({self._cache.block_size}): there is nothing to pin. Pin a longer one.",
                param="prompt",
                code="pin_too_short",
            )
        self._check_room(request, coming)
        self._coming[request.request_id] = request
        try:
            fit()
        except RequestError:
            del self._coming[request.request_id]
            raise _full("With this pin, requests that are being answered would not fit any more.") from None

    def _check_number(self, owner: str, coming: int, most: int, what: str) -> None:
        """Raises RequestError where there are as many as may be of something that each pin takes one of."""
        if len(self._held) + len(self._coming) >= most:
            raise _full(f"There are {most} {what} for pins, and all are taken.")
        share = int(most * _OWNERS_SHARE) if owner else most
        if self._tally(owner).pins + coming >= share:
            raise _full(f"You have {share} {what} for pins, the most that a key may have.")

    def _tally(self, owner: str) -> _Tally:
        return self._of.get(owner) or _Tally()

    def _check_room(self, request: EngineRequest, coming: list[EngineRequest]) -> None:
        for g, pool in enumerate(self._cache.pools):
            most, need = int((pool.num_blocks - 1) * SHARE), self._need(request, g)
            if (taken := self.reserved(g)) + need > most:
                raise _full(f"This pin takes up to {need} blocks; pins have {taken} of the {most} that they may have.")
            share = int(most * _OWNERS_SHARE) if request.owner else most
            mine = self._tally(request.owner).sizes[g] + sum(self._need(one, g) for one in coming)
            if mine + need > share:
                raise _full(f"This pin takes up to {need} blocks; yours have {mine} of the {share} that a key may pin.")
        slots = self._cache.states.pinnable
        if slots is not None:
            self._check_number(request.owner, len(coming), int(slots * SHARE), "slots of recurrent states")

    def hold(self, sequence: Sequence) -> None:
        """A prompt that is to be pinned was computed, to its end."""
        request, allocation = sequence.request, sequence.allocation
        if request.pin is None or allocation is None or sequence.follows:
            return
        if self._coming.pop(request.request_id, None) is None:  # another of its sequences was first
            return
        node = allocation.cursor
        while node.parent is not None and not (node.key and self._cache.states.kept(node)):
            node = node.parent
        if node.parent is None:
            return
        blocks = tuple(self._cache.tree.needed(node))
        for g, block in blocks:
            self._cache.tree.retain(g, block)
        self._all.add(blocks)
        self._of.setdefault(request.owner, _Tally()).add(blocks)
        self._ends[node] += 1
        if self._ends[node] == 1:
            self._cache.states.pin(node)
        for one in _path(node):
            one.pins += 1
        until = monotonic() + request.pin.seconds
        self._next = min(self._next, until)
        self._held[request.owner, request.pin.name] = Held(request, node, blocks, until)
        self.changed()

    def ended(self, request_id: str) -> None:
        """A request has ended: if it was to pin something it does not any more."""
        self._coming.pop(request_id, None)

    def drop(self, owner: str, name: str) -> bool:
        """Ends a pin of an owner; whether there was one."""
        held = self._held.pop((owner, name), None)
        if held is None:
            return False
        self._all.remove(held.blocks)
        self._of[owner].remove(held.blocks)
        if not self._of[owner].pins:
            del self._of[owner]
        for one in _path(held.node):
            one.pins -= 1
            if not one.pins and one.below:
                self._cache.transfers.tier.unpinned(one)
        self._ends[held.node] -= 1
        if not self._ends[held.node]:
            del self._ends[held.node]
            self._cache.states.unpin(held.node)
        self._cache.release_all(list(held.blocks))
        self.changed()
        return True

    def expire(self, now: float) -> None:
        """Ends those whose time is over."""
        if now < self._next:
            return
        for owner, name in [key for key, held in self._held.items() if held.until <= now]:
            self.drop(owner, name)
        self._next = min((held.until for held in self._held.values()), default=inf)

    # -- telling ------------------------------------------------------------------------------------------------------

    def of(self, owner: str) -> list[Mapping[str, Any]]:
        """An owner's pins, those that end first first."""
        now = monotonic()
        own = [(name, held) for (of, name), held in self._held.items() if of == owner]
        return [
            {"name": name, "tokens": held.node.depth, "seconds": max(0.0, held.until - now)}
            for name, held in sorted(own, key=lambda one: one[1].until)
        ]

    def all(self) -> Iterable[tuple[EngineRequest, float]]:
        """What asked for each pin, and the seconds that it has left."""
        now = monotonic()
        return [(held.request, held.until - now) for held in self._held.values()]


def _path(node: Node) -> Iterator[Node]:
    up: Node | None = node
    while up is not None:
        if up.key:
            yield up
        up = up.parent


def _full(why: str) -> RequestError:
    return RequestError(
        f"{why} Delete one, wait until one ends, pin less, or start the server with a larger --kv-cache-memory.",
        code="pins_full",
    )
