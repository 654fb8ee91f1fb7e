"""The last requests of several HTTP processes are asked for all at once, and nobody is waited for for long."""

from __future__ import annotations

import asyncio

import pytest

from penstock.host import accounts as module
from penstock.host import front_messages as front
from penstock.host.accounts import Accounts


class Process:
    """Tells its own when it is asked, unless it is silent or dies of the question."""

    def __init__(self, name: str, accounts: Accounts, manner: str = "") -> None:
        self.name, self.accounts, self.manner = name, accounts, manner
        self.answers: asyncio.Queue[front.Requests] = asyncio.Queue()

    def tell(self, message: front.Down) -> None:
        if isinstance(message, front.Requests):
            self.answers.put_nowait(message)
        elif isinstance(message, front.TellRequests) and self.manner == "dies":
            self.accounts.left(self)
        elif isinstance(message, front.TellRequests) and self.manner != "silent":
            told = front.OwnRequests(message.round, f"{self.name} of {message.owner}".encode())
            self.accounts.told(self, told)
            self.accounts.told(self, told)  # twice is once


def some(*manners: str) -> list[Process]:
    there: list[Process] = []
    accounts = Accounts(lambda: there)
    there += [Process(str(number), accounts, manner) for number, manner in enumerate(manners)]
    return there


async def asked(process: Process, number: int, owner: str | None = None) -> list[str]:
    process.accounts.asked(process, front.AskRequests(number, owner))
    async with asyncio.timeout(60):
        answer = await process.answers.get()
    assert answer.number == number
    return sorted(told.decode() for told in answer.told)


async def test_all_are_asked_and_told() -> None:
    one, _ = some("", "")
    assert await asked(one, 7, "me") == ["0 of me", "1 of me"]
    assert await asked(one, 8) == ["0 of None", "1 of None"]


async def test_an_order_is_handed_to_all() -> None:
    one, other = some("", "")
    heard: list[front.Down] = []
    tell = other.tell
    other.tell = lambda message: (heard.append(message), tell(message))  # type: ignore[method-assign, assignment]
    one.accounts.asked(one, front.AskRequests(3, "me", "stop", "x"))
    async with asyncio.timeout(60):
        assert len((await one.answers.get()).told) == 2
    (message,) = heard
    assert isinstance(message, front.TellRequests)
    assert (message.owner, message.order, message.name) == ("me", "stop", "x")


async def test_who_is_silent_or_dies_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 60.0)
    one, _ = some("", "dies")
    assert await asked(one, 1) == ["0 of None"]
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    one, _ = some("", "silent")
    assert await asked(one, 2) == ["0 of None"]
    await one.accounts.close()
