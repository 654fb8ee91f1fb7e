"""Which cached block goes first: that of the lowest priority, then by cost to recompute x uses, with ageing.

GreedyDual-Size-Frequency: Cherkasova, HPL-98-69R1.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

from penstock.core.kv.node import Node

_ATTENTION_COST_TOKENS = 4096  # depth at which attention costs about as much as the rest of a token
_MOST_USES = 16  # more do not count, so that what was popular once goes in the end
_MOST_EVICTED = 65_536  # evicted prefixes remembered to explain misses


def worth_of(node: Node, block_size: int) -> float:
    """What computing a node's block again costs, times how often that is likely."""
    uses = min(node.uses, _MOST_USES)
    return uses * len(node.key) / block_size * (1.0 + node.depth / _ATTENTION_COST_TOKENS)


class EvictionOrder:
    """The nodes whose block of one group may be evicted, the first to go first."""

    def __init__(self, group: int, block_size: int, most_entries: int, evictable: Callable[[Node], bool]) -> None:
        """`evictable` tells whether a node may (still) go; of more entries superseded ones are forgotten."""
        self._group = group
        self._block_size = block_size
        self._most_entries = most_entries
        self._evictable = evictable
        self._heap: list[tuple[int, float, int, Node]] = []
        self._clock = 0.0
        self._stamp = 0

    def push(self, node: Node) -> None:
        """A node may be evicted from now on."""
        self._stamp += 1
        node.stamps[self._group] = self._stamp
        worth = self._clock + worth_of(node, self._block_size)
        heapq.heappush(self._heap, (node.priority, worth, self._stamp, node))
        if len(self._heap) > self._most_entries:
            self._heap = [entry for entry in self._heap if self._holds(entry)]
            heapq.heapify(self._heap)

    def pop(self) -> Node | None:
        """Takes the node that goes first; None if there is none."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._holds(entry):
                self._clock = max(self._clock, entry[1])
                return entry[3]
        return None

    def first(self, most: int) -> list[Node]:
        """The nodes that go first, which stay in the order."""
        entries: list[tuple[int, float, int, Node]] = []
        while self._heap and len(entries) < most:
            entry = heapq.heappop(self._heap)
            if self._holds(entry):
                entries.append(entry)
        for entry in entries:
            heapq.heappush(self._heap, entry)
        return [node for *_, node in entries]

    def _holds(self, entry: tuple[int, float, int, Node]) -> bool:
        """Whether an entry is its node's newest, and true."""
        return entry[2] == entry[3].stamps[self._group] and self._evictable(entry[3])


class Evicted:
    """Hashes of prefixes that were evicted, of late: they explain misses and prove nothing."""

    def __init__(self, most: int) -> None:
        self._paths: set[int] = set()
        self._ages: deque[int] = deque()
        self._most = min(_MOST_EVICTED, most)

    def __contains__(self, path: int) -> bool:
        return path in self._paths

    def add(self, path: int) -> None:
        """A prefix was evicted."""
        if path in self._paths:
            return
        self._paths.add(path)
        self._ages.append(path)
        if len(self._ages) > self._most:
            self._paths.discard(self._ages.popleft())
