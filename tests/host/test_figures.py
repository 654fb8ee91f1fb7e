"""Sums over HTTP processes never go back, whoever dies or says nothing, and tell all that was counted before."""

from __future__ import annotations

import asyncio
import re

import pytest

from penstock.config.engine_stats import EngineStats
from penstock.host import figures as figures_module
from penstock.host import front_messages as front
from penstock.host.figures import Figures, lasting, summed

A = "# HELP a_total A.\n# TYPE a_total counter\n"
B = "# HELP b B.\n# TYPE b gauge\n"


class Process:
    """One that counts, and answers as long as it is not silent."""

    def __init__(self, of: list[Process], seconds: Figures) -> None:
        self.of, self.figures = of, seconds
        self.count, self.silent = 0, False
        self.asked = 0
        self.answers: dict[int, front.Figures] = {}
        of.append(self)

    def tell(self, message: front.Down) -> None:
        if isinstance(message, front.Figures):
            self.answers[message.number] = message
        elif not self.silent:
            self.asked += 1
            text = f'{A}a_total{{x="1"}} {self.count}.0\n{B}b 1.0\n'.encode()
            asyncio.get_running_loop().call_soon(self.figures.told, self, text)

    def die(self) -> None:
        self.of.remove(self)
        self.figures.left(self)

    async def total(self, number: int, name: str = "a_total") -> float:
        self.figures.asked(self, number)
        async with asyncio.timeout(60):
            while number not in self.answers:
                await asyncio.sleep(0.001)
        counted = self.answers[number].counted.decode()
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (.*)$", counted, re.MULTILINE))


def some(number: int) -> tuple[Figures, list[Process]]:
    """So many processes of an engine that has made 7 steps."""
    there: list[Process] = []

    async def stats() -> dict[str, EngineStats]:
        return {"m": EngineStats(steps=7)}

    figures = Figures(stats, lambda: there)
    for _ in range(number):
        Process(there, figures)
    return figures, there


async def test_what_was_told_once_is_told_by_whoever_is_asked_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures_module, "PATIENCE_S", 0.05)
    figures, there = some(3)
    first, second, third = there
    first.count, second.count, third.count = 1, 20, 300
    assert await first.total(1) == 321
    assert first.answers[1].stats["m"].steps == 7
    second.silent = True
    first.count = 2
    assert await third.total(1) == 322
    second.die()
    assert await first.total(2) == 322
    assert await first.total(3, "b") == 2  # a gauge is of those that are there
    first.count = 5
    first.die()
    assert await third.total(2) == 322  # as far as it was told
    another = Process(there, figures)
    another.count = 1000
    assert await third.total(3) == 1322
    await figures.close()


async def test_a_look_keeps_what_nobody_asked_for() -> None:
    figures, there = some(2)
    first, second = there
    first.count = 4
    figures.look()
    async with asyncio.timeout(60):
        while not first.asked or figures._task is not None:
            await asyncio.sleep(0.001)
    first.die()
    assert await second.total(1) == 4
    await figures.close()


async def test_who_asks_meanwhile_gets_figures_of_its_own_time() -> None:
    figures, there = some(2)
    first, second = there
    asking = [asyncio.ensure_future(first.total(number)) for number in range(20)]
    await asyncio.sleep(0)  # the first collection has begun
    second.count = 9
    asking.append(asyncio.ensure_future(second.total(1)))
    totals = await asyncio.gather(*asking)
    assert totals[-1] == 9
    assert first.asked <= 3  # and not once for each
    await figures.close()


async def test_one_that_dies_while_it_is_waited_for_is_not() -> None:
    figures, there = some(2)
    first, second = there
    second.silent = True
    asking = asyncio.ensure_future(first.total(1))
    async with asyncio.timeout(60):
        while not first.asked:
            await asyncio.sleep(0.001)
    second.die()
    assert await asking == 0
    await figures.close()


def test_sums() -> None:
    a, b = A.encode(), B.encode()
    first = a + b'a_total{x="1"} 2.0\n' + b + b"b 1.5\n"
    other = a + b'a_total{x="1"} 3.0\na_total{x="2"} 1.0\n' + b + b"b 0.0\n"
    assert summed([first, b"", other]) == a + b'a_total{x="1"} 5.0\na_total{x="2"} 1.0\n' + b + b"b 1.5\n"
    assert summed([]) == lasting(b"") == b""
    assert lasting(first) == a + b'a_total{x="1"} 2.0\n'


@pytest.mark.parametrize("character", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\r"])
def test_labels_may_hold_what_ends_lines_elsewhere(character: str) -> None:
    """In figures only a line feed does."""
    text = f'{A}a_total{{x="1{character}2 3"}} 4.0\n'.encode()
    assert summed([text, text]) == text.replace(b"4.0", b"8.0")
    assert lasting(text) == text
