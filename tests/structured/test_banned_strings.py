"""Banned strings: what is found, held back and forbidden, over any cut of a text into tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from penstock.config.errors import RequestError
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineOutput, EngineRequest, FinishReason
from penstock.structured.banned_strings import MOST_HERE, BannedStrings, Withheld, search
from penstock.structured.manager import StructuredOutputManager
from penstock.text.vocabulary import Vocabulary


def over(pieces: Sequence[bytes], *strings: str, hidden: frozenset[int] = frozenset()) -> BannedStrings:
    return BannedStrings(search(strings, lambda token: pieces[token], hidden))


def test_found_over_token_edges_whatever_its_case() -> None:
    banned = over([b"x", b" Bar", b"EL", b" bAr", b"rel of"], " barrel")
    assert banned.take([0]) is None and banned.held == 0
    assert banned.take([1]) is None and banned.held == 1
    assert banned.take([4]) == 1
    assert banned.go_back(1, 2) == (1, ())
    assert list(banned.forbidden) == [1] and banned.held == 0
    assert banned.take([3]) is None and banned.take([4]) == 1
    banned.go_back(1, 2)
    assert sorted(banned.forbidden) == [1, 3]
    assert banned.take([0]) is None and not list(banned.forbidden)


def test_case_is_folded_as_unicode_does_and_characters_may_be_cut() -> None:
    pieces = [b"stra", "ß".encode()[:1], "ß".encode()[1:], b"e ", "ΟΔΟΣ".encode()]
    assert over(pieces, "STRASSE").take([0, 1, 2, 3]) == 0
    assert over(pieces, "οδος").take([4]) == 0
    cut = over(pieces, "ße")
    assert cut.take([0, 1]) is None and cut.held == 1, "half a character may begin one"
    assert cut.take([2]) is None and cut.held == 2
    assert cut.take([3]) == 1


def test_tokens_that_are_not_shown_part_nothing() -> None:
    pieces = [b"a", b"<mark>", b"b"]
    assert over(pieces, "ab", hidden=frozenset((1,))).take([0, 1, 2]) == 0
    assert over(pieces, "ab").take([0, 1, 2]) is None


@pytest.mark.parametrize("seed", range(40))
def test_finds_what_a_search_of_the_whole_text_finds(seed: int) -> None:
    dice = random.Random(seed)
    pieces = ["".join(dice.choices("aAbé", k=dice.randint(0, 3))).encode() for _ in range(8)]
    strings = tuple("".join(dice.choices("abé", k=dice.randint(1, 4))) for _ in range(3))
    banned, tokens, told = over(pieces, *strings), list[int](), 0
    for _ in range(60):
        token = dice.randrange(8)
        if token in banned.forbidden:
            continue
        text = b"".join(pieces[one] for one in tokens).decode()
        after = (text + pieces[token].decode()).casefold()
        found = banned.take([token])
        assert (found is not None) == any(string in after for string in strings)
        tokens.append(token)
        if found is not None:
            length, _ = banned.go_back(found, len(tokens) - 1)
            del tokens[length:]
        assert banned.length == len(tokens)
        assert len(tokens) - banned.held >= told, "what was told is never taken back"
        told = len(tokens) - banned.held
        whole = b"".join(pieces[one] for one in tokens).decode().casefold()
        assert not any(string in whole for string in strings)


def test_what_was_told_stays_where_it_begins_one_after_all() -> None:
    """The second `a` let the first go; with the `a` taken back, the first begins the string again."""
    banned = over([b"a", b"b"], "ab")
    assert banned.take([0]) is None and banned.take([0]) is None and banned.held == 1
    assert banned.take([1]) == 1
    assert banned.go_back(1, 2) == (1, ())
    assert banned.take([1]) == 1
    assert banned.go_back(1, 1) == (1, ())
    assert sorted(banned.forbidden) == [0, 1]


def test_goes_on_behind_what_was_told() -> None:
    banned = over([b"a", b"b", b"x"], "ab")
    banned.go_on([2, 0])
    assert banned.take([1]) == 2 and banned.held == 1


def test_tries_are_bounded() -> None:
    pieces = [b"a" * (1 + token % 3) for token in range(MOST_HERE + 1)]
    banned = over(pieces, "a")
    for token in range(MOST_HERE):
        assert banned.take([token]) == 0
        banned.go_back(0, 0)
    assert banned.take([MOST_HERE]) == 0
    with pytest.raises(RequestError, match="64 times at one place"):
        banned.go_back(0, 0)


def test_a_later_token_of_a_step_is_forbidden_where_it_will_come_again() -> None:
    """A step may bring several tokens: all are drawn again, and the ban waits for its place."""
    banned = over([b"x", b"ab"], "ab")
    assert banned.take([0, 1]) == 1
    assert banned.go_back(1, 0) == (0, ())
    assert not list(banned.forbidden)
    assert banned.take([0]) is None
    assert list(banned.forbidden) == [1]


def test_what_the_sampler_had_learned_comes_back_with_the_tokens() -> None:
    banned = over([b"x", b"a", b"b"], "ab")
    banned.take([0], (1.0,))
    banned.take([1], (2.0,))
    assert banned.take([2], (3.0,)) == 1
    assert banned.go_back(1, 2) == (1, (1.0,))


def test_news_wait_until_they_are_certain() -> None:
    news = Withheld(2)
    assert news.tell(EngineOutput("r", 0, (5, 6, 7)), 2).tokens == (5,)
    news.take_back(4)
    assert news.tell(EngineOutput("r", 0, (8,)), 0).tokens == (6, 8)
    news.tell(EngineOutput("r", 0, (9,)), 1)
    assert news.tell(EngineOutput("r", 0, (1,), finish_reason=FinishReason.LENGTH), 1).tokens == (9, 1)


def test_a_vocabulary_that_cannot_be_read_refuses_its_own_request() -> None:
    def unreadable() -> Vocabulary:
        raise OSError("gone")

    manager = StructuredOutputManager(8, unreadable)
    request = EngineRequest("mine", (1,), SamplingParams(banned_strings=("x",)))
    assert manager.add(request)
    found: list[tuple[EngineRequest, RequestError | None]] = []
    while not found:
        found = manager.ready()
    [(refused, error)] = found
    assert refused is request and error is not None and "vocabulary" in str(error)
    assert not manager.pending
    manager.close()
