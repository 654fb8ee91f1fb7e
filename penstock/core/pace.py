"""How fast an engine works: what a step, a prompt token and a generated token cost, fitted to the steps it has made."""

from __future__ import annotations

from dataclasses import dataclass

_MEMORY = 512  # steps after which a measure counts 1/e
_LEAST_SECONDS, _LEAST_STEPS = 0.5, 16  # of work before anything is told of it
_EVERY = 16  # steps between two fits
_MOST = 10.0  # times what was expected that a step counts for: it was not all work, if the machine was stopped in it
_RIDGE = 1e-3  # of a column's own weight: what cannot be told apart is put down to the step


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
    """Fits seconds = step + prompt x prompt tokens + output x generated tokens, by least squares that forget.

    A step counts by the inverse of its time, so that a single slow one does not bend the rest; in the end all is scaled
    to the time that the steps together took.
    """

    def __init__(self, rows: int, budget: int) -> None:
        self._rows, self._budget = rows, budget
        self._products = [[0.0] * 3 for _ in range(3)]
        self._answers = [0.0] * 3
        self._sums = [0.0] * 3
        self._seconds = 0.0
        self._full = [0.0, 0.0]  # steps in which others waited, and the rows of those
        self._watched, self._steps = 0.0, 0
        self._pace: Pace | None = None

    def add(self, prompt: int, output: int, seconds: float, rows: int | None) -> None:
        """A step: its tokens, its time, and how many rows it had if others waited for one."""
        if (pace := self._pace) is not None:
            expected = pace.step + pace.prompt * prompt + pace.output * output
            seconds = min(seconds, _MOST * expected) if expected > 0 else seconds
        seconds = max(seconds, 1e-6)
        values = (1.0, float(prompt), float(output))
        weight = 1.0 / seconds
        keep = 1.0 - 1.0 / _MEMORY
        for i, value in enumerate(values):
            self._answers[i] = keep * self._answers[i] + weight * value * seconds
            self._sums[i] = keep * self._sums[i] + value
            for j, other in enumerate(values):
                self._products[i][j] = keep * self._products[i][j] + weight * value * other
        self._seconds = keep * self._seconds + seconds
        if rows is not None:
            self._full = [keep * self._full[0] + 1.0, keep * self._full[1] + rows]
        self._watched += seconds
        self._steps += 1
        if self._steps % _EVERY == 0 and self._watched >= _LEAST_SECONDS and self._steps >= _LEAST_STEPS:
            self._pace = self._measured()

    def pace(self) -> Pace | None:
        """What was measured; None as long as that is too little to judge by."""
        return self._pace

    def _measured(self) -> Pace:
        costs = self._fit([0, 1, 2])
        told = sum(cost * total for cost, total in zip(costs, self._sums, strict=True))
        scale = self._seconds / told if told > 0 else 1.0
        full_steps, full_rows = self._full
        rows = max(1.0, full_rows / full_steps) if full_steps >= 1.0 else float(self._rows)
        return Pace(costs[0] * scale, costs[1] * scale, costs[2] * scale, rows, self._budget)

    def _fit(self, columns: list[int]) -> list[float]:
        """The costs, none below 0: a column whose cost would be is left out."""
        found = _solve(
            [
                [self._products[i][j] * (1.0 + _RIDGE * (i == j and i > 0)) for j in columns] + [self._answers[i]]
                for i in columns
            ]
        )
        costs = [0.0] * 3
        for column, cost in zip(columns, found, strict=True):
            costs[column] = cost
        if len(columns) > 1 and min(found) < 0:
            return self._fit([column for column in columns if column != costs.index(min(costs))])
        return costs


def _solve(rows: list[list[float]]) -> list[float]:
    """Linear equations, each row with its right side at the end; an unknown that nothing tells of is 0."""
    size = len(rows)
    for pivot in range(size):
        best = max(range(pivot, size), key=lambda row: abs(rows[row][pivot]))
        rows[pivot], rows[best] = rows[best], rows[pivot]
        if abs(rows[pivot][pivot]) < 1e-12:
            continue
        for row in range(size):
            if row != pivot:
                factor = rows[row][pivot] / rows[pivot][pivot]
                rows[row] = [a - factor * b for a, b in zip(rows[row], rows[pivot], strict=True)]
    return [row[-1] / row[i] if abs(row[i]) >= 1e-12 else 0.0 for i, row in enumerate(rows)]
