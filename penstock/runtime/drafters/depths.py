"""How many drafts are verified: who decides it, and who takes all that there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from penstock.core.protocol import NewSequence, StepPlan
from penstock.runtime.drafters.drafter import Draft

SOON: Final = 4  # steps before a pause ends, from which on hidden states are read again


REASONS: Final[Mapping[str, str]] = {
    "verified": "drafts were verified, as they pay",
    "tried": "drafts were verified to learn what they bring",
    "nothing": "the drafter had nothing to propose",
    "acceptance": "drafts are right too seldom",
    "loss": "drafts have taken more time lately than they saved",
    "load": "they would pay for this sequence alone, and others would lose more",
    "resting": "not looked at, as nothing came of it lately",
    "request": "its request wants no drafts, or takes none",
    "failed": "the drafter has failed and is switched off",
}
"""Why a sequence's next step has the drafts it has."""


class Depths(Protocol):
    """Decides how many drafts are asked for, and which are verified.

    Attributes:
        decisions: how often which of REASONS decided, one for each slot and step that drew.
    """

    decisions: Counter[str]

    def begin(self, new: NewSequence) -> None:
        """A sequence takes a slot."""

    def release(self, slot: int) -> None:
        """It has left it."""

    def take(self, slot: int, tokens: Sequence[int]) -> None:
        """What its last drafts are judged by: the tokens that came."""

    def step(self, plan: StepPlan, seconds: float) -> None:
        """What the last step was like, and took: the next is taken to be like it."""

    def wanted(self, most: Mapping[int, int]) -> Mapping[int, int]:
        """For which of these slots the drafter is asked, and for how many drafts, where it may be for so many."""

    def took(self, seconds: float, longest: int) -> None:
        """What the drafter took for a proposal of so many drafts at most; 0 for what it did beside a step."""

    def chosen(self, drafts: Sequence[Draft]) -> Sequence[Draft]:
        """Those that are verified, cut to the length that pays."""

    def rest(self) -> int:
        """For how many steps nothing would be wanted, so that nobody asks; they count as if they had been told of."""

    def newcomer(self, rest: int) -> int:
        """What is left of such a rest when a sequence comes."""

    @property
    def paused(self) -> bool:
        """Whether no drafts are wanted for some steps to come, so that what they would be made of need not be kept."""


class FixedDepths:
    """All that a drafter makes, always."""

    def __init__(self) -> None:
        self.decisions = Counter[str]()

    def begin(self, new: NewSequence) -> None:
        """As Depths."""

    def release(self, slot: int) -> None:
        """As Depths."""

    def take(self, slot: int, tokens: Sequence[int]) -> None:
        """As Depths."""

    def step(self, plan: StepPlan, seconds: float) -> None:
        """As Depths."""

    def wanted(self, most: Mapping[int, int]) -> Mapping[int, int]:
        """As Depths."""
        return most

    def took(self, seconds: float, longest: int) -> None:
        """As Depths."""

    def chosen(self, drafts: Sequence[Draft]) -> Sequence[Draft]:
        """As Depths."""
        self.decisions["verified"] += len(drafts)
        return drafts

    def rest(self) -> int:
        """As Depths."""
        return 0

    def newcomer(self, rest: int) -> int:
        """As Depths."""
        return rest

    @property
    def paused(self) -> bool:
        """As Depths."""
        return False
