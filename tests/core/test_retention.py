"""Hints how long blocks are to stay: they order what is evicted, end in time, and take the cache from nobody."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.config.retention import USUAL, Retention, TokenRange, kept_for
from penstock.core.kv.node import Node
from penstock.core.policies import retention
from penstock.core.policies.retention import Retained
from penstock.core.request import EngineRequest
from penstock.engine.loop import Engine
from tests.core.harness import expected_tokens, null_engine, request, run

HIGH, LOW = Retention((TokenRange(0, None, 90),)), Retention((TokenRange(0, None, 0),))


def asked(name: str, first: int, hint: Retention, owner: str = "") -> EngineRequest:
    prompt = [first, *range(1, 12)]
    return replace(request(name, prompt, max_tokens=1), retention=hint, owner=owner)


def found(engine: Engine, one: EngineRequest) -> int:
    again = replace(one, request_id=f"{one.request_id} again", retention=Retention())
    collector = run(engine, again)
    assert collector.tokens[again.request_id, 0] == expected_tokens(again)
    return collector.cached(again.request_id)


def filled(engine: Engine, count: int, first: int = 30) -> None:
    """Others come and go."""
    for index in range(count):
        run(engine, request(f"other {first} {index}", [first + index, 2, *range(1, 11)], max_tokens=1))


def test_what_is_dear_stays_and_what_is_cheap_goes_first() -> None:
    engine = null_engine(blocks=1 + 24)
    dear, usual, cheap = asked("dear", 10, HIGH), asked("usual", 11, Retention()), asked("cheap", 12, LOW)
    for one in (dear, usual, cheap):
        run(engine, one)
    filled(engine, 5)  # of eight prompts that fit
    filled(engine, 1, first=40)
    assert found(engine, cheap) == 0
    filled(engine, 20, first=50)
    assert found(engine, usual) == 0
    assert found(engine, dear) == 11


def test_the_usual_holds_again_once_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(retention, "monotonic", lambda: now)
    engine = null_engine(blocks=1 + 24)
    dear = asked("dear", 10, kept_for(60.0))
    run(engine, dear)
    filled(engine, 20)
    assert found(engine, dear) == 11
    now += 61.0
    for first in range(5):
        filled(engine, 8, first=10 * first)
    assert found(engine, dear) == 0
    engine.scheduler.check_integrity()


def test_who_asks_again_has_the_time_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(retention, "monotonic", lambda: now)
    engine = null_engine(blocks=1 + 24)
    for turn in range(2):
        now += 40.0 * turn
        run(engine, asked(f"turn {turn}", 10, kept_for(60.0)))
    run(engine, asked("shorter", 10, kept_for(1.0)))
    now += 59.0
    for first in range(4):
        filled(engine, 8, first=12 + 9 * first)
    assert found(engine, asked("again", 10, Retention())) == 8  # the last block was computed anew


def test_a_prefix_that_was_there_is_kept_from_now_on() -> None:
    engine = null_engine(blocks=1 + 24)
    run(engine, asked("first", 10, Retention()))
    run(engine, asked("second", 10, HIGH))
    filled(engine, 20)
    assert found(engine, asked("third", 10, Retention())) == 11


def test_nobody_has_more_than_a_share_of_the_pool_for_long() -> None:
    engine = null_engine(blocks=1 + 48)
    for index in range(16):
        run(engine, asked(f"greedy {index}", index, HIGH, "greedy"))
    other = asked("other", 40, HIGH, "other")
    run(engine, other)
    raised = [node for node in nodes(engine) if node.priority > USUAL]
    assert len(raised) == 48 // 4 + 3, "of one, and of the other"
    for index in range(30):
        run(engine, replace(request(f"fill {index}", [index, 3, *range(10)], max_tokens=1), owner="fill"))
    assert found(engine, other) == 11 and engine.stats().blocks_used == 0


def nodes(engine: Engine) -> list[Node]:
    tree = engine.scheduler.cache.tree
    return [node for root in vars(tree)["_roots"].values() for node in vars(type(tree))["_walk"](tree, root)]


def test_the_highest_priority_of_a_blocks_tokens_counts() -> None:
    hint = Retention((TokenRange(0, 6, 90, 1.0), TokenRange(4, None, 50)), TokenRange(0, None, 70, 3.0))
    assert hint.of(0, 4, 10) == (90, 1.0) and hint.of(4, 8, 10) == (90, 1.0)
    assert hint.of(6, 8, 10) == (50, None) and hint.of(8, 12, 10) == (70, 3.0) and hint.of(12, 16, 10) == (70, 3.0)
    assert Retention((TokenRange(0, 4, 90),)).of(4, 8, 10) == (USUAL, None)


def test_ended_marks_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(retention, "monotonic", lambda: now)
    kept = Retained(100)
    node = Node(None, "", (), 1)
    node.filled = True
    for index in range(10_000):
        kept.forget(node)
        assert kept.mark(node, "", 90, 1.0 + index)
    assert len(vars(kept)["_ends"]) < 300
    now = 20_000.0
    assert kept.ended() == [node] and node.priority == USUAL
    kept.check_integrity()
