"""Earlier answers are copied from within a namespace alone, and no more is kept of them than is said."""

from __future__ import annotations

import json
import random
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.config.sampling import SamplingParams
from penstock.core.protocol import NewSequence
from penstock.core.request import EngineRequest
from penstock.runtime.drafters import earlier
from penstock.runtime.drafters.earlier import Earlier
from penstock.runtime.drafters.history import History, Ids
from penstock.runtime.drafters.lookup import SuffixDrafter
from tests.engine.test_drafts import check, run
from tests.engine.test_speculation import made
from tests.models import tiny

MINE, THEIRS = ("", ("salt", "me")), ("", ("salt", "they"))


def ids(*tokens: int) -> Ids:
    return np.array(tokens, np.int32)


def new(slot: int, prompt: list[int], namespace: Hashable) -> NewSequence:
    return NewSequence(
        slot, "r", 0, tuple(prompt), (), 0, ((),), SamplingParams(), speculate=8, namespace=namespace
    )  # fmt: skip


def test_places_like_another_end_are_those_of_a_plain_search() -> None:
    dice = random.Random(2)
    met = 0
    for _ in range(300):
        least = dice.randint(1, 4)
        tokens, end = ([dice.randrange(2) for _ in range(dice.randrange(1, 60))] for _ in range(2))
        _, places, common = History(tokens, least).like(ids(*end), 9)
        counts = {}
        for place in range(1, len(tokens)):
            count = 0
            while count < min(9, place, len(end)) and tokens[place - 1 - count] == end[-1 - count]:
                count += 1
            counts[place] = count
        longest = max(counts.values(), default=0)
        if longest < least:
            assert not len(places)
        else:
            assert common == longest
            assert places.tolist() == [place for place, count in counts.items() if count == longest]
            met += 1
    assert met > 100


def test_what_stood_in_an_earlier_answer_is_proposed() -> None:
    drafter = SuffixDrafter(5, 2)
    drafter.begin(new(0, [1, 2], MINE))
    drafter.take(0, [7, 8, 9, 10, 11])
    drafter.release(0)
    drafter.begin(new(0, [3, 7, 8], MINE))
    (draft,) = drafter.propose({0: 5})
    assert draft.tokens == (9, 10, 11)  # and not into the next answer
    drafter.begin(new(1, [7, 8, 4, 7, 8], MINE))
    (own,) = drafter.propose({1: 5})
    assert own.tokens[0] == 4 and own.kind != draft.kind  # as much in common: its own is taken


def test_nobody_elses_answer_is_proposed() -> None:
    drafter = SuffixDrafter(5, 2)
    for namespace in (THEIRS, None):
        drafter.begin(new(0, [1, 2], namespace))
        drafter.take(0, [7, 8, 9, 10, 11])
        drafter.release(0)
        drafter.begin(new(0, [3, 7, 8], MINE))
        assert drafter.propose({0: 5}) == []
        drafter.release(0)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier, "_NAMESPACE_TOKENS", 100)
    monkeypatch.setattr(earlier, "_TOKENS", 250)
    kept = Earlier(2)
    for number in range(40):
        kept.add(number % 5, ids(*range(number, number + 30)))
        assert kept.tokens <= 250 and kept.tokens == sum(history.size for history in kept._answers.values())
        assert all(history.size <= 101 for history in kept._answers.values())
    _, places, common = kept.like(4, ids(60, 61), 16)
    assert len(places) and common == 2  # the last one of it
    assert not len(kept.like(4, ids(5, 6), 16)[1])  # the first are gone
    assert len(kept._answers) < 5
    for number in range(3000):
        kept.add(("salt", number), ids(1, 2, 3))
    assert len(kept._answers) <= 1024


def test_answers_with_earlier_ones_are_those_without(tmp_path: Path) -> None:
    """The same request again says the same, all of it drafted from the first answer, unless its salt is another."""
    tiny.save("llama", tmp_path)
    params = SamplingParams(temperature=0.8, max_tokens=40)
    asked = EngineRequest("r", tuple(tiny.prompt(9)), params, seed=4, speculate=12, cache_salt="a")
    plain = made(tmp_path, None)
    truth = run(plain, replace(asked, speculate=0))
    plain.close()
    engine = made(tmp_path, json.loads('{"method": "suffix", "adaptive": false}'))
    accepted = []
    for turn, salt in enumerate("aabb"):
        before = engine.stats().accepted_tokens
        check(run(engine, replace(asked, request_id=f"r#{turn}", cache_salt=salt)), truth)
        accepted.append(engine.stats().accepted_tokens - before)
    engine.close()
    assert accepted[1] == accepted[3] > 25 and max(accepted[0], accepted[2]) < 10
