"""A load test at several loads: where throughput stops growing and latency begins to, and the load that still meets
objectives.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, Final

from penstock.cli.measure import RequestRecord, summarize
from penstock.cli.workload import Job
from penstock.config.errors import ConfigError

MOST_POINTS: Final = 64
MOST_STEPS: Final = 6
"""Loads that are tried between the last that met the objectives and the first that did not."""
_NEAR: Final = 1.1  # of two loads: no other is tried between them

Drive = Callable[[float, Sequence[Job]], Awaitable[tuple[list[RequestRecord], float]]]
"""Sends jobs at a load: the records, and the seconds from the first to the last."""


@dataclass(frozen=True, slots=True)
class Point:
    """One load, and what `summarize` makes of it."""

    load: float
    figures: dict[str, Any]

    @property
    def attainment(self) -> float:
        """The share of requests that met the objectives."""
        return float(self.figures["goodput"]["slo_attainment"])


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is tried.

    Attributes:
        flag: the flag whose values the loads are.
        loads: in growing order.
        objectives: in milliseconds, as `parse_goodput` gives them.
        attainment: the share of requests that must meet them; None looks for no limit.
    """

    flag: str
    loads: Sequence[float]
    objectives: dict[str, float]
    attainment: float | None = None

    @property
    def whole(self) -> bool:
        """Whether loads are whole numbers."""
        return self.flag == "--max-concurrency"

    @property
    def most_points(self) -> int:
        """How many loads may be tried in all."""
        return len(self.loads) + (MOST_STEPS if self.attainment is not None else 0)


def parse_loads(flag: str, text: str) -> tuple[float, ...]:
    """The loads of text such as "1,2,4" in growing order; counts for --max-concurrency, else requests a second.

    Raises:
        ConfigError: one is no number above 0, or there are too many.
    """
    found = set[float]()
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = 0.0
        if not 0 < value <= 1e6 or (flag == "--max-concurrency" and value != int(value)):
            kind = "whole numbers from 1" if flag == "--max-concurrency" else "numbers above 0"
            raise ConfigError(f"{flag} has {part.strip()!r}; allowed: {kind} joined by commas, such as 1,2,4,8.")
        found.add(value)
    if len(found) > MOST_POINTS:
        raise ConfigError(f"{flag} has {len(found)} values; allowed: at most {MOST_POINTS}.")
    return tuple(sorted(found))


async def run_sweep(
    sweep: Sweep, jobs: Sequence[Job], each: int, drive: Drive, told: Callable[[Point], None] = lambda point: None
) -> tuple[list[Point], float | None]:
    """Tries the loads, each with the next `each` jobs, and then looks for the limit if that is wanted.

    The next load's jobs are others, so that the prefix cache helps none; a dataset that has too few begins anew.

    Returns:
        The points in the order of their loads, and the greatest load that met the objectives (None: none did, or no
        limit was wanted).
    """
    supply = cycle(jobs)
    points: list[Point] = []

    async def measure(load: float) -> Point:
        records, seconds = await drive(load, list(islice(supply, each)))
        point = Point(load, summarize(records, seconds, sweep.objectives))
        points.append(point)
        told(point)
        return point

    for load in sweep.loads:
        await measure(load)
    limit = None if sweep.attainment is None else await _limit(sweep, points, sweep.attainment, measure)
    return sorted(points, key=lambda point: point.load), limit


async def _limit(
    sweep: Sweep, points: Sequence[Point], share: float, measure: Callable[[float], Awaitable[Point]]
) -> float | None:
    """Bisects, by ratios, between the last load before the first failure and that failure."""
    good: float | None = None
    bad: float | None = None
    for point in points:
        if point.attainment < share:
            bad = point.load
            break
        good = point.load
    if good is None or bad is None:
        return good
    for _ in range(MOST_STEPS):
        middle = float(round((good * bad) ** 0.5)) if sweep.whole else float(f"{(good * bad) ** 0.5:.3g}")
        if bad / good <= _NEAR or not good < middle < bad:
            break
        if (await measure(middle)).attainment < share:
            bad = middle
        else:
            good = middle
    return good


def rows_of(sweep: Sweep, points: Sequence[Point]) -> Iterator[tuple[str, ...]]:
    """A table's rows, under `columns_of`."""
    for point in points:
        figures = point.figures
        prompt = figures["prompt_tokens"]
        row = [
            f"{point.load:g}",
            f"{figures['requests_per_s']:.2f}",
            f"{figures['output_tokens_per_s']:.1f}",
            *(_percentiles(figures[name]) for name in ("ttft_ms", "tpot_ms", "e2el_ms")),
            f"{100 * figures['cached_tokens'] / prompt:.0f} %" if prompt else "–",
            str(figures["requests"]["failed"]),
        ]
        if sweep.objectives:
            row.append(f"{100 * point.attainment:.0f} %")
        yield tuple(row)


def columns_of(sweep: Sweep) -> tuple[str, ...]:
    """The heads of the table's columns."""
    latencies = (f"{name} p50 / p99, ms" for name in ("TTFT", "TPOT", "E2EL"))
    met = ("met",) if sweep.objectives else ()
    load = "requests/s sent" if sweep.flag == "--request-rate" else "at a time"
    return (load, "requests/s", "output tokens/s", *latencies, "cached", "failed", *met)


def _percentiles(figures: dict[str, float] | None) -> str:
    return "–" if figures is None else f"{figures['p50']:.1f} / {figures['p99']:.1f}"
