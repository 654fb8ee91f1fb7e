"""Bounds of what was measured a few times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from scipy import stats


def lower_bound(values: Sequence[float]) -> float:
    """Below which the mean of such values lies once in twenty times (Student's distribution)."""
    if len(values) < 2:
        return min(values)
    error = statistics.stdev(values) / len(values) ** 0.5
    quantile = float(stats.t.ppf(0.95, len(values) - 1))
    return float(statistics.fmean(values) - quantile * error)
