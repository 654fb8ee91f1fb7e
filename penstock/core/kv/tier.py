"""Where entries go that leave the device, and come back from.

The prefix tree is the index: a node whose only copy lies below stays in it, with the place of each of its blocks.
"""

from __future__ import annotations

from penstock.core.kv.node import Node


class Tier:
    """What the cache asks of the tier below the device. This one is the null form: what is evicted is gone.

    Attributes:
        accepts: whether it takes anything.
    """

    accepts = False

    def offer(self, node: Node, group: int) -> int | None:
        """A place for the copy of a node's block that will be evicted soon; None if it is not wanted.

        The copy counts once `stored` says so. Places of other nodes may be given up for it.
        """
        return None

    def stored(self, place: int, node: Node, group: int) -> None:
        """The copy at a place is whole."""

    def free(self, place: int) -> None:
        """What was to be at a place is not, or is not wanted any more, and nobody writes there."""

    def open(self, place: int) -> None:
        """A load reads the copy at a place: nobody may write there until it is closed as often."""

    def close(self, place: int) -> None:
        """A load has ended."""
