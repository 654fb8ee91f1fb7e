"""Where entries go that leave the device, and come back from.

The prefix tree is the index: a node whose only copy lies below stays in it, with the place of each of its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.core.kv.node import Node

if TYPE_CHECKING:
    from penstock.core.kv.cache import KVCache


class Tier:
    """What the cache asks of the tier below the device. This one is the null form: what is evicted is gone.

    Attributes:
        waiting: whether copies are due while nothing is evicted.
        preloads: prefixes that may come up at a time for those who wait to be admitted.
        seconds_for: how long computing so many tokens takes; None as long as that is not known.
    """

    waiting = False
    preloads = 0

    def __init__(self) -> None:
        self.seconds_for: Callable[[int], float | None] = lambda tokens: None

    def filled(self, node: Node) -> None:
        """A node's tokens were computed, all of a block."""

    def due(self, cache: KVCache) -> Iterable[Node]:
        """Nodes of whole blocks whose copies are to begin with the next plan, the most urgent first."""
        return ()

    def offer(self, node: Node, group: int) -> int | None:
        """A place for the copy of a node's block; None if it is not wanted.

        The copy counts once `stored` says so. Places of other nodes may be given up for it.
        """
        return None

    def stored(self, place: int, node: Node, group: int) -> None:
        """The copy at a place is whole."""

    def free(self, place: int) -> None:
        """What was to be at a place is not, or is not wanted any more, and nobody writes there."""

    def worth(self, start: int, nodes: Sequence[Node]) -> bool:
        """Whether loading these nodes, which go on from `start` tokens, is sooner done than computing them."""
        return True

    def declined(self) -> None:
        """A sequence began without them, since they were not worth it."""

    def seconds_to_load(self, nodes: Sequence[Node]) -> float | None:
        """How long loading these takes; None where that is not known yet."""
        return None

    def unpinned(self, node: Node) -> None:
        """A node's copies may go like any others from now on: `Node.pins` is 0 again."""

    def figures(self) -> Mapping[str, Any]:
        """What it has and counts, by the names of EngineStats."""
        return {}

    def open(self, place: int) -> float:
        """A load reads the copy at a place: nobody may write there until it is closed as often.

        Returns:
            The seconds after which nobody waits for it any more.
        """
        return float("inf")

    def close(self, place: int, *, failed: bool) -> None:
        """A load has ended."""
