"""When a shared store is asked, how long anybody waits for it, and what of its answers is believed."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.core.kv.node import Namespace
from penstock.core.policies import shared_tier
from penstock.core.policies.shared_tier import Chain, Search, SharedTier
from tests.core.harness import SlowMover, null_engine

GROUPS = (0, 1)


class Asked:
    """Notes what is asked for; whoever has it answers."""

    def __init__(self) -> None:
        self.searches: list[Search] = []
        self.rests = False

    def seek(self, search: Search) -> bool:
        if not self.rests:
            self.searches.append(search)
        return not self.rests


def answer(search: Search, blocks: int, groups: tuple[int, ...] = GROUPS) -> None:
    search.digests = search.chain.digests()
    search.groups = [groups] * blocks
    search.end()


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [100.0]
    monkeypatch.setattr(shared_tier, "monotonic", lambda: clock[0])
    return clock


def shared(places: int = 400) -> tuple[Any, SharedTier, Asked]:
    engine = null_engine((None, 6), blocks=64, vocab_size=3, mover=SlowMover(), places=places)
    cache, asked = engine.scheduler.cache, Asked()
    tier = SharedTier((places, places), 16, cache.tree.forget_below, seeker=asked)
    cache.transfers.tier = tier
    return cache, tier, asked


def waits(cache: Any, tokens: list[int], owner: str = "me") -> bool:
    """Whether who sent these tokens waits."""
    namespace = Namespace("", ("", owner))
    sequence = SimpleNamespace(reusable=len(tokens) - 1, namespace=namespace, keys=tokens)
    match = cache.tree.match(namespace, tokens, len(tokens) - 1)
    admission = SimpleNamespace(sequence=sequence, match=match, idle_engine=False, cache=cache)
    found: bool = cache.transfers.tier.sought(admission)
    cache.tree.check_integrity()
    cache.transfers.tier.check_integrity()
    return found


def reach(cache: Any, tokens: list[int], owner: str = "me") -> int:
    return int(cache.tree.match(Namespace("", ("", owner)), tokens, len(tokens) - 1).reach)


def test_what_is_found_lies_below_for_its_owner_alone(now: list[float]) -> None:
    cache, tier, asked = shared()
    tokens = [*range(41)]
    assert waits(cache, tokens) and waits(cache, tokens) and len(asked.searches) == 1
    answer(asked.searches[0], 7)
    assert waits(cache, tokens), "it is matched anew"
    assert not waits(cache, tokens) and reach(cache, tokens) == 28 and tier.copies == 14
    assert not waits(cache, [*tokens[:29], 1, 2, 3, 4, 5]) or len(asked.searches) == 2  # what goes on otherwise
    assert reach(cache, tokens, "you") == 0 and waits(cache, tokens, "you")
    assert asked.searches[-1].chain.before != asked.searches[0].chain.before
    now[0] += 3  # what was not there may be there by now
    assert waits(cache, tokens) and asked.searches[-1].chain.tokens == tuple(tokens[28:40])
    answer(asked.searches[-1], 0)
    assert not waits(cache, tokens) and len(tokens) // 4 * 4 > reach(cache, tokens)


def test_nobody_waits_long(now: list[float]) -> None:
    cache, tier, asked = shared()
    assert waits(cache, [*range(20)])
    now[0] += 1.9
    assert waits(cache, [*range(20)])
    now[0] += 0.2
    assert not waits(cache, [*range(20)]), "as long as a search may take"
    assert not waits(cache, [*range(5, 30)]) and len(asked.searches) == 1, "nothing is asked of who is late"
    answer(asked.searches[0], 4)
    now[0] += 11
    assert waits(cache, [*range(5, 30)])
    asked.rests = True
    assert not waits(cache, [*range(9, 30)])
    asked.rests = False
    tier.seconds_for = lambda tokens: 0.01 * tokens
    assert waits(cache, [*range(9, 30)])
    now[0] += 0.25
    assert not waits(cache, [*range(9, 30)]), "no longer than computing takes"


def test_a_store_that_takes_as_long_as_computing_is_asked_seldom(now: list[float]) -> None:
    cache, tier, asked = shared()
    tier.seconds_for = lambda tokens: 0.01 * tokens
    for number in range(8):
        if waits(cache, [number, *range(20)]):
            now[0] += 0.1
            answer(asked.searches[-1], 0)
            assert not waits(cache, [number, *range(20)])
    assert len(asked.searches) == 2
    now[0] += 31
    assert waits(cache, [99, *range(20)])


@pytest.mark.parametrize("seed", range(20))
def test_answers_of_any_kind_put_nothing_where_it_is_not(seed: int, now: list[float]) -> None:
    """Digests of others, too many or too few, groups that there are not all of, in a tier that is soon full."""
    rng = random.Random(seed)
    cache, _, asked = shared(places=12)
    for _ in range(60):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(5, 60))]
        owner = rng.choice("ab")
        if not waits(cache, tokens, owner):
            continue
        search = asked.searches[-1]
        answer(search, rng.randrange(len(search.chain.tokens) // 4 + 1), rng.choice((GROUPS, (0,))))
        begun = (len(tokens) - 1) // 4 * 4 - len(search.chain.tokens)
        wrong = rng.randrange(2 * len(search.digests))
        if wrong < len(search.digests):
            search.digests = [*search.digests[:wrong], rng.randbytes(16), *search.digests[wrong + 1 :]]
        for _ in range(100):
            if not waits(cache, tokens, owner):
                break
            if not asked.searches[-1].answered.is_set():
                answer(asked.searches[-1], rng.randrange(3) and len(asked.searches[-1].chain.tokens) // 4)
                wrong = 99
        else:
            raise AssertionError("somebody waits for ever")
        assert reach(cache, tokens, owner) <= begun + 4 * wrong
        now[0] += rng.choice((0, 1, 5))


def test_a_long_answer_is_taken_in_pieces(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_tier, "_MOST_ADOPTED", 5)
    cache, _, asked = shared()
    tokens = [*range(81)]
    assert waits(cache, tokens)
    answer(asked.searches[0], 18)
    steps = 0
    while waits(cache, tokens):
        steps += 1
    assert (steps, reach(cache, tokens), len(asked.searches)) == (4, 72, 1)


def test_digests_are_those_of_the_tree() -> None:
    chain = Chain(b"x", tuple(range(12)), 4)
    assert chain.digests()[1:] == Chain(chain.first, tuple(range(4, 12)), 4).digests()
