"""Loads of a sweep, and the search for the greatest that meets objectives; the command itself is tried in
test_serve_and_bench.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from penstock.cli.measure import RequestRecord
from penstock.cli.sweep import MOST_STEPS, Point, Sweep, columns_of, parse_loads, rows_of, run_sweep
from penstock.cli.workload import Job
from penstock.config.errors import ConfigError


class Saturating:
    """A server whose answers take longer than a second above a load; it remembers what it was sent."""

    def __init__(self, most: float) -> None:
        self.most, self.loads, self.sent = most, list[float](), list[str]()

    async def drive(self, load: float, jobs: Sequence[Job]) -> tuple[list[RequestRecord], float]:
        self.loads.append(load)
        self.sent += [str(job.prompt) for job in jobs]
        last = 0.5 if load <= self.most else 2.0
        return [RequestRecord(0.0, last, (0.1, last), 10, 2, 5) for _ in jobs], 2.0


def swept(plan: Sweep, server: Saturating, jobs: int = 100, each: int = 4) -> tuple[list[Point], float | None]:
    return asyncio.run(run_sweep(plan, [Job(f"{number}", 2) for number in range(jobs)], each, server.drive))


GOAL = {"e2el": 1000.0}


def test_every_load_gets_jobs_of_its_own_and_points_come_in_order() -> None:
    server = Saturating(100)
    points, limit = swept(Sweep("--max-concurrency", (1, 2, 4), {}), server)
    assert [point.load for point in points] == [1, 2, 4] and limit is None
    assert server.sent == [f"{number}" for number in range(12)]
    assert points[0].figures["requests"] == {"sent": 4, "completed": 4, "failed": 0}


def test_a_dataset_that_is_too_short_begins_anew() -> None:
    server = Saturating(100)
    swept(Sweep("--max-concurrency", (1, 2), {}), server, jobs=3)
    assert server.sent == ["0", "1", "2", "0", "1", "2", "0", "1"]


@pytest.mark.parametrize("most", [1.0, 1.3, 2.9, 7.5])
def test_the_limit_lies_close_below_the_first_load_that_fails(most: float) -> None:
    server = Saturating(most)
    points, limit = swept(Sweep("--request-rate", (1.0, 2.0, 8.0), GOAL, 0.9), server)
    assert limit is not None and limit <= most < 1.1 * limit
    assert len(server.loads) <= 3 + MOST_STEPS
    assert [point.load for point in points] == sorted(server.loads)


@pytest.mark.parametrize("most", [1, 5, 6, 11])
def test_a_limit_of_counts_is_exact_where_they_are_few(most: int) -> None:
    server = Saturating(most)
    _, limit = swept(Sweep("--max-concurrency", (1, 4, 12), GOAL, 0.9), server)
    assert limit == most and all(load == int(load) for load in server.loads)


def test_there_is_no_limit_where_none_meets_the_objectives_and_the_last_where_all_do() -> None:
    assert swept(Sweep("--request-rate", (1.0, 2.0), GOAL, 0.9), Saturating(0.5))[1] is None
    server = Saturating(100)
    assert swept(Sweep("--request-rate", (1.0, 2.0), GOAL, 0.9), server)[1] == 2.0
    assert server.loads == [1.0, 2.0]


def test_rows_have_their_columns() -> None:
    for objectives in ({}, GOAL):
        plan = Sweep("--request-rate", (1.0, 2.0), objectives)
        points, _ = swept(plan, Saturating(1.0))
        rows = list(rows_of(plan, points))
        assert {len(row) for row in rows} == {len(columns_of(plan))}
        assert rows[0][:6] == ("1", "2.00", "4.0", "100.0 / 100.0", "400.0 / 400.0", "500.0 / 500.0")
        assert rows[0][6:8] == ("50 %", "0")
        assert [row[8:] for row in rows] == ([("100 %",), ("0 %",)] if objectives else [(), ()])


def test_loads_are_sorted_and_taken_once() -> None:
    assert parse_loads("--request-rate", "2, 0.5,2") == (0.5, 2.0)


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--max-concurrency", "1,1.5"),
        ("--max-concurrency", "0"),
        ("--max-concurrency", ""),
        ("--request-rate", "nan"),
        ("--request-rate", "-1"),
        ("--request-rate", "inf"),
        ("--request-rate", ",".join(map(str, range(1, 70)))),
    ],
)
def test_other_loads_are_refused(flag: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} has .*allowed"):
        parse_loads(flag, text)
