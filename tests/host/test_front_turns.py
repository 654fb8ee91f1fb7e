"""Whose requests go on in a new engine: one process after the other, and nobody waits for one that says nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from penstock.host import front_turns
from penstock.host.front_turns import FrontTurns


def turns(speaks: Callable[[str], bool] = lambda _: False) -> tuple[FrontTurns[str], list[str]]:
    """Turns, and who was given one."""
    given: list[str] = []
    return FrontTurns(given.append, speaks), given


async def test_one_after_the_other() -> None:
    order, given = turns()
    order.begin("abc")
    assert given == ["a"]
    order.through("c")  # which had nothing that could go on, or has gone
    order.through("a")
    assert given == ["a", "b"]
    order.through("b")
    assert given == ["a", "b"]
    order.join("d")
    assert given == ["a", "b", "d"]
    order.join("e")
    assert given[-1] == "d"
    order.through("d")
    assert given[-1] == "e"


async def test_one_that_says_nothing_keeps_the_others_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_turns, "TURN_S", 0.01)
    order, given = turns()
    order.begin("abc")
    async with asyncio.timeout(60):
        while len(given) < 3:
            await asyncio.sleep(0.005)
    assert given == ["a", "b", "c"]
    order.through("a")  # after all
    order.join("d")
    async with asyncio.timeout(60):
        while len(given) < 4:
            await asyncio.sleep(0.005)


async def test_one_that_speaks_takes_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_turns, "TURN_S", 0.01)
    asked: list[str] = []

    def speaks(member: str) -> bool:
        asked.append(member)
        return member == "a" and len(asked) < 5

    order, given = turns(speaks)
    order.begin("abc")
    async with asyncio.timeout(60):
        while len(asked) < 4:
            assert given == ["a"]
            await asyncio.sleep(0.001)
        while len(given) < 3:
            await asyncio.sleep(0.001)
    assert asked[:6] == ["a"] * 5 + ["b"]
    order.end()
    asked.clear()
    order.begin("ab")
    order.through("a")
    assert given[-1] == "b"
    order.end()


async def test_whose_requests_had_not_gone_on_comes_first_in_the_next_engine() -> None:
    order, given = turns()
    order.begin("abcd")
    order.through("a")
    order.through("b")
    order.end()
    given.clear()
    order.end()  # the next one died before it served
    order.begin("abcd")
    assert given == ["c"]
    order.through("c")
    for member in "abd":
        order.through(member)
    assert given == ["c", "a", "b", "d"]
    order.end()
    given.clear()
    order.begin("abcd")  # all had gone on: nobody is suspected
    assert given == ["a"]


async def test_one_that_has_gone_is_not_waited_for() -> None:
    order, given = turns()
    order.begin("ab")
    order.end()
    order.through("a")  # it died, and another has its place
    order.begin("bc")
    assert given == ["a", "b"]
    order.end()
    assert given == ["a", "b"]
