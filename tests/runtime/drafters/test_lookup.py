"""Drafts that are copied from earlier tokens: found as a plain search finds them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from penstock.config.sampling import SamplingParams
from penstock.core.protocol import NewSequence
from penstock.runtime.drafters.history import History
from penstock.runtime.drafters.lookup import NgramDrafter, SuffixDrafter


def in_common(tokens: list[int], place: int, most: int) -> int:
    """How many tokens before a place are those at the end."""
    count = 0
    while count < min(most, place) and tokens[place - 1 - count] == tokens[-1 - count]:
        count += 1
    return count


@pytest.mark.parametrize("least", [1, 2, 3, 4])
def test_places_like_the_end_are_those_of_a_plain_search(least: int) -> None:
    dice = random.Random(least)
    found_some = 0
    for _ in range(300):
        tokens = [dice.randrange(2) for _ in range(dice.randrange(1, 60))]
        most = dice.randrange(least, 9)
        begin = dice.randrange(len(tokens) + 1)
        history = History(tokens[:begin], least)
        if dice.random() < 0.5:
            history.like_the_end(most)
        while begin < len(tokens):
            more = dice.randrange(1, 5)
            history.extend(tokens[begin : begin + more])
            begin += more
        ids, places, common = history.like_the_end(most)
        counts = {place: in_common(tokens, place, most) for place in range(1, len(tokens))}
        longest = max(counts.values(), default=0)
        assert ids.tolist() == tokens
        if longest < least:
            assert not len(places)
        else:
            assert common == longest
            assert places.tolist() == [place for place, count in counts.items() if count == longest]
            found_some += 1
    assert found_some > 100


def test_only_the_last_places_are_looked_at() -> None:
    ids, places, common = History([1, 2, 3] * 1000, 2).like_the_end(64)
    assert len(ids) == 3000 and len(places) <= 64 and common == 64
    assert places[-1] == 2997


def new(slot: int, prompt: list[int], generated: list[int] | None = None) -> NewSequence:
    return NewSequence(slot, "r", 0, tuple(prompt), tuple(generated or ()), 0, ((),), SamplingParams(), speculate=8)


def test_an_ngram_is_what_stood_behind_the_last_place_like_the_end() -> None:
    drafter = NgramDrafter(4, 2, 3)
    drafter.begin(new(0, [5, 6, 7, 1, 5, 6, 8, 9, 3], [5]))
    assert drafter.propose({0: 4}) == []  # 3, 5 stands nowhere else
    drafter.take(0, [6])
    (draft,) = drafter.propose({0: 4})
    assert draft.slot == 0 and draft.tokens == (8, 9, 3, 5)
    (draft,) = drafter.propose({0: 2})
    assert draft.tokens == (8, 9)


def test_a_suffix_follows_what_is_most_frequent_behind_the_longest_match() -> None:
    drafter = SuffixDrafter(5, 1)
    drafter.begin(new(3, [1, 2, 4, 9, 1, 2, 5, 8, 1, 2, 4, 7, 1, 2, 6, 6, 1], [2]))
    (draft,) = drafter.propose({3: 5})
    assert draft.tokens[:1] == (4,)  # twice 4, once 5, once 6
    assert draft.tokens[1] == 7  # of the two, the latest
    agreed = SuffixDrafter(5, 1)
    agreed.begin(new(3, [1, 2, 4, 9, 0, 1, 2]))
    (other,) = agreed.propose({3: 5})
    assert other.tokens == (4, 9, 0, 1, 2)
    assert other.kind != draft.kind  # of which one is surer


@pytest.mark.parametrize("drafter", [NgramDrafter(3, 2, 4), SuffixDrafter(3, 2)], ids=["ngram", "suffix"])
def test_a_copy_goes_on_behind_what_was_replaced(drafter: NgramDrafter | SuffixDrafter) -> None:
    """For three tokens; where the end is like another place again, that one is copied."""
    drafter.begin(new(0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2]))
    (draft,) = drafter.propose({0: 3})
    assert draft.tokens == (3, 4, 5)
    drafter.take(0, [3, 40])  # for 4
    (behind,) = drafter.propose({0: 3})
    assert behind.tokens == (5, 6, 7)
    assert behind.kind != draft.kind
    drafter.take(0, [50])  # and for 5
    (further,) = drafter.propose({0: 3})
    assert further.tokens == (6, 7, 8)
    assert further.kind != behind.kind
    drafter.take(0, [60])
    assert drafter.propose({0: 3})[0].tokens == (7, 8, 9)
    drafter.take(0, [70])
    assert drafter.propose({0: 3}) == []
    drafter.take(0, [2, 3])
    assert drafter.propose({0: 3})[0].tokens == (40, 50, 60)
    drafter.begin(new(0, [1, 2, 3, 4]))
    assert drafter.propose({0: 3}) == []


def test_the_longer_a_copy_the_surer() -> None:
    """Of an n-gram too, though fewer tokens are looked for."""
    kinds = set[int]()
    drafter = NgramDrafter(2, 2, 3)
    drafter.begin(new(0, [*range(20), *range(2)]))
    for token in range(2, 14):
        kinds.add(drafter.propose({0: 2})[0].kind)
        drafter.take(0, [token])
    assert len(kinds) == 11  # 2 to 12 tokens in common


def test_a_slot_that_is_taken_again_starts_anew() -> None:
    drafter = SuffixDrafter(4, 2)
    drafter.begin(new(0, [1, 2, 3, 1, 2]))
    assert drafter.propose({0: 4})
    drafter.release(0)
    drafter.begin(new(0, [7, 8]))
    assert drafter.propose({0: 4}) == []
    drafter.begin(new(0, [1, 2, 9, 1, 2]))
    assert drafter.propose({0: 4})[0].tokens == (9, 1, 2)


def test_a_lookup_is_linear_in_the_tokens() -> None:
    """The worst there is: all places are like the end. What is compared is an array, and then 64 places."""
    for size in (2_000, 64_000):
        ids, places, common = History(np.zeros(size, np.int32).tolist(), 2).like_the_end(64)
        assert len(ids) == size and len(places) <= 64 and common == 64
