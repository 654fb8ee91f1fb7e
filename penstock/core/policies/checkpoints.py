"""Copies of recurrent states at nodes of the prefix tree: which slot is whose, and which is given up first."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

from penstock.core.kv.node import Node


class Checkpoints:
    """`count` slots behind those of the rows.

    Copies run in the order of their operations, so that a slot given up can be used at once.
    """

    def __init__(self, rows: int, count: int) -> None:
        self.slots = range(rows, rows + count)
        self._free = list(reversed(self.slots))
        self._holders: OrderedDict[int, Node] = OrderedDict()  # by slot, the least recently used first
        self._pinned: dict[int, Node] = {}  # by slot
        self._borrowed: set[int] = set()

    def give(self, node: Node) -> int | None:
        """A slot for the state at the end of a node that has none: a free one, or that used least recently, or None."""
        if not self._free and self._holders:
            self.drop(next(iter(self._holders.values())))
        if self._free:
            node.state = self._free.pop()
            self._holders[node.state] = node
        return node.state

    def borrow(self, count: int) -> tuple[int, ...] | None:
        """So many slots of no node, until they are given back: free ones, or those used least recently; or None."""
        if count > len(self._free) + len(self._holders):
            return None
        while len(self._free) < count:
            self.drop(next(iter(self._holders.values())))
        slots = tuple(self._free.pop() for _ in range(count))
        self._borrowed.update(slots)
        return slots

    def give_back(self, slots: tuple[int, ...]) -> None:
        """Slots that were borrowed."""
        self._borrowed.difference_update(slots)
        self._free.extend(slots)

    def settle(self, slot: int, node: Node | None) -> None:
        """A slot that was borrowed has a node's state, if that is wanted; else it is given back."""
        self._borrowed.remove(slot)
        if node is None or not node.filled or node.state is not None:
            self._free.append(slot)
        else:
            self._holders[slot] = node
            node.state = slot

    def touch(self, slot: int) -> None:
        """The slot is used."""
        if slot in self._holders:
            self._holders.move_to_end(slot)

    def next_victims(self, most: int) -> list[Node]:
        """Nodes whose checkpoints go next, where fewer slots than that are free."""
        return list(islice(self._holders.values(), most)) if len(self._free) < most else []

    def pin(self, node: Node) -> None:
        """Keeps a node's checkpoint, if it has one, for good."""
        if node.state is not None and node.state in self._holders:
            self._pinned[node.state] = self._holders.pop(node.state)

    def unpin(self, node: Node) -> None:
        """Ends what `pin` began, but for what everybody keeps."""
        if node.state is not None and node.state in self._pinned and not node.public:
            self._holders[node.state] = self._pinned.pop(node.state)

    def drop(self, node: Node) -> None:
        """Gives up the node's checkpoint, if it has one."""
        if node.state is not None:
            (self._holders if node.state in self._holders else self._pinned).pop(node.state)
            self._free.append(node.state)
            node.state = None

    def clear(self) -> None:
        """Gives up all but what everybody keeps, which was there before the first request."""
        for node in (*self._holders.values(), *(node for node in self._pinned.values() if not node.public)):
            self.drop(node)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot is free or of a node with tokens."""
        holders = {**self._holders, **self._pinned}
        assert sorted([*self._free, *holders, *self._borrowed]) == list(self.slots), "a slot is lost or doubled"
        assert all(node.state == slot and node.filled for slot, node in holders.items())
