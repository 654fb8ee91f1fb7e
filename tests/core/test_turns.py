"""Owners are served in turn, by their tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.core.policies.turns import Turns
from penstock.core.request import EngineRequest, FinishReason
from penstock.core.sequence import Sequence
from penstock.engine.loop import Engine
from tests.core.harness import Collector, null_engine, request


def owned(owner: str, name: str, prompt: int = 5, max_tokens: int = 8, priority: int = 0) -> EngineRequest:
    number = int(name) if name.isdigit() else len(name)
    asked = request(name, [(number * 7 + i) % 50 for i in range(prompt)], max_tokens=max_tokens, priority=priority)
    return replace(asked, owner=owner)


def steps_to_first_token(engine: Engine, name: str) -> int:
    for step in range(1, 5_000):
        if any(output.request_id == name and output.tokens for output in engine.step()):
            return step
    raise AssertionError(f"{name} was never served")


def admitted(engine: Engine, steps: int = 5_000) -> list[str]:
    """Names in the order in which they had their first token."""
    names: list[str] = []
    for _ in range(steps):
        if not engine.has_work:
            break
        for output in engine.step():
            if output.tokens and output.request_id not in names:
                names.append(output.request_id)
        engine.scheduler.check_integrity()
    return names


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("depth", [0, 1])
def test_three_hundred_requests_of_one_delay_another_by_a_few_steps(policy: str, depth: int) -> None:
    engine = null_engine(rows=8, blocks=256, policy=policy, depth=depth)
    for number in range(300):
        engine.add(owned("a", str(number)))
    for _ in range(5):
        engine.step()
    engine.add(owned("b", "single"))
    assert steps_to_first_token(engine, "single") <= 12  # a row is free after at most eight steps


def test_without_owners_all_are_served_in_order_of_arrival() -> None:
    engine = null_engine(rows=1, blocks=256)
    asked = [owned("", str(number), prompt=1 + number % 9, max_tokens=1 + 7 * number % 50) for number in range(80)]
    for one in asked[:40]:
        engine.add(one)
    for number in range(5, 30, 2):
        engine.cancel(str(number))
    for one in asked[40:]:
        engine.add(one)
    gone = {str(number) for number in range(5, 30, 2)}
    assert admitted(engine) == [one.request_id for one in asked if one.request_id not in gone]


def test_tokens_are_shared_not_requests() -> None:
    """One asks for four times as much a request: it gets one where the other gets four."""
    engine = null_engine(rows=1, blocks=256, max_model_len=256)
    for number in range(40):
        engine.add(owned("long", str(number), prompt=8, max_tokens=32))
        engine.add(owned("short", str(100 + number), prompt=4, max_tokens=6))
    first = admitted(engine)[:20]
    assert sum(int(name) >= 100 for name in first) == pytest.approx(16, abs=1)


def test_who_comes_later_gets_no_more_than_its_share() -> None:
    """Time in which somebody asked for nothing is not saved up."""
    engine = null_engine(rows=1, blocks=256)
    for number in range(30):
        engine.add(owned("a", str(number)))
    for _ in range(100):
        engine.step()
    for number in range(30):
        engine.add(owned("b", str(100 + number)))
    first = admitted(engine)[:10]
    assert sum(int(name) >= 100 for name in first) == pytest.approx(5, abs=1)


def test_what_was_not_had_is_not_counted() -> None:
    """Requests that were cancelled in the queue do not put their owner behind the others."""
    engine = null_engine(rows=1, blocks=256)
    engine.add(owned("a", "0", max_tokens=40))
    engine.step()
    for number in range(1, 50):
        engine.add(owned("b", str(number)))
        engine.cancel(str(number))
    engine.add(owned("a", "100"))
    engine.add(owned("b", "200"))
    engine.add(owned("a", "101"))
    assert [name for name in admitted(engine) if name in ("100", "200", "101")] == ["200", "100", "101"]


def test_memory_that_runs_out_takes_nothing_from_the_oldest() -> None:
    """Owners in turn, and so little memory that sequences are preempted: everybody ends, the first without a break."""
    engine = null_engine(rows=6, blocks=24, block_size=4, budget=16)
    for number in range(40):
        engine.add(owned("abc"[number % 3], str(number), prompt=9, max_tokens=30))
    collector = Collector()
    while engine.has_work:
        first = next(iter(engine.scheduler.running), None)
        before = first.preemptions if first else 0
        collector.take(engine.step())
        engine.scheduler.check_integrity()
        assert first is None or first.preemptions == before
    assert all(reason is FinishReason.LENGTH for reason in collector.finished.values())
    assert len(collector.finished) == 40
    assert engine.stats().preemptions > 0


def test_a_queue_that_was_given_up_is_not_held_against_its_owner() -> None:
    engine = null_engine(rows=1, blocks=256)
    for number in range(100):
        engine.add(owned("a", str(number)))
    for number in range(10):
        engine.add(owned("b", str(200 + number)))
    engine.step()
    for number in range(1, 100):
        engine.cancel(str(number))
    engine.add(owned("a", "100"))
    assert admitted(engine).index("100") <= 3


def test_a_charge_that_was_forgiven_is_not_given_back() -> None:
    """An owner was forgotten while a long sequence of its ran: what that did not use makes no later request cheaper."""
    turns = Turns()

    def given(owner: str, number: int, max_tokens: int) -> Sequence:
        asked = owned(owner, str(number), max_tokens=max_tokens)
        sequence = Sequence(asked, 0, number, "", list(asked.prompt_ids))
        turns.give(sequence)
        return sequence

    def admit(sequence: Sequence) -> None:
        turns.reach(sequence)
        sequence.cached_tokens = 0

    long = given("a", 0, 100)
    admit(long)
    for number in range(1, 4):  # others get their share meanwhile, and more
        admit(given("b", number, 100))
    later = given("a", 4, 50)
    assert later.turn == 210
    turns.settle(long)
    assert given("a", 5, 50).turn == 210 + 55
    turns.settle(later)
    assert given("a", 6, 50).turn == 210 + 55 + 1  # that one has had nothing: only the other is counted


def test_nothing_is_kept_of_sequences_that_have_ended() -> None:
    engine = null_engine(rows=2, blocks=24, block_size=4, budget=16)
    for number in range(40):
        engine.add(owned("abc"[number % 3], str(number), prompt=9, max_tokens=30))
    for number in range(5, 40, 3):
        engine.cancel(str(number))
    admitted(engine)
    assert not engine.scheduler._queues._turns._charged


def test_owners_who_have_had_their_turn_are_forgotten() -> None:
    turns = Turns()
    for number in range(1000):
        asked = owned(f"owner {number}", str(number))
        sequence = Sequence(asked, 0, number, "", list(asked.prompt_ids))
        turns.give(sequence)
        turns.reach(sequence)
        sequence.cached_tokens = 0
        late = Sequence(owned("late", "1"), 0, number, "", [1])
        turns.give(late)
        turns.reach(late)
        late.cached_tokens = 0
    assert len(turns._owners) <= 3
