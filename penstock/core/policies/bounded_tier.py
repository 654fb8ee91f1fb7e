"""A lower tier of so many places: what is copied there and when, which copies go first, and when one is worth a load.

GreedyDual-Size-Frequency, as on the device; a prefix never goes before what it leads to.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from penstock.core.kv.node import Key, Namespace, Node
from penstock.core.kv.tier import Tier
from penstock.core.policies.eviction import worth_of
from penstock.core.policies.least_squares import ForgettingFit
from penstock.core.protocol import NULL_BLOCK

if TYPE_CHECKING:
    from penstock.core.kv.cache import KVCache

_AHEAD = 16  # blocks of a group, the next to be evicted, that are kept copied once so few are free
_STATES_AHEAD = 4  # and checkpoints of recurrent states, once so few slots are free
_MOST_PASSED = 64  # copies that are looked at to find one that may go
_PRELOADS = 2  # prefixes that come up at a time for those who wait
_MEMORY = 32  # loads after which a measure counts 1/e
_PATIENCE = 5.0  # seconds a sequence waits for a load where nobody knows how long computing takes
_LEAST_PATIENCE = 0.5
_TRIED_AGAIN = 30.0  # seconds after which a tier that was too slow is tried again


class Entry(NamedTuple):
    """What a copy is of: a block of tokens, by content.

    Attributes:
        group: cache group.
        digest: of all that the entries depend on in this model, from the namespace to the last token.
        parent: the digest of the block before it, b"" for the first of a prefix.
        namespace: its own, as far as it differs from that block's: the space of a first block, and the owner where
            what is public ends.
        key: its tokens.
    """

    group: int
    digest: bytes
    parent: bytes
    namespace: Namespace
    key: Key


class Catalog(Protocol):
    """Who remembers what copies are of, beyond this process."""

    def describe(self, place: int, entry: Entry) -> None:
        """What will be written at a place."""

    def forget(self, place: int) -> None:
        """The copy at a place is not wanted any more."""


class NoCatalog:
    """Nobody does."""

    def describe(self, place: int, entry: Entry) -> None:
        pass

    def forget(self, place: int) -> None:
        pass


def place_numbers(places: Sequence[int]) -> tuple[range, ...]:
    """The numbers of each group's places, of so many a group: all different, from 1 on, and the same with more room."""
    groups = len(places)
    return tuple(range(1 + g, 1 + g + groups * count, groups) for g, count in enumerate(places))


def digest_after(before: bytes, name: Hashable) -> bytes:
    """The digest of a node that its parent, of such a digest, has under a name."""
    return blake2b(repr((before, name)).encode(), digest_size=16).digest()


def digest_of(node: Node) -> bytes:
    """Names a node by content: its namespace and all tokens up to its end."""
    unnamed = []
    up: Node | None = node
    while up is not None and not up.digest:
        unnamed.append(up)
        up = up.parent
    digest = up.digest if up is not None else b""
    for one in reversed(unnamed):
        digest = one.digest = digest_after(digest, one.name)
    return digest


def entry_of(node: Node, group: int) -> Entry:
    """What a copy of a node's block is of."""
    above = node.parent
    assert above is not None
    owner: Hashable = None
    if not above.key and above.parent is not None:  # a portal, whose name is (None, owner)
        owner = above.name[1] if isinstance(above.name, tuple) else None
        above = above.parent
    first = above.parent is None
    space = above.name if first else None
    return Entry(group, digest_of(node), b"" if first else digest_of(above), Namespace(space, owner), node.key)


@dataclass(slots=True)
class _Copy:
    node: Node
    group: int
    stamp: int = 0


@dataclass(slots=True)
class _Loads:
    """Loads on their way: since when, how many, and how long anybody waits for the first of them."""

    begun: float = 0.0
    patience: float = 0.0
    open: int = 0
    ended: int = 0


@dataclass(slots=True)
class TierCounters:
    """What a tier counts: blocks, and loads that were declined because computing is sooner done."""

    saved: int = 0
    loaded: int = 0
    failed: int = 0
    dropped: int = 0
    declined: int = 0


class BoundedTier(Tier):
    """A tier of so many places a group, of which at most `most_saving` are written at a time.

    Attributes:
        preloads: as of a tier.
        counters: what happened.
    """

    def __init__(
        self,
        places: Sequence[int],
        most_saving: int,
        dropped: Callable[[Node, int], None],
        catalog: Catalog | None = None,
    ) -> None:
        """`dropped` is told which node's block, of which group, has no copy here any more; `catalog` remembers what
        copies are of.
        """
        super().__init__()
        self.counters = TierCounters()
        self.preloads = _PRELOADS
        self._places = place_numbers(places)
        self._free = [list(reversed(numbers)) for numbers in self._places]
        self._most_saving = most_saving
        self._dropped = dropped
        self._urgent = False  # what is about to be evicted comes before copies of what is on the device
        self._catalog = catalog or NoCatalog()
        self._fresh: deque[Node] = deque(maxlen=max(64, max(places, default=0)))
        self._saving: set[int] = set()
        self._stored: dict[int, _Copy] = {}
        self._later: Counter[tuple[Node, int]] = Counter()  # copies of the blocks behind a node's
        self._order: list[list[tuple[float, int, int]]] = [[] for _ in places]  # by group: worth, stamp, place
        self._clock = 0.0
        self._stamp = 0
        self._readers: Counter[int] = Counter()
        self._leaving: set[int] = set()  # not wanted any more, and still being read
        self._loads = _Loads()
        self._fit = ForgettingFit(2, _MEMORY)
        self._tried = float("-inf")

    @property
    def places(self) -> tuple[range, ...]:
        """The numbers of each group's places."""
        return self._places

    @property
    def copies(self) -> int:
        """How many there are."""
        return len(self._stored)

    def ends(self, most: int) -> list[Node]:
        """Nodes of copies that nothing behind them has one of, those that came last first."""
        last = (copy.node for copy in reversed(self._stored.values()))
        return list(islice((node for node in last if not any(child.below for child in node.children.values())), most))

    def figures(self) -> Mapping[str, Any]:
        return {
            "kv_below": tuple(asdict(self.counters).items()),
            "kv_below_blocks": self.copies,
            "kv_below_places": sum(map(len, self._places)),
        }

    # -- what goes down -----------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:  # type: ignore[override]
        return bool(self._fresh) and self._has_room

    @property
    def _has_room(self) -> bool:
        """Whether a block may be written in all groups."""
        return len(self._saving) + len(self._places) <= self._most_saving

    def filled(self, node: Node) -> None:
        self._fresh.append(node)

    def due(self, cache: KVCache) -> Iterator[Node]:
        while self._fresh and self._has_room:
            yield self._fresh.popleft()
        self._urgent = True
        for g, pool in enumerate(cache.pools):
            if pool.num_free < _AHEAD and len(self._saving) < self._most_saving:
                yield from cache.tree.next_victims(g, _AHEAD)
        yield from cache.states.next_victims(_STATES_AHEAD)
        self._urgent = False

    def offer(self, node: Node, group: int) -> int | None:
        if len(self._saving) >= self._most_saving or not (self._free[group] or self._drop_one(group)):
            return None
        if node.parent is None:  # what was given up for it was all that kept it in the tree
            return None
        place = self._free[group].pop()
        self._saving.add(place)
        self._catalog.describe(place, entry_of(node, group))
        return place

    def stored(self, place: int, node: Node, group: int) -> None:
        self._saving.remove(place)
        self._keep(place, node, group)
        self.counters.saved += 1

    def restore(self, copies: Iterable[tuple[int, Node, int]]) -> None:
        """There are copies from before this process, place, node and group of each, in the order they were made."""
        for place, node, group in copies:
            self._keep(place, node, group)
        for free in self._free:
            free[:] = [place for place in free if place not in self._stored]

    def adopt(self, node: Node, group: int) -> bool:
        """There is a copy that others have made and the store can give; False without a place for it."""
        if not (self._free[group] or self._drop_one(group)):
            return False
        place = self._free[group].pop()
        self._catalog.describe(place, entry_of(node, group))
        node.below[group] = place
        self._keep(place, node, group)
        return True

    def _keep(self, place: int, node: Node, group: int) -> None:
        self._stored[place] = _Copy(node, group)
        self._later[_before(node), group] += 1
        self._push(place)

    def free(self, place: int) -> None:
        if self._stored.get(place) is not None:
            self._forget(place)
        self._saving.discard(place)
        self._catalog.forget(place)
        if self._readers[place]:
            self._leaving.add(place)
        else:
            self._give(place)

    def _give(self, place: int) -> None:
        group = next(g for g, numbers in enumerate(self._places) if place in numbers)
        self._free[group].append(place)

    # -- which copies go ----------------------------------------------------------------------------------------------

    def _push(self, place: int) -> None:
        """A copy is used, or may go from now on; one that leads to others is told of when those are gone."""
        copy = self._stored[place]
        if self._later[copy.node, copy.group] or copy.node.pins:
            return
        self._stamp += 1
        copy.stamp = self._stamp
        order = self._order[copy.group]
        heapq.heappush(order, (self._clock + worth_of(copy.node, len(copy.node.key)), self._stamp, place))
        if len(order) > 4 * len(self._stored) + 64:
            order[:] = [entry for entry in order if self._newest(entry)]
            heapq.heapify(order)

    def unpinned(self, node: Node) -> None:
        for place in node.below.values():
            if place in self._stored:
                self._push(place)

    def _newest(self, entry: tuple[float, int, int]) -> bool:
        copy = self._stored.get(entry[2])
        return copy is not None and copy.stamp == entry[1]

    def _drop_one(self, group: int) -> bool:
        """Gives up the copy of a group that is worth least; False if none may go."""
        order = self._order[group]
        kept: list[int] = []
        found = None
        while order and found is None and len(kept) < _MOST_PASSED:
            entry = heapq.heappop(order)
            if not self._newest(entry) or self._later[self._stored[entry[2]].node, group]:
                continue
            if self._may_go(entry[2]):
                found = entry
            else:
                kept.append(entry[2])
        for place in kept:
            self._push(place)  # but those that were pinned meanwhile
        if found is None:
            return False
        self._clock = max(self._clock, found[0])
        node = self._stored[found[2]].node
        self.counters.dropped += 1
        self.free(found[2])
        self._dropped(node, group)
        return True

    def _may_go(self, place: int) -> bool:
        """Whether nobody reads a copy, and its block has left the device, unless others are about to leave it."""
        copy = self._stored[place]
        return (
            not self._readers[place] and not copy.node.pins and (self._urgent or not _on_device(copy.node, copy.group))
        )

    def _forget(self, place: int) -> None:
        copy = self._stored.pop(place)
        before, group = _before(copy.node), copy.group
        self._later[before, group] -= 1
        if not self._later[before, group]:
            del self._later[before, group]
            if (last := before.below.get(group)) in self._stored:
                self._push(last)

    # -- what comes back ----------------------------------------------------------------------------------------------

    def worth(self, start: int, nodes: Sequence[Node]) -> bool:
        return self._is_worth(sum(len(node.below) for node in nodes), nodes[-1].depth - start)

    def _is_worth(self, blocks: int, tokens: int) -> bool:
        now = monotonic()
        loads = self._loads
        if loads.open and now - loads.begun > loads.patience:
            return False  # what is on its way does not come
        computed = self.seconds_for(tokens)
        if computed is None or now - self._tried > _TRIED_AGAIN:
            return True
        latency, each = self._fit.costs()
        return latency + each * blocks < computed

    def seconds_to_load(self, nodes: Sequence[Node]) -> float | None:
        latency, each = self._fit.costs()
        return (latency + each * sum(len(node.below) for node in nodes)) or None

    def declined(self) -> None:
        self.counters.declined += 1

    def open(self, place: int) -> float:
        self._readers[place] += 1
        computed = None
        if (copy := self._stored.get(place)) is not None:
            self._push(place)
            computed = self.seconds_for(copy.node.depth)
        patience = _PATIENCE if computed is None else max(_LEAST_PATIENCE, computed)
        if not self._loads.open:
            self._loads = _Loads(monotonic())
        self._loads.open += 1
        self._loads.patience = max(self._loads.patience, patience)
        return patience

    def close(self, place: int, *, failed: bool) -> None:
        self.counters.loaded += not failed
        self.counters.failed += failed
        loads = self._loads
        loads.open -= 1
        loads.ended += 1
        if not loads.open:
            self._tried = monotonic()
            taken = self._tried - loads.begun
            self._fit.add((1.0, float(loads.ended)), taken)
        self._readers[place] -= 1
        if not self._readers[place]:
            del self._readers[place]
            if place in self._leaving:
                self._leaving.remove(place)
                self._give(place)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every place is free, in use, or of a node that knows it."""
        places = [*(place for free in self._free for place in free), *self._saving, *self._stored, *self._leaving]
        assert sorted(places) == sorted(place for numbers in self._places for place in numbers), (
            "a place is lost or doubled"
        )
        for place, copy in self._stored.items():
            assert copy.node.below.get(copy.group) == place and place in self._places[copy.group]
        behind = Counter((_before(copy.node), copy.group) for copy in self._stored.values())
        assert behind == self._later, "copies behind a prefix are miscounted"


def _on_device(node: Node, group: int) -> bool:
    """Whether a node's block of a group is on the device; of the group behind all groups of blocks, its state."""
    return node.blocks[group] != NULL_BLOCK if group < len(node.blocks) else node.state is not None


def _before(node: Node) -> Node:
    """The node whose tokens come before, past a portal."""
    above = node.parent
    assert above is not None
    return above.parent if not above.key and above.parent is not None else above


def restored(cache: KVCache, tier: BoundedTier, found: Iterable[tuple[int, Entry]]) -> list[int]:
    """Puts copies that are there from before into the tree, in the order they were made.

    Returns:
        The places of those that nothing leads to, that there are two of, or that are not what their digest says: of
        what would be another's, or everybody's, where it is put now.
    """
    entries = list(found)
    behind: dict[bytes, list[Entry]] = {}
    for _, entry in entries:
        behind.setdefault(entry.parent, []).append(entry)
    nodes: dict[bytes, Node] = {}
    strays: list[Node] = []
    steps = deque(behind.pop(b"", ()))
    while steps:
        entry = steps.popleft()
        if len(entry.key) != cache.block_size or entry.digest in nodes:
            continue
        node = cache.tree.restore(nodes.get(entry.parent), entry.namespace, entry.key)
        if digest_of(node) == entry.digest:
            nodes[entry.digest] = node
            steps += behind.pop(entry.digest, ())
        else:
            strays.append(node)
    copies: list[tuple[int, Node, int]] = []
    lost: list[int] = []
    for place, entry in entries:
        known = nodes.get(entry.digest)
        if known is None or entry.group in known.below:
            lost.append(place)
        else:
            known.below[entry.group] = place
            cache.tree.observer.stored(known, entry.group, below=True)
            copies.append((place, known, entry.group))
    tier.restore(copies)
    for node in strays:
        if node.digest not in nodes:  # it was made for what it is not
            cache.tree.forget_below(node, -1)
    return lost
