"""Prompts and texts that are cut."""

from __future__ import annotations

import random

import pytest

from penstock.config.lengths import Repetition
from penstock.text.cut import cut_tokens
from penstock.text.loops import Loop

IDS = tuple(range(100, 110))


@pytest.mark.parametrize(
    ("most", "keep_end", "around", "kept"),
    [
        (10, True, (), IDS),
        (3, True, (), (107, 108, 109)),
        (3, False, (), (100, 101, 102)),
        (4, False, (100, 109), (100, 101, 102, 109)),
        (4, True, (100, 109), (100, 107, 108, 109)),
        (4, True, (100,), (100, 107, 108, 109)),
        (2, True, (100, 109), (108, 109)),
        (4, False, (7, 8), (100, 101, 102, 103)),
    ],
)
def test_tokens_around_a_text_stay(most: int, keep_end: bool, around: tuple[int, ...], kept: tuple[int, ...]) -> None:
    assert cut_tokens(IDS, most, keep_end, around) == kept


def repeated(tokens: list[int], asked: Repetition) -> int:
    """The same by looking at each end anew."""
    for end in range(1, len(tokens) + 1):
        for size in range(asked.shortest, asked.longest + 1):
            tail = tokens[max(0, end - size * asked.count) : end]
            if len(tail) == size * asked.count and tail == tail[:size] * asked.count:
                return end
    return 0


@pytest.mark.parametrize("seed", range(40))
def test_patterns_are_found_where_they_end(seed: int) -> None:
    draw = random.Random(seed)
    tokens = [draw.randrange(2) for _ in range(60)]
    shortest = draw.randint(1, 4)
    asked = Repetition(draw.randint(shortest, 6), shortest, draw.randint(2, 4))
    loop, seen = Loop(asked), 0
    expected = repeated(tokens, asked)
    while seen < len(tokens):
        part = tokens[seen : seen + draw.randint(1, 3)]
        if end := loop.end(part):
            assert seen + end == expected
            return
        seen += len(part)
    assert expected == 0
