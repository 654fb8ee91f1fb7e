"""Slots for adapters: lent to running sequences, the idle ones to others, and nobody starves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from penstock.config.adapters import AdapterUse
from penstock.config.sampling import SamplingParams
from penstock.core.kv.node import Namespace
from penstock.core.policies.adapters import AdapterGate
from penstock.core.request import EngineRequest
from penstock.core.sequence import Sequence, SequenceState

PARAMS = SamplingParams(max_tokens=4)


class Files:
    """What is in memory: all but `lacking`."""

    def __init__(self, *lacking: str) -> None:
        self.lacking, self.read_for, self.lent = set(lacking), list[str](), dict[int, str]()

    def here(self, uses: tuple[AdapterUse, ...]) -> bool:
        return self.lacking.isdisjoint(use.digest for use in uses)

    def read(self, uses: tuple[AdapterUse, ...]) -> None:
        self.read_for += [use.digest for use in uses]

    def lend(self, placed: tuple[tuple[int, AdapterUse], ...]) -> None:
        self.lent.update((slot, use.digest) for slot, use in placed)


def sequence(*digests: str) -> Sequence:
    uses = tuple(AdapterUse(digest, "") for digest in digests)
    return Sequence(EngineRequest("+".join(digests), (1,), PARAMS, adapters=uses), 0, 0, Namespace(""), [1])


def asks(gate: AdapterGate, one: Sequence) -> bool:
    """Whether it may start; it does then."""
    admission: Any = SimpleNamespace(sequence=one)
    if gate.holds(admission):
        return False
    one.state = SequenceState.RUNNING
    return True


def slots(one: Sequence) -> list[int]:
    return [slot for slot, _ in one.adapter_slots]


def test_those_without_adapters_wait_for_nothing() -> None:
    gate = AdapterGate(1, Files())
    assert asks(gate, sequence("a")) and asks(gate, sequence()) and not asks(gate, sequence("b"))
    assert asks(gate, sequence())


def test_slots_are_shared_and_lent_again_least_recently_used_first() -> None:
    gate = AdapterGate(2, Files())
    a, b, again = sequence("a"), sequence("b"), sequence("a")
    assert asks(gate, a) and asks(gate, b) and asks(gate, again)
    assert slots(a) == slots(again) != slots(b)
    for one in (a, b, again):
        one.state = SequenceState.FINISHED
    c, kept = sequence("c"), sequence("a")
    assert asks(gate, c) and asks(gate, kept)
    assert slots(c) == slots(b), "a was used after b"
    assert slots(kept) == slots(a)


def test_a_preempted_sequence_gives_its_slot_back_and_gets_one_again() -> None:
    gate = AdapterGate(1, Files())
    a, b = sequence("a"), sequence("b")
    assert asks(gate, a) and not asks(gate, b)
    a.state = SequenceState.WAITING
    assert asks(gate, b) and not asks(gate, a)
    b.state = SequenceState.FINISHED
    assert asks(gate, a) and slots(a) == [1]


def test_an_adapter_in_steady_use_starves_nobody() -> None:
    gate = AdapterGate(2, Files())
    running = [sequence("a"), sequence("b")]
    assert all(asks(gate, one) for one in running)
    waits = sequence("c")
    assert not asks(gate, waits)
    assert not asks(gate, sequence("a")), "a gives way, as it was used less recently"
    assert asks(gate, sequence("b")) and not asks(gate, sequence("d"))
    running[0].state = SequenceState.FINISHED
    assert not asks(gate, sequence("d")), "the slot is for the one that waits longest"
    assert asks(gate, waits)
    assert not asks(gate, sequence("d")) and asks(gate, sequence("c"))


def test_whoever_waited_may_leave() -> None:
    gate = AdapterGate(1, Files())
    a, b = sequence("a"), sequence("b")
    assert asks(gate, a) and not asks(gate, b) and not asks(gate, sequence("a"))
    b.state = SequenceState.FINISHED
    assert asks(gate, sequence("a"))


def test_several_adapters_are_had_together_or_not_at_all() -> None:
    gate = AdapterGate(3, Files())
    a, b = sequence("a"), sequence("b")
    assert asks(gate, a) and asks(gate, b)
    both = sequence("c", "d")
    assert not asks(gate, both) and asks(gate, sequence("b"))
    a.state = SequenceState.FINISHED
    assert asks(gate, both)
    assert len({*slots(both), *slots(b)}) == 3


def test_the_same_adapter_twice_takes_one_slot() -> None:
    gate = AdapterGate(1, Files())
    twice = sequence("a", "a")
    assert asks(gate, twice) and slots(twice) == [1, 1]


def test_what_left_memory_is_read_for_one_at_a_time() -> None:
    files = Files("a", "b")
    gate = AdapterGate(1, files)
    a, b, here = sequence("a"), sequence("b"), sequence("c")
    assert not asks(gate, a) and not asks(gate, b) and not asks(gate, a)
    assert files.read_for == ["a"]
    assert asks(gate, here) and files.lent == {1: "c"}
    files.lacking.remove("a")
    assert not asks(gate, a), "it has no slot yet"
    assert not asks(gate, b) and files.read_for == ["a"], "nothing is read for others before the oldest has its slot"
    here.state = SequenceState.FINISHED
    assert asks(gate, a) and not asks(gate, b) and files.read_for == ["a", "b"]
    b.state = SequenceState.FINISHED
    assert not asks(gate, sequence("b")) and files.read_for == ["a", "b", "b"], "who left is no reason to wait"
