"""A lower tier with one place a block, which gives up the copies used least recently."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

from penstock.core.kv.node import Node
from penstock.core.kv.tier import Tier
from penstock.core.protocol import NULL_BLOCK


class BoundedTier(Tier):
    """A tier of so many places, of which at most `most_saving` are written at a time."""

    accepts = True

    def __init__(self, places: int, most_saving: int, dropped: Callable[[Node, int], None]) -> None:
        """`dropped` is told which node's block, of which group, has no copy here any more."""
        self._free = list(range(places, 0, -1))
        self._count = places
        self._most_saving = most_saving
        self._dropped = dropped
        self._saving: set[int] = set()
        self._stored: OrderedDict[int, tuple[Node, int]] = OrderedDict()
        self._readers: Counter[int] = Counter()
        self._leaving: set[int] = set()  # not wanted any more, and still being read

    def offer(self, node: Node, group: int) -> int | None:
        if len(self._saving) >= self._most_saving:
            return None
        if not self._free:
            place = next((place for place in self._stored if self._may_go(place)), None)
            if place is None:
                return None
            self._dropped(*self._stored.pop(place))
            self._free.append(place)
        place = self._free.pop()
        self._saving.add(place)
        return place

    def _may_go(self, place: int) -> bool:
        """Whether nobody reads the copy and its block has left the device: else it would be copied again and again."""
        node, group = self._stored[place]
        return not self._readers[place] and node.blocks[group] == NULL_BLOCK

    def stored(self, place: int, node: Node, group: int) -> None:
        self._saving.remove(place)
        self._stored[place] = (node, group)

    def free(self, place: int) -> None:
        self._saving.discard(place)
        self._stored.pop(place, None)
        if self._readers[place]:
            self._leaving.add(place)
        else:
            self._free.append(place)

    def open(self, place: int) -> None:
        self._readers[place] += 1
        if place in self._stored:
            self._stored.move_to_end(place)

    def close(self, place: int) -> None:
        self._readers[place] -= 1
        if not self._readers[place]:
            del self._readers[place]
            if place in self._leaving:
                self._leaving.remove(place)
                self._free.append(place)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every place is free, in use, or of a node that knows it."""
        places = [*self._free, *self._saving, *self._stored, *self._leaving]
        assert sorted(places) == list(range(1, self._count + 1)), "a place is lost or doubled"
        assert all(node.below.get(group) == place for place, (node, group) in self._stored.items())
