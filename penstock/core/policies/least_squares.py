"""Linear costs fitted to what was measured, by least squares that forget."""

from __future__ import annotations

from collections.abc import Sequence

_MOST_COUNTS = 1e30
_RIDGE = 1e-3  # of a column's own weight: what cannot be told apart is put down to the first column


class ForgettingFit:
    """Fits answer = sum of cost x value over columns, of which the first should always be 1; no cost is below 0.

    An answer counts by its inverse, so that a single large one does not bend the rest; in the end all is scaled to what
    the answers are together.
    """

    def __init__(self, columns: int, memory: int) -> None:
        """After `memory` answers one counts 1/e."""
        self._columns = columns
        self._growth = 1.0 / (1.0 - 1.0 / memory)
        self._counts = 1.0  # an answer, beside the first: late ones more, so that nothing is changed that is not met
        self._products = [[0.0] * columns for _ in range(columns)]  # on and above the diagonal
        self._answers = [0.0] * columns
        self._sums = [0.0] * columns
        self._total = 0.0

    def add(self, values: Sequence[float], answer: float) -> None:
        """Learns that these values took `answer`, which is above 0."""
        counts = self._counts = self._counts * self._growth
        weight = counts / answer
        met = [(i, value) for i, value in enumerate(values) if value]
        for place, (i, value) in enumerate(met):
            self._answers[i] += counts * value
            self._sums[i] += counts * value
            row, weighted = self._products[i], weight * value
            for j, other in met[place:]:
                row[j] += weighted * other
        self._total += counts * answer
        if counts > _MOST_COUNTS:
            self._scale(1.0 / counts)

    def _scale(self, by: float) -> None:
        self._products = [[one * by for one in row] for row in self._products]
        self._answers = [one * by for one in self._answers]
        self._sums = [one * by for one in self._sums]
        self._total *= by
        self._counts *= by

    def costs(self) -> list[float]:
        """What one of each column costs."""
        costs = self._fit(list(range(self._columns)))
        told = sum(cost * total for cost, total in zip(costs, self._sums, strict=True))
        scale = self._total / told if told > 0 else 1.0
        return [cost * scale for cost in costs]

    def _fit(self, columns: list[int]) -> list[float]:
        """The costs of these columns, without those whose cost would be below 0."""
        found = _solve(
            [
                [self._products[min(i, j)][max(i, j)] * (1.0 + _RIDGE * (i == j and i > 0)) for j in columns]
                + [self._answers[i]]
                for i in columns
            ]
        )
        costs = [0.0] * self._columns
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
