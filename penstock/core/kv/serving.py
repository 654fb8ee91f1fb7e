"""What of a prefix every cache group can serve, and which partial block goes on from it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from penstock.core.kv.groups import FullGroup
from penstock.core.kv.node import Key, Node
from penstock.core.kv.states import States
from penstock.core.protocol import NULL_BLOCK


class Serving:
    """Asks the groups whose blocks go one by one, and the recurrent states."""

    def __init__(self, groups: Sequence[FullGroup], single: Sequence[int], states: States) -> None:
        """`single` are the groups, of `groups`, whose blocks go one by one."""
        self._groups = groups
        self._single = single
        self._states = states

    def whole(self, nodes: list[Node]) -> int:
        """How many leading nodes form a prefix with its state and with what every group needs of it."""
        if not self._single and self._states.divisible:
            return len(nodes)
        best = 0
        gaps = dict.fromkeys(self._single, 0)  # tokens before this position are not all there
        for count, node in enumerate(nodes, 1):
            for g in self._single:
                if node.blocks[g] == NULL_BLOCK:
                    gaps[g] = node.depth
            if self.holds(gaps, node.depth) and self._states.kept(node):
                best = count
        return best

    def holds(self, gaps: dict[int, int], length: int) -> bool:
        return all(gap <= self._groups[g].first_needed(length) for g, gap in gaps.items())

    def tail(self, node: Node, nodes: list[Node], rest: Key) -> tuple[Node | None, int]:
        """The child of `node` that shares most of the tokens that follow; neighbours in key order suffice."""
        if not rest or not node.order:
            return None, 0
        if not self._states.divisible:
            return self._kept_tail(node, nodes, rest)
        at = bisect_left(node.order, rest)
        best: tuple[Node | None, int] = (None, 0)
        for index in (at - 1, at):
            if 0 <= index < len(node.order):
                child = node.children[node.order[index]]
                shared = _common(child.key, rest)
                if shared > best[1] and self._tail_servable(nodes, child, node.depth + shared):
                    best = (child, shared)
        return best

    def _kept_tail(self, node: Node, nodes: list[Node], rest: Key) -> tuple[Node | None, int]:
        """The longest child of `node` that `rest` begins with and whose state is kept: it cannot be had in part."""
        for count in range(len(rest), 0, -1):
            child = node.children.get(rest[:count])
            if child and child.filled and self._states.kept(child) and self._tail_servable(nodes, child, child.depth):
                return child, count
        return None, 0

    def _tail_servable(self, nodes: list[Node], child: Node, length: int) -> bool:
        gaps: dict[int, int] = {}
        for g in self._single:
            if child.blocks[g] == NULL_BLOCK and self._groups[g].first_needed(length) < length:
                return False
            gaps[g] = next((n.depth for n in reversed(nodes) if n.blocks[g] == NULL_BLOCK), 0)
        return self.holds(gaps, length)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    n = min(len(a), len(b))
    for i in range(n):
        if a[i] != b[i]:
            return i
    return n
