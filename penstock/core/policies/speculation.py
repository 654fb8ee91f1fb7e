"""What an engine's loop knows of whoever drafts: how much there may be of it, and what is told of it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from penstock.config.speculation import MOST_DRAFTS
from penstock.core.policies.step_cost import StepCost, UnknownStepCost


class DraftFigures(NamedTuple):
    """Fields of EngineStats that are of drafts; the scheduler counts the others."""

    drafter_failures: int = 0
    draft_decisions: tuple[tuple[str, int], ...] = ()
    accepted_now: float = 0.0
    accepted_usually: float = 0.0
    accepted_by_position: tuple[tuple[int, int], ...] = ()


class Speculation(Protocol):
    """Drafts for an engine's sequences.

    Attributes:
        cost: learns what steps cost.
        most: drafts of a sequence at a time; 0 once there are none any more.
    """

    cost: StepCost
    most: int

    def figures(self) -> DraftFigures:
        """What is told of it."""


class NoSpeculation:
    """The null form: nothing is learned nor told of what a runner may draft, and none of it forbidden."""

    def __init__(self) -> None:
        self.cost: StepCost = UnknownStepCost()
        self.most = MOST_DRAFTS

    def figures(self) -> DraftFigures:
        return DraftFigures()
