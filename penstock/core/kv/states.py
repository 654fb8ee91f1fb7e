"""The recurrent states of sequences: where copies of them are kept, and what of a prefix they allow to be had."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.kv.allocation import Allocation
from penstock.core.kv.node import Match, Node
from penstock.core.policies.checkpoints import Checkpoints
from penstock.core.protocol import CacheOp, CacheOpKind

if TYPE_CHECKING:
    from penstock.core.sequence import Sequence


class States:
    """What the cache and the prefix tree ask of the group of recurrent layers. The null form: there are none.

    Attributes:
        group: the number operations name it by, behind all groups of blocks.
        divisible: whether a block's beginning can be had without the rest.
        miss_reason: why a prefix whose blocks are there cannot be had.
        pinnable: slots for copies of states; None where none are needed.
    """

    group = -1
    divisible = True
    miss_reason = "window_evicted"
    pinnable: int | None = None

    def kept(self, node: Node) -> bool:
        """Whether a sequence can go on at the end of a node."""
        return True

    def kept_below(self, node: Node) -> bool:
        """Whether a sequence can go on at the end of a node once what lies below is loaded."""
        return True

    def drop(self, node: Node) -> None:
        """The node has lost its tokens."""

    def adopt(self, slot: int, node: Node | None) -> None:
        """A slot that was borrowed has the state at the end of a node; None: it is given back."""

    def forks(self, position: int) -> int:
        """Where a state is to be kept because a prompt leaves there what the tree knows; 0 for nowhere."""
        return 0

    def awaited(self, owner: Sequence, pending: int) -> int:
        """Up to where another sequence can use what `owner` is computing."""
        return pending

    def begin(self, sequence: Sequence, match: Match) -> list[int]:
        """Token counts at which the sequence's state is to be kept."""
        return []

    def restore(self, match: Match, slot: int) -> list[CacheOp]:
        """Operations that bring a request slot's state to the end of a match."""
        return []

    def keep(self, sequence: Sequence, node: Node, at_rest: bool) -> list[CacheOp]:
        """Operations that copy a sequence's state for the node where it ends."""
        return []

    def pin(self, node: Node) -> None:
        """The node's state stays for good."""

    def unpin(self, node: Node) -> None:
        """It goes like any other from now on."""

    def next_victims(self, most: int) -> list[Node]:
        """Nodes that lose their states next."""
        return []

    def forget(self) -> None:
        """A step failed: what it copied is unknown."""

    def borrow(self, count: int) -> tuple[int, ...] | None:
        """Slots for the states behind drafts; None where there are too few."""
        return ()

    def settle(self, allocation: Allocation, slot: int, accepted: int) -> list[CacheOp]:
        """Drafts were verified: operations that make the state behind the accepted ones the request slot's own."""
        return []

    def return_slots(self, allocation: Allocation) -> None:
        """Drafts were given up."""

    def check_integrity(self) -> None:
        """Raises AssertionError if slots are lost."""


class StateGroup(States):
    """Recurrent layers: a prefix can be had only where a copy of its state is kept, exactly there."""

    divisible = False
    miss_reason = "no_checkpoint"

    def __init__(self, checkpoints: Checkpoints, group: int, block_size: int) -> None:
        self.checkpoints = checkpoints
        self.pinnable = len(checkpoints.slots)
        self.group = group
        self._size = block_size

    def kept(self, node: Node) -> bool:
        return node.state is not None

    def kept_below(self, node: Node) -> bool:
        return self.group in node.below

    def drop(self, node: Node) -> None:
        self.checkpoints.drop(node)

    def adopt(self, slot: int, node: Node | None) -> None:
        self.checkpoints.settle(slot, node)

    def forks(self, position: int) -> int:
        return position

    def awaited(self, owner: Sequence, pending: int) -> int:
        marks = owner.allocation.state_marks if owner.allocation else []
        return max((count for count in marks if count <= pending), default=0)

    def begin(self, sequence: Sequence, match: Match) -> list[int]:
        if not self.checkpoints.slots:
            return []
        last = (len(sequence.tokens) - (not sequence.public)) // self._size * self._size
        return [count for count in {match.forks, last} if count > match.reach]

    def restore(self, match: Match, slot: int) -> list[CacheOp]:
        if not match.tokens or match.below:
            return []
        source = (match.tail or match.nodes[-1]).state
        assert source is not None
        self.checkpoints.touch(source)
        return [CacheOp(CacheOpKind.COPY, self.group, source, slot, match.tokens)]

    def keep(self, sequence: Sequence, node: Node, at_rest: bool) -> list[CacheOp]:
        """Nothing if a step in flight goes beyond the node; nothing for a public node, which all would see."""
        if not at_rest or (node.public and not sequence.public) or not node.filled or node.state is not None:
            return []
        slot = self.checkpoints.give(node)
        return [] if slot is None else [CacheOp(CacheOpKind.CHECKPOINT, self.group, sequence.slot, slot, node.depth)]

    def pin(self, node: Node) -> None:
        self.checkpoints.pin(node)

    def unpin(self, node: Node) -> None:
        self.checkpoints.unpin(node)

    def next_victims(self, most: int) -> list[Node]:
        return self.checkpoints.next_victims(most)

    def forget(self) -> None:
        self.checkpoints.clear()

    def borrow(self, count: int) -> tuple[int, ...] | None:
        return self.checkpoints.borrow(count)

    def settle(self, allocation: Allocation, slot: int, accepted: int) -> list[CacheOp]:
        if not allocation.draft_states:
            return []
        source = allocation.draft_states[accepted]
        self.return_slots(allocation)
        return [CacheOp(CacheOpKind.COPY, self.group, source, slot, 0)]

    def return_slots(self, allocation: Allocation) -> None:
        self.checkpoints.give_back(allocation.draft_states)
        allocation.draft_states = ()

    def check_integrity(self) -> None:
        self.checkpoints.check_integrity()
