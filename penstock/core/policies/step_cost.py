"""What a step will cost, learned from what steps have cost. Drafters, tiers, routers and time budgets ask it."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple, Protocol

from penstock.core.policies.least_squares import ForgettingFit
from penstock.core.protocol import StepPlan, StepTimings

_MEMORY = 512  # steps after which a measure counts 1/e
_LEAST_STEPS = 32  # before anything is told
_EVERY = 16  # steps between two fits


class StepShape(NamedTuple):
    """What makes a step's cost.

    Attributes:
        prompt, generated: tokens of either kind.
        context: positions that the step's tokens attend to, summed over sequences.
        rows: sequences.
        drafts: tokens that are verified.
    """

    prompt: int
    generated: int
    context: int
    rows: int
    drafts: int = 0

    @classmethod
    def of(cls, plan: StepPlan) -> StepShape:
        """That of a plan."""
        prompt = tokens = context = drafts = 0
        for span in plan.scheduled:
            prompt += span.prompt_tokens
            tokens += len(span.tokens)
            context += span.start + len(span.tokens)
            drafts += span.draft_tokens
        return cls(prompt, tokens - prompt - drafts, context, len(plan.scheduled), drafts)

    @property
    def columns(self) -> tuple[float, ...]:
        """1, and what is counted."""
        return (1.0, *map(float, self))


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds, and by how many the estimates of late steps were wrong (root of the mean square)."""

    seconds: float
    error: float


class StepCost(Protocol):
    """Tells what steps cost."""

    def learn(self, plan: StepPlan, timings: StepTimings) -> None:
        """Takes a step's time in the runner."""

    def estimate(self, shape: StepShape) -> Estimate | None:
        """What a step of that shape takes; None as long as nobody knows."""


class UnknownStepCost:
    """The null form: nothing is known."""

    def learn(self, plan: StepPlan, timings: StepTimings) -> None:
        pass

    def estimate(self, shape: StepShape) -> Estimate | None:
        return None


class LearnedStepCost:
    """Seconds as a sum over a step's tokens by kind, contexts and rows, fitted to the steps there were."""

    def __init__(self) -> None:
        self._fit = ForgettingFit(len(StepShape(0, 0, 0, 0).columns), _MEMORY)
        self._costs: list[float] | None = None
        self._square = 0.0
        self._weight = 0.0
        self._steps = 0

    def learn(self, plan: StepPlan, timings: StepTimings) -> None:
        seconds = timings.build + timings.forward + timings.sample
        if not plan.scheduled or seconds <= 0.0:
            return
        columns = StepShape.of(plan).columns
        if self._costs is not None:
            keep = 1.0 - 1.0 / _MEMORY
            wrong = seconds - sum(cost * value for cost, value in zip(self._costs, columns, strict=True))
            self._square = keep * self._square + wrong * wrong
            self._weight = keep * self._weight + 1.0
        self._fit.add(columns, seconds)
        self._steps += 1
        if self._steps % _EVERY == 0 and self._steps >= _LEAST_STEPS:
            self._costs = self._fit.costs()

    def estimate(self, shape: StepShape) -> Estimate | None:
        if self._costs is None or not self._weight:
            return None
        seconds = sum(cost * value for cost, value in zip(self._costs, shape.columns, strict=True))
        return Estimate(seconds, sqrt(self._square / self._weight))
