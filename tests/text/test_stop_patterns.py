"""Patterns that end answers: the first match of Python's own expressions, in linear work."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

from penstock.config.errors import ParameterError
from penstock.text.detokenizer import IncrementalDetokenizer
from penstock.text.stop_patterns import PatternSearch, stop_patterns
from penstock.text.tokenizer import Tokenizer

PATTERNS = [
    *("ab", "a|bc", "a*b", "a+?c", "(ab)+c", "[ab]c", "[^ab]", "[a-c]{2}", "b{2,3}c", "(?:a|bb)*c", "a.c", "a{,2}b"),
    *(r"\d+\.", r"\s\w", r"\Wa", r"[\d\s]a", "(a|b)(b|c)", "((a)|(b*c))a", r"a\n", "b?a{2,}", "x{a}", "[]a]b", "[a-]c"),
    *(r"\x61\u0062", "(a?){3}b", "(|a)b", "ab{0}c", "[b-b]a", r"[\]a]c", "(a*)*b", "a(?:b|)c"),
]


def first_match(patterns: list[str], text: str) -> tuple[int, int] | None:
    """Where the match that ends first begins and ends, by trying every part of the text; of several the longest."""
    compiled = [re.compile(pattern) for pattern in patterns]
    for end in range(1, len(text) + 1):
        for begin in range(end):
            if any(expression.fullmatch(text, begin, end) for expression in compiled):
                return begin, end
    return None


def found(patterns: list[str], text: str) -> tuple[int, int] | None:
    search = PatternSearch(stop_patterns(tuple(patterns)))
    for end, char in enumerate(text, 1):
        if (match := search.take(char)) is not None:
            assert re.fullmatch(match[0], text[end - match[1] : end])
            return end - match[1], end
    return None


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_first_match_is_that_of_pythons_expressions(pattern: str) -> None:
    chance, matched = random.Random(pattern), 0
    for _ in range(250):
        text = "".join(chance.choices("aaabbbc c1.\n-]x{}_", k=chance.randint(0, 18)))
        assert found([pattern], text) == first_match([pattern], text), text
        matched += first_match([pattern], text) is not None
    assert matched or pattern == "x{a}"
    assert found([pattern, "bb"], "-bb") == first_match([pattern, "bb"], "-bb")


def test_of_several_patterns_the_longest_that_ends_first_counts() -> None:
    search = PatternSearch(stop_patterns(("b", "ab", "xab")))
    assert [search.take(char) for char in "xab"] == [None, None, ("xab", 3)]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("a*", "at least one character"),
        ("", "at least one character"),
        ("(a", "a ( without its )"),
        ("a)", "a ) without its ("),
        ("[a", "ends in the middle"),
        ("a\\", "ends in the middle"),
        ("*a", "nothing before it"),
        ("a**", "repeats what is repeated"),
        ("a{2}{3}", "repeats what is repeated"),
        ("a{3,2}", "from 3 to 2"),
        ("^a", "where an answer begins"),
        ("a$", "where an answer begins"),
        ("(?=a)", "(?="),
        ("(?P<x>a)", "(?P"),
        (r"(a)\1", "\\1"),
        (r"\ba", "\\b"),
        (r"\xzz", "hexadecimal"),
        ("[b-a]", "does not go up"),
        ("a{100000}", "at most"),
        ("a{1000000000}", "repeats more than"),
        ("(a{99}){99}b", "at most"),
        ("([" + "a-cx-z0-3" * 20 + "]){99}", "at most"),
        ("(" * 50 + "a" + ")" * 50, "deeper than"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_such_pattern_is_refused_in_a_sentence(pattern: str, said: str) -> None:
    with pytest.raises(ParameterError) as refused:
        stop_patterns((pattern,))
    assert refused.value.param == "stop_regex"
    assert said in str(refused.value)


def test_looks_grow_with_the_text_alone() -> None:
    """A pattern on which going back takes for ever: so many looks a character, and no more."""
    patterns = stop_patterns(("(a|aa|a*)*b",))
    search = PatternSearch(patterns)
    for _ in range(5000):
        assert search.take("a") is None
        assert len(search._live) <= len(patterns.states)
    assert search.take("b") == ("(a|aa|a*)*b", 5001)


@pytest.mark.parametrize("include", [False, True])
def test_text_is_cut_at_a_match_however_it_is_cut_into_pushes(
    tokenizer: Callable[[str], Tokenizer], include: bool
) -> None:
    built = tokenizer("concierge")
    text = "One, two; chapter 12: three, chapter 7."
    ids = built.encode(text, add_special_tokens=False)
    whole = "One, two; chapter 12:" if include else "One, two; "
    for size in (1, 2, 3, len(ids)):
        detokenizer = IncrementalDetokenizer(
            built, patterns=stop_patterns((r"chapter \d+:",)), include_stop=include, after_prompt=True
        )
        pieces = [detokenizer.push(ids[at : at + size]) for at in range(0, len(ids), size)]
        assert "".join(piece.text for piece in pieces) + detokenizer.finish().text == whole
        assert detokenizer.stopped == r"chapter \d+:"
        so_far = ""
        for piece in pieces:
            so_far += piece.text
            assert whole.startswith(so_far)
    none = IncrementalDetokenizer(built, patterns=stop_patterns((r"chapter \d+x",)), after_prompt=True)
    assert none.push(ids).text + none.finish().text == text


def test_strings_and_patterns_end_texts_side_by_side(tokenizer: Callable[[str], Tokenizer]) -> None:
    built = tokenizer("concierge")
    ids = built.encode("a table for two", add_special_tokens=False)
    for stop, pattern, stopped, said in (
        ("for", "t[a-z]o", "for", "a table "),
        ("two", "fo+", "fo+", "a table "),
        ("r two", "two", "r two", "a table fo"),
        ("two", "r t.o", "r t.o", "a table fo"),
        ("two", "tw[o]", "two", "a table for "),
    ):
        made = IncrementalDetokenizer(built, stop=(stop,), patterns=stop_patterns((pattern,)), after_prompt=True)
        assert (made.push(ids).text, made.stopped) == (said, stopped)
    late = IncrementalDetokenizer(built, patterns=stop_patterns(("tab",)), min_tokens=len(ids), after_prompt=True)
    assert late.push(ids).text + late.finish().text == "a table for two"  # too early a match is text
