"""How much may wait, and what those beyond are told."""

from __future__ import annotations

from contextlib import ExitStack, suppress

import pytest

from penstock.config import limits
from penstock.config.errors import OverloadedError
from penstock.core.pace import Pace
from penstock.core.request import EngineOutput, FinishReason
from penstock.engine.streams import StreamTable
from penstock.engine.waiting import Waiting
from tests.engine.support import request

PACE = Pace(step=0.08, prompt=0.0, output=0.0, rows=8.0, budget=512)  # 100 tokens a second


def filled(most_seconds: float | None, requests: int, pace: Pace | None = PACE) -> Waiting:
    """Requests of 50 tokens each wait, which is half a second."""
    waiting = Waiting(most_seconds)
    waiting.pace = pace
    for _ in range(requests):
        waiting.enter(request(max_tokens=50))
    return waiting


def test_work_is_told_in_seconds() -> None:
    waiting = filled(30.0, 40)
    assert waiting.seconds() == pytest.approx(20)
    waiting.check_room()
    assert filled(30.0, 0).seconds() == 0


@pytest.mark.parametrize("most", [None, float("inf")])
def test_without_a_bound_nobody_is_refused(most: float | None) -> None:
    filled(most, 3000).check_room()


def test_nobody_is_refused_before_anything_was_measured() -> None:
    filled(30.0, 3000, pace=None).check_room()


def test_one_too_many_is_refused_with_the_time_to_wait() -> None:
    waiting = filled(30.0, 70)  # five seconds too many
    with pytest.raises(OverloadedError, match="35 s of work wait already, at most 30 s may") as refused:
        waiting.check_room()
    assert refused.value.status == 429
    assert refused.value.retry_after in (5, 6)


def test_those_refused_are_not_all_told_the_same_time() -> None:
    """Each is told when there is room behind those told before, within the time the queue takes."""
    waiting = filled(30.0, 70)
    told = []
    for _ in range(200):
        with pytest.raises(OverloadedError) as refused:
            waiting.check_room()
        told.append(refused.value.retry_after)
    assert told == sorted(told)
    assert told[0] in (5, 6) and told[10] - told[0] in (3, 4)  # with half a second of work each
    assert max(told) <= 36


def test_calls_on_their_way_count() -> None:
    """Calls that came at the same moment and are not submitted yet do not all pass."""
    waiting = filled(30.0, 58)
    with ExitStack() as held:
        taken = 0
        with suppress(OverloadedError):
            while taken < 100:
                held.enter_context(waiting.arriving())
                taken += 1
        assert 2 <= taken <= 8
    waiting.check_room()


def test_what_an_answer_takes_is_learned() -> None:
    """Requests that may take 1,000 tokens and take ten do not fill a queue as if they took a thousand."""
    table = StreamTable(lambda _: None, 30.0)
    table.waiting.pace = PACE
    for number in range(200):
        asked = request(max_tokens=1000)
        table.open(asked)
        tokens = tuple(range(10))
        table.deliver([EngineOutput(asked.request_id, 0, tokens, finish_reason=FinishReason.STOP, cached_tokens=0)])
        assert table.waiting.requests == 0, number
    for _ in range(100):
        table.open(request(max_tokens=1000))
    assert table.waiting.seconds() == pytest.approx(10)


def test_what_was_cached_costs_nothing() -> None:
    waiting = Waiting(30.0)
    waiting.pace = Pace(step=0.0, prompt=0.01, output=0.0, rows=8.0, budget=512)
    waiting.enter(request(prompt=1000))
    assert waiting.seconds() == pytest.approx(10)
    for _ in range(300):
        waiting.cached(1000, 900)
    waiting.enter(request(prompt=1000))
    assert waiting.seconds() == pytest.approx(11, rel=0.01)


def test_nothing_is_left_when_all_have_gone() -> None:
    table = StreamTable(lambda _: None, 30.0)
    table.waiting.pace = PACE
    asked = [request(prompt=number % 7 + 1, n=1 + number % 3, max_tokens=number + 1) for number in range(50)]
    for one in asked:
        table.open(one)
    assert table.waiting.seconds() > 0
    table.fail_all("it ends here.")
    assert (table.waiting.requests, table.waiting.tokens, table.waiting.seconds()) == (0, 0, 0.0)


def test_the_count_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_QUEUED_REQUESTS", 3)
    waiting = filled(None, 3)
    with pytest.raises(OverloadedError, match="3 requests wait already"):
        waiting.enter(request())
