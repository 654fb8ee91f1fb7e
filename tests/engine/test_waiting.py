"""How much may wait, and what those beyond are told."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import pytest

from penstock.config import limits
from penstock.config.errors import OverloadedError
from penstock.config.pooling import PoolingParams
from penstock.core.policies.pace import Pace
from penstock.core.policies.waiting import Waiting
from penstock.core.request import PUBLIC, EngineOutput, EngineRequest, FinishReason
from penstock.engine.streams import StreamTable
from tests.engine.support import request

PACE = Pace(step=0.08, prompt=0.0, output=0.0, rows=8.0, budget=512)  # 100 tokens a second


def filled(most_seconds: float | None, requests: int, pace: Pace | None = PACE) -> Waiting:
    """Requests of 50 tokens each wait, which is half a second."""
    waiting = Waiting(most_seconds)
    waiting.pace = pace
    fill(waiting, requests)
    return waiting


def fill(waiting: Waiting, requests: int, owner: str = PUBLIC) -> None:
    for _ in range(requests):
        waiting.enter(owned(owner, max_tokens=50))


def owned(owner: str, **sampling: Any) -> EngineRequest:
    return replace(request(**sampling), owner=owner)


def test_work_is_told_in_seconds() -> None:
    waiting = filled(30.0, 40)
    assert waiting.seconds() == pytest.approx(20)
    waiting.check_room(PUBLIC)
    assert filled(30.0, 0).seconds() == 0


@pytest.mark.parametrize("most", [None, float("inf")])
def test_without_a_bound_nobody_is_refused(most: float | None) -> None:
    filled(most, 3000).check_room(PUBLIC)


def test_nobody_is_refused_before_anything_was_measured() -> None:
    filled(30.0, 3000, pace=None).check_room(PUBLIC)


def test_one_too_many_is_refused_with_the_time_to_wait() -> None:
    waiting = filled(30.0, 70)  # five seconds too many
    with pytest.raises(OverloadedError, match="35 s of work wait already, at most 30 s may") as refused:
        waiting.check_room(PUBLIC)
    assert refused.value.status == 429
    assert refused.value.retry_after in (5, 6)


def test_those_refused_are_not_all_told_the_same_time() -> None:
    """Each is told when there is room behind those told before, within the time the queue takes."""
    waiting = filled(30.0, 70)
    told = []
    for _ in range(200):
        with pytest.raises(OverloadedError) as refused:
            waiting.check_room(PUBLIC)
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
                held.enter_context(waiting.arriving(PUBLIC))
                taken += 1
        assert 2 <= taken <= 8
    waiting.check_room(PUBLIC)


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


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.ERROR])
def test_answers_that_were_cut_tell_nothing_of_short_ones(reason: FinishReason) -> None:
    """Who asks for one token a call, or leaves after one, does not make the work of others look like nothing."""
    table = StreamTable(lambda _: None, 30.0)
    table.waiting.pace = PACE
    for tokens, many, ended in ((50, 64, FinishReason.STOP), (1, 500, reason)):
        for _ in range(many):
            asked = request(max_tokens=tokens)
            table.open(asked)
            table.deliver([EngineOutput(asked.request_id, 0, (1,) * tokens, finish_reason=ended, cached_tokens=0)])
    for _ in range(100):
        table.open(request(max_tokens=1000))
    assert table.waiting.seconds() == pytest.approx(50)


def test_cut_answers_that_were_longer_count() -> None:
    table = StreamTable(lambda _: None, 30.0)
    table.waiting.pace = PACE
    for _ in range(64):
        asked = request(max_tokens=400)
        table.open(asked)
        table.deliver(
            [EngineOutput(asked.request_id, 0, (1,) * 400, finish_reason=FinishReason.LENGTH, cached_tokens=0)]
        )
    table.open(request(max_tokens=1000))
    assert table.waiting.seconds() == pytest.approx(4)


def test_pooling_tells_nothing_of_answers() -> None:
    table = StreamTable(lambda _: None, 30.0)
    table.waiting.pace = PACE
    for _ in range(100):
        asked = replace(request(max_tokens=1), pooling=PoolingParams())
        table.open(asked)
        table.deliver([EngineOutput(asked.request_id, 0, finish_reason=FinishReason.STOP, cached_tokens=0)])
    table.open(request(max_tokens=1000))
    assert table.waiting.seconds() == pytest.approx(1.28)


def test_one_owners_backlog_gets_no_other_refused() -> None:
    waiting = filled(30.0, 0)
    fill(waiting, 100, "a")  # 50 s
    with pytest.raises(OverloadedError):
        waiting.check_room("a")
    waiting.check_room("b")
    with waiting.arriving("b"):
        pass
    fill(waiting, 28, "b")  # 14 s, of which 15 are its share now
    waiting.check_room("b")
    fill(waiting, 4, "b")
    for owner in ("a", "b"):
        with pytest.raises(OverloadedError):
            waiting.check_room(owner)
    waiting.check_room("c")


def test_who_has_nothing_waiting_shares_nothing() -> None:
    """Owners whose requests run already, and calls that are over, make nobody's share smaller."""
    waiting = filled(30.0, 0)
    for number in range(50):
        one = owned(f"owner {number}", max_tokens=50)
        work = waiting.enter(one)
        with waiting.arriving(f"other {number}"):
            pass
        waiting.leave(one, work)
    fill(waiting, 50, "a")
    fill(waiting, 20, "b")
    waiting.check_room("b")
    assert waiting._owners.keys() == {"a", "b"}


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
    assert not table.waiting._owners


def test_the_count_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_QUEUED_REQUESTS", 3)
    waiting = filled(None, 3)
    with pytest.raises(OverloadedError, match="3 requests wait already"):
        waiting.enter(request())
