"""Where drafts come from: a drafter is told of the tokens of sequences that may have drafts, and proposes more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from penstock.core.protocol import NewSequence, Proposal, SlotResult


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

    def propose(self, slots: Sequence[int]) -> Sequence[Proposal]:
        """Drafts behind the last known tokens of slots, each of which has just drawn; at most one proposal a slot."""


class NoDrafter:
    """The null form: nothing is proposed."""

    most = 0

    def begin(self, new: NewSequence) -> None:
        """As Drafter."""

    def take(self, slot: int, tokens: Sequence[int]) -> None:
        """As Drafter."""

    def release(self, slot: int) -> None:
        """As Drafter."""

    def propose(self, slots: Sequence[int]) -> Sequence[Proposal]:
        """As Drafter: none."""
        return ()


class Drafting:
    """A runner's drafter, and which slots it drafts for: those whose requests allow it."""

    def __init__(self, drafter: Drafter | None = None) -> None:
        self._drafter: Drafter = drafter or NoDrafter()
        self._slots: set[int] = set()

    def add_row(self, new: NewSequence) -> None:
        """A sequence takes a slot."""
        if new.speculate and new.pooling is None:
            self._slots.add(new.slot)
            self._drafter.begin(new)

    def release_row(self, slot: int) -> None:
        """A slot is free again."""
        if slot in self._slots:
            self._slots.remove(slot)
            self._drafter.release(slot)

    def take(self, slot: int, tokens: Sequence[int]) -> None:
        """Tokens of a slot that are known without having been drawn."""
        if slot in self._slots:
            self._drafter.take(slot, tokens)

    def propose(self, results: Iterable[SlotResult]) -> tuple[Proposal, ...]:
        """What may follow what a step has drawn."""
        if not self._slots:
            return ()
        slots: list[int] = []
        for result in results:
            if result.tokens and result.slot in self._slots:
                self._drafter.take(result.slot, result.tokens)
                slots.append(result.slot)
        return tuple(self._drafter.propose(slots)) if slots else ()
