"""Who is told which blocks can be found, as that changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.core.kv.node import Node

if TYPE_CHECKING:
    from penstock.core.sequence import Sequence


class Observer:
    """This one is the null form: nobody. What it does is done within a step, so that it may only take notes.

    `below` says that it is a copy in the tier below, not the block on the device.
    """

    def begins(self, sequence: Sequence) -> None:
        """A sequence enters the batch; the blocks that it computes come after."""

    def stored(self, node: Node, group: int, *, below: bool = False) -> None:
        """A node's block of a group can be found."""

    def removed(self, node: Node, group: int, *, below: bool = False) -> None:
        """It cannot any more."""

    def cleared(self) -> None:
        """All that nobody uses was forgotten, each told of before."""

    def figures(self) -> Mapping[str, Any]:
        """What it counts, by the names of EngineStats."""
        return {}
