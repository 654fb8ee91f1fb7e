"""What a drafter is: it is told of the tokens of sequences that may have drafts, and proposes more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from penstock.core.protocol import NewSequence, StepPlan


class Draft(NamedTuple):
    """What may follow a sequence's last known token.

    Attributes:
        slot: its request slot.
        tokens: the drafts, in order.
        kind: how it was found, a small number of the drafter's own: drafts of one kind are right about as often.
        parents: as in core.protocol.Proposal.
    """

    slot: int
    tokens: tuple[int, ...]
    kind: int = 0
    parents: tuple[int, ...] = ()


class Drafter(Protocol):
    """Proposes what may follow. What it proposes changes how many steps an answer takes, never what it says.

    Attributes:
        most: drafts of a proposal.
    """

    most: int

    def begin(self, new: NewSequence) -> None:
        """A sequence takes a request slot, anew if the slot has it already; its tokens so far are told."""

    def take(self, slot: int, tokens: Sequence[int]) -> None:
        """Tokens of a slot that became known: drawn, accepted or forced."""

    def release(self, slot: int) -> None:
        """The slot's sequence has left it."""

    def step(self, plan: StepPlan) -> None:
        """A step that was computed, before the tokens it drew are told: what became of the caches' blocks."""

    def propose(self, wanted: Mapping[int, int]) -> Sequence[Draft]:
        """Drafts behind the last known tokens of slots, each of which has just drawn: one a slot, of so many tokens at
        most.
        """


class NoDrafter:
    """The null form: nothing is proposed."""

    most = 0

    def begin(self, new: NewSequence) -> None:
        """As Drafter."""

    def take(self, slot: int, tokens: Sequence[int]) -> None:
        """As Drafter."""

    def release(self, slot: int) -> None:
        """As Drafter."""

    def step(self, plan: StepPlan) -> None:
        """As Drafter."""

    def propose(self, wanted: Mapping[int, int]) -> Sequence[Draft]:
        """As Drafter: none."""
        return ()
