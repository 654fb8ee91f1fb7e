"""How fast an engine works: what a step, a prompt token and a generated token cost, fitted to the steps it has made."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.policies.least_squares import ForgettingFit
from penstock.core.protocol import StepPlan

_MEMORY = 512  # steps after which a measure counts 1/e
_LEAST_SECONDS = 0.5  # of work before anything is told of it
_EVERY = 16  # steps between two fits
_MOST = 10.0  # times what was expected that a step counts for: it was not all work, if the machine was stopped in it


@dataclass(frozen=True, slots=True)
class Pace:
    """A full batch at work.

    Attributes:
        step, prompt, output: seconds for a step as such, and for each token of a prompt and each generated one in it.
        rows: sequences that advance in a step while others wait.
        budget: most tokens of a step.
    """

    step: float
    prompt: float
    output: float
    rows: float
    budget: int

    def seconds(self, prompt: float, output: float) -> float:
        """How long so many prompt tokens and generated tokens take, in full steps."""
        steps = max(output / self.rows, prompt / self.budget)
        return self.step * steps + self.prompt * prompt + self.output * output


class PaceMeter:
    """Fits seconds = step + prompt x prompt tokens + output x generated tokens."""

    def __init__(self, rows: int, budget: int) -> None:
        self._rows = rows
        self._budget = budget
        self._fit = ForgettingFit(3, _MEMORY)
        self._full = [0.0, 0.0]  # steps in which others waited, and the rows of those
        self._watched = 0.0
        self._new: list[tuple[int, int, float, int | None]] = []
        self._pace: Pace | None = None

    def add(self, prompt: int, output: int, seconds: float, rows: int | None) -> None:
        """A step: its tokens, its time, and how many rows it had if others waited for one.

        Nothing is told of it before as many as lie between two fits are there: they are learned together, by code and
        from numbers that the processor's caches hold after the first.
        """
        self._new.append((prompt, output, seconds, rows))
        if len(self._new) == _EVERY:
            new, self._new = self._new, []
            for prompt, output, seconds, rows in new:
                self._learn(prompt, output, seconds, rows)
            if self._watched >= _LEAST_SECONDS:
                self._pace = self._measured()

    def add_step(self, plan: StepPlan, seconds: float, rows: int | None) -> None:
        """The same of a plan."""
        prompt = tokens = 0
        for span in plan.scheduled:
            prompt += span.prompt_tokens
            tokens += len(span.tokens)
        self.add(prompt, tokens - prompt, seconds, rows)

    def _learn(self, prompt: int, output: int, seconds: float, rows: int | None) -> None:
        if (pace := self._pace) is not None:
            expected = pace.step + pace.prompt * prompt + pace.output * output
            seconds = min(seconds, _MOST * expected) if expected > 0 else seconds
        seconds = max(seconds, 1e-6)
        self._fit.add((1.0, float(prompt), float(output)), seconds)
        if rows is not None:
            keep = 1.0 - 1.0 / _MEMORY
            self._full = [keep * self._full[0] + 1.0, keep * self._full[1] + rows]
        self._watched += seconds

    def pace(self) -> Pace | None:
        """What was measured; None as long as that is too little to judge by."""
        return self._pace

    def _measured(self) -> Pace:
        step, prompt, output = self._fit.costs()
        full_steps, full_rows = self._full
        rows = max(1.0, full_rows / full_steps) if full_steps >= 1.0 else float(self._rows)
        return Pace(step, prompt, output, rows, self._budget)
