"""What steps cost, told from their times."""

from __future__ import annotations

import random

import pytest

from penstock.core.policies.pace import PaceMeter


def metered(steps: list[tuple[int, int]], *, noise: float = 0.0, waiting: bool = True) -> PaceMeter:
    """A meter that saw steps of (prompt tokens, generated tokens) on a machine of known costs."""
    rng, meter = random.Random(1), PaceMeter(16, 512)
    for prompt, output in steps:
        seconds = (0.01 + 0.0002 * prompt + 0.001 * output) * (1 + noise * rng.random())
        meter.add(prompt, output, seconds, output if waiting else None)
    return meter


def test_nothing_is_told_before_anything_was_measured() -> None:
    assert metered([]).pace() is None
    assert metered([(0, 1)] * 10).pace() is None


def test_the_costs_are_found() -> None:
    rng = random.Random(0)
    pace = metered([(rng.choice([0, 0, 64, 500]), rng.randint(1, 16)) for _ in range(800)]).pace()
    assert pace is not None
    assert (pace.step, pace.prompt, pace.output) == pytest.approx((0.01, 0.0002, 0.001), rel=0.1)
    assert pace.seconds(0, 1600) == pytest.approx(1600 / pace.rows * 0.01 + 1600 * 0.001, rel=0.05)


def test_one_row_says_nothing_of_many() -> None:
    """A full batch is taken to be as fast a step until it was seen: the first burst is not refused for that."""
    pace = metered([(0, 1)] * 200, waiting=False).pace()
    assert pace is not None
    assert pace.rows == 16
    assert pace.seconds(0, 160) == pytest.approx(10 * 0.011, rel=0.05)


def test_what_memory_leaves_of_the_rows_counts() -> None:
    pace = metered([(0, 4)] * 200).pace()
    assert pace is not None
    assert pace.rows == pytest.approx(4)
    assert pace.seconds(0, 400) == pytest.approx(100 * 0.014, rel=0.05)


def test_time_is_kept_on_a_machine_that_others_use_too() -> None:
    rng = random.Random(0)
    steps = [(rng.choice([0, 0, 100]), 16) for _ in range(1000)]
    pace = metered(steps, noise=3.0).pace()
    assert pace is not None
    whole = pace.seconds(sum(prompt for prompt, _ in steps), sum(output for _, output in steps))
    assert whole == pytest.approx(2.5 * sum(0.01 + 0.0002 * p + 0.001 * o for p, o in steps), rel=0.1)


def test_a_pause_is_no_work() -> None:
    meter = metered([(0, 16)] * 200)
    meter.add(0, 16, 3600.0, 16)
    for _ in range(16):
        meter.add(0, 16, 0.026, 16)
    pace = meter.pace()
    assert pace is not None
    assert pace.seconds(0, 1600) == pytest.approx(2.6, rel=0.1)


def test_no_cost_is_below_nothing() -> None:
    rng, meter = random.Random(0), PaceMeter(16, 512)
    for _ in range(300):  # times that have nothing to do with what was computed
        meter.add(rng.choice([0, 500]), rng.randint(1, 16), rng.random(), 16)
    pace = meter.pace()
    assert pace is not None
    assert min(pace.step, pace.prompt, pace.output) >= 0
    assert pace.step + pace.prompt + pace.output > 0


def test_a_kind_of_step_that_was_never_seen_counts() -> None:
    """Of prompts alone, whose cost grows with their square, a step as such may seem to cost nothing."""
    rng, meter = random.Random(0), PaceMeter(16, 512)
    for _ in range(200):
        prompt = rng.randint(1, 512)
        meter.add(prompt, 0, 1e-6 * prompt**2, None)
    pace = meter.pace()
    assert pace is not None
    assert pace.step == pace.output == 0
    for _ in range(200):
        meter.add(0, 1, 0.02, None)
    pace = meter.pace()
    assert pace is not None
    assert pace.step + pace.output == pytest.approx(0.02, rel=0.5)
