"""Blocks that requests want kept longer, or less long, than others: of whom, until when, and how many there may be."""

from __future__ import annotations

import heapq
from collections import Counter
from itertools import count
from time import monotonic

from penstock.config.retention import USUAL
from penstock.core.kv.node import Node

_SHARE = 1 / 2  # of the blocks that all owners together may want kept
_OWN_SHARE = 1 / 4  # and one of them


class Retained:
    """Priorities of nodes.

    Who wants more kept than a share of the pool, or all together more than half of it, has it kept like everything
    else: nobody takes the cache from others by saying that theirs is dear.
    """

    def __init__(self, blocks: int) -> None:
        """`blocks` there are of tokens."""
        self._most, self._most_own = int(blocks * _SHARE), int(blocks * _OWN_SHARE)
        self._raised: dict[Node, str] = {}  # and whose they are
        self._own: Counter[str] = Counter()
        self._ends: list[tuple[float, int, Node]] = []
        self._numbers = count()

    def mark(self, node: Node, owner: str, priority: int, seconds: float | None) -> bool:
        """Gives a node a priority for so many seconds; whether it has now. The higher of two counts, or the longer."""
        until = float("inf") if seconds is None else monotonic() + seconds
        if (priority, until) <= (node.priority, node.until) and node.priority != USUAL:
            return False
        if priority > USUAL and not self._raise(node, owner):
            return False
        node.priority, node.until = priority, until
        if seconds is not None:
            heapq.heappush(self._ends, (node.until, next(self._numbers), node))
            if len(self._ends) > 2 * len(self._raised) + 2 * self._most + 64:
                self._ends = [entry for entry in self._ends if entry[2].until == entry[0]]
                heapq.heapify(self._ends)
        return True

    def _raise(self, node: Node, owner: str) -> bool:
        if node not in self._raised:
            if len(self._raised) >= self._most or self._own[owner] >= self._most_own:
                return False
            self._raised[node] = owner
            self._own[owner] += 1
        return True

    def ended(self) -> list[Node]:
        """Nodes that have the usual priority again from now on."""
        found: list[Node] = []
        now = monotonic() if self._ends else 0.0
        while self._ends and self._ends[0][0] <= now:
            until, _, node = heapq.heappop(self._ends)
            if node.until == until:
                self.forget(node)
                found.append(node)
        return found

    def forget(self, node: Node) -> None:
        """A node has the usual priority."""
        node.priority, node.until = USUAL, float("inf")
        owner = self._raised.pop(node, None)
        if owner is not None:
            self._own[owner] -= 1
            if not self._own[owner]:
                del self._own[owner]

    def check_integrity(self) -> None:
        """Raises AssertionError if counts or bounds are wrong."""
        assert Counter(self._raised.values()) == self._own
        assert len(self._raised) <= self._most and all(own <= self._most_own for own in self._own.values())
        assert all(node.priority > USUAL and node.filled for node in self._raised), "a node is not kept any more"
