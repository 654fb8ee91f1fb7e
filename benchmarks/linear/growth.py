"""The exponent by which a function's CPU time grows with the size of its input."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LIMIT = 1.3
_LEAST_S = 0.002  # of CPU: what is shorter says little
_MOST_SIZE = 2**20
_TRIES = 4


@dataclass(frozen=True, slots=True)
class Growth:
    """What was measured.

    Attributes:
        size: n.
        seconds: of CPU for an input of n, and of 2n.
        exponent: log2 of their ratio; 0 where no size within reach takes measurable time.
    """

    size: int
    seconds: tuple[float, float]
    exponent: float


def growth(
    run: Callable[[Any], Any],
    make: Callable[[int], Any],
    *,
    most: int = _MOST_SIZE,
    limit: float = LIMIT,
    times: int = 5,
) -> Growth:
    """Measures at the first size that takes measurable time, and at twice that.

    The best of `times` runs counts, as whatever disturbs one makes it longer; a result above the limit is measured
    again, at larger sizes. No input is longer than 2 · `most`.
    """
    size = min(256, most)
    first = best(run, make(size), 2)
    while first < _LEAST_S and 2 * size <= most:
        size *= 2
        first = best(run, make(size), 2)
    found = _measured(run, make, size, times)
    for _ in range(_TRIES):
        if found.exponent <= limit:
            break
        size = size if found.seconds[1] > 1 or 2 * size > most else 2 * size  # where counted work comes to its end
        again = _measured(run, make, size, times)
        found = min(found, again, key=lambda growth: growth.exponent)
    return found


def _measured(run: Callable[[Any], Any], make: Callable[[int], Any], size: int, times: int) -> Growth:
    one, two = make(size), make(2 * size)
    seconds = best(run, one, times), best(run, two, times)
    small = max(seconds) < _LEAST_S
    return Growth(size, seconds, 0.0 if small else math.log2(seconds[1] / max(seconds[0], 1e-9)))


def best(run: Callable[[Any], Any], given: Any, times: int) -> float:
    """CPU seconds of the quickest of several runs, of fewer if they are long."""
    quickest, spent = math.inf, 0.0
    collecting = gc.isenabled()
    gc.disable()  # it goes through all there is, not only through what the run made
    try:
        for _ in range(times):
            began = time.thread_time()
            run(given)
            took = time.thread_time() - began
            quickest, spent = min(quickest, took), spent + took
            if spent > 0.5:
                break
    finally:
        if collecting:
            gc.enable()
    return quickest
