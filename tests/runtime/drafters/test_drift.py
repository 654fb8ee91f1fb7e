"""A drafter that is right less often than it used to be is told of once."""

from __future__ import annotations

import random

import pytest

from penstock.runtime.drafters.drift import Drift


def test_a_fall_is_told_once_until_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    dice, drift = random.Random(1), Drift()

    def live(count: int, most: int) -> int:
        before = len(caplog.records)
        for _ in range(count):
            drift.add(dice.randint(0, most))
        return len(caplog.records) - before

    assert live(6000, 6) == 0
    assert drift.now == pytest.approx(3.0, abs=0.4) and drift.usually == pytest.approx(3.0, abs=0.1)
    assert live(2000, 2) == 1  # 1 where it was 3
    assert "usually 2." in caplog.records[-1].getMessage()
    assert live(4000, 6) == 0  # it is what it was
    assert live(2000, 2) == 1


def test_nothing_is_said_of_the_first(caplog: pytest.LogCaptureFixture) -> None:
    drift = Drift()
    for number in range(900):
        drift.add(4 if number < 300 else 0)
    assert not caplog.records


def test_positions_are_counted() -> None:
    drift = Drift()
    for accepted in (2, 0, 1, 4, 1):
        drift.add(accepted)
    assert drift.by_position == [4, 2, 1, 1]
