"""A runner's drafter: which slots it drafts for, and which of its drafts the next step verifies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.core.policies.step_cost import StepCost
from penstock.core.protocol import NewSequence, Proposal, SlotResult, StepPlan
from penstock.runtime.drafters.depths import Depths, FixedDepths
from penstock.runtime.drafters.drafter import Drafter, NoDrafter


class Drafting:
    """Drafts for those sequences whose requests allow it.

    Attributes:
        cost: learns what steps cost, by which depths are chosen; None where nobody asks.
    """

    def __init__(
        self, drafter: Drafter | None = None, depths: Depths | None = None, cost: StepCost | None = None
    ) -> None:
        self.cost = cost
        self._drafter: Drafter = drafter or NoDrafter()
        self._depths: Depths = depths or FixedDepths()
        self._slots: dict[int, int] = {}  # most drafts of each at a time

    @property
    def most(self) -> int:
        """Drafts of a proposal."""
        return self._drafter.most

    def add_row(self, new: NewSequence) -> None:
        """A sequence takes a slot."""
        if new.speculate and new.pooling is None:
            self._slots[new.slot] = min(new.speculate, self._drafter.most)
            self._drafter.begin(new)
            self._depths.begin(new)

    def release_row(self, slot: int) -> None:
        """A slot is free again."""
        if slot in self._slots:
            del self._slots[slot]
            self._drafter.release(slot)
            self._depths.release(slot)

    def take(self, slot: int, tokens: Sequence[int]) -> None:
        """Tokens of a slot that are known, drawn or not."""
        if slot in self._slots:
            self._drafter.take(slot, tokens)
            self._depths.take(slot, tokens)

    def propose(self, plan: StepPlan, results: Iterable[SlotResult]) -> tuple[Proposal, ...]:
        """What may follow what a step has drawn."""
        if not self._slots:
            return ()
        drawn: dict[int, int] = {}
        for result in results:
            if result.tokens and result.slot in self._slots:
                self.take(result.slot, result.tokens)
                drawn[result.slot] = self._slots[result.slot]
        self._depths.step(plan)
        wanted = self._depths.wanted(drawn)
        if not wanted:
            return ()
        chosen = self._depths.chosen(self._drafter.propose(wanted))
        return tuple(Proposal(draft.slot, draft.tokens, draft.parents) for draft in chosen)
