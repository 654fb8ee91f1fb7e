"""Tokens taken back, and sequences that fork."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.engine.loop import Engine
from tests.core.harness import Collector, Guesser, expected_tokens, null_engine, request


def stepped(engine: Engine, steps: int, collector: Collector) -> None:
    for _ in range(steps):
        collector.take(engine.step())
        engine.scheduler.check_integrity()


def finish(engine: Engine, collector: Collector) -> Collector:
    while engine.has_work:
        stepped(engine, 1, collector)
    return collector


@pytest.mark.parametrize("windows", [(None,), (None, 5), (4,)])
@pytest.mark.parametrize("kept", [0, 1, 3, 6, 9])
@pytest.mark.parametrize("more", [{}, {"checkpoints": 4}, {"drafter": Guesser(3, 6)}])
def test_an_answer_goes_on_as_before_from_what_stays(
    windows: tuple[int | None, ...], kept: int, more: dict[str, Any]
) -> None:
    engine = null_engine(windows, vocab_size=3, **more)
    one = replace(request("a", [1, 2, 0, 1, 2], max_tokens=24), speculate="drafter" in more)
    engine.add(one)
    collector = Collector()
    stepped(engine, 10, collector)
    assert engine.scheduler.rewind("a", 0, 5 + kept)
    engine.scheduler.check_integrity()
    del collector.tokens["a", 0][kept:]
    assert finish(engine, collector).tokens["a", 0] == expected_tokens(one, 0, 3)


@pytest.mark.parametrize("prompt", range(6, 12))
def test_drafts_may_pass_where_a_state_was_to_be_kept(prompt: int) -> None:
    """The place was chosen when the sequence started anew, with more tokens than it has since the rewind."""
    engine = null_engine(vocab_size=3, rows=1, budget=4, drafter=Guesser(3, 8), checkpoints=12, caching=False)
    one = replace(request("a", [1, 2, 0, 1, 2, 0, 1, 2, 1, 0, 1][:prompt], max_tokens=40), speculate=4)
    engine.add(one)
    collector = Collector()
    while len(collector.tokens.get(("a", 0), ())) < 20:
        stepped(engine, 1, collector)
    assert engine.scheduler.preempt("a") == 1
    engine.scheduler.cache.clear()
    stepped(engine, 1, collector)
    assert engine.scheduler.rewind("a", 0, prompt + 2)
    del collector.tokens["a", 0][2:]
    stepped(engine, 80, collector)
    assert not engine.has_work
    assert collector.tokens["a", 0] == expected_tokens(one, 0, 3)


def test_only_what_was_taken_back_is_computed_again() -> None:
    engine = null_engine(vocab_size=3)
    engine.add(request("a", [1, 2, 0, 1, 2], max_tokens=24))
    stepped(engine, 10, Collector())
    sequence = engine.scheduler.running[0]
    engine.scheduler.rewind("a", 0, 11)
    assert (sequence.computed, sequence.committed, sequence.remaining) == (10, 10, 1)
    assert sequence.preemptions == 0


def test_a_window_that_has_passed_is_computed_again() -> None:
    engine = null_engine((4,), vocab_size=3)
    engine.add(request("a", [1, 2, 0, 1, 2], max_tokens=24))
    stepped(engine, 20, Collector())
    sequence = engine.scheduler.running[0]
    engine.scheduler.rewind("a", 0, 8)
    assert sequence in engine.scheduler.waiting and sequence.known == 8


def test_others_keep_the_block_that_is_cut() -> None:
    """A fork shares the block; the rewound sequence writes to a copy of it."""
    engine = null_engine(vocab_size=3)
    engine.add(one := request("a", [1, 2, 0, 1, 2], max_tokens=24, temperature=1.0))
    collector = Collector()
    stepped(engine, 11, collector)
    child = engine.scheduler.fork("a", 0)
    begun = list(collector.tokens["a", 0])
    stepped(engine, 2, collector)
    assert engine.scheduler.rewind("a", 0, 5 + 4)
    del collector.tokens["a", 0][4:]
    finish(engine, collector)
    assert collector.tokens["a", 0] == expected_tokens(one, 0, 3)
    assert begun + collector.tokens["a", child] == expected_tokens(one, child, 3, begun)


@pytest.mark.parametrize("caching", [True, False])
def test_a_fork_computes_nothing_that_its_parent_has(caching: bool) -> None:
    engine = null_engine(vocab_size=3, caching=caching)
    engine.add(request("a", [1, 2, 0, 1, 2, 2, 1], max_tokens=24, temperature=1.0))
    collector = Collector()
    stepped(engine, 8, collector)
    known = engine.scheduler.running[0].committed
    child = engine.scheduler.fork("a", 0)
    finish(engine, collector)
    assert collector.cached("a", child) == known
    assert collector.tokens["a", child] != collector.tokens["a", 0][8:], "it draws numbers of its own"


def test_a_step_in_flight_is_not_taken_back() -> None:
    engine = null_engine(vocab_size=3, depth=1)
    engine.add(request("a", [1, 2], max_tokens=24))
    stepped(engine, 5, Collector())
    assert not engine.scheduler.rewind("a", 0, 4)


def test_what_there_is_not_cannot_be_rewound_or_forked() -> None:
    engine = null_engine(vocab_size=3)
    engine.add(request("a", [1, 2], max_tokens=24))
    with pytest.raises(ValueError, match="the prompt has 2"):
        engine.scheduler.rewind("a", 0, 1)
    for call in (lambda: engine.scheduler.fork("a", 1), lambda: engine.scheduler.rewind("b", 0, 3)):
        with pytest.raises(KeyError, match="no live sequence"):
            call()
