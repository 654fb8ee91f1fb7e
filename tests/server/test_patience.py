"""Timeouts by the time the loop ran."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from penstock.engine import watched_time
from penstock.server.lifecycle import Lifecycle
from penstock.server.patience import PatientTimer, patience


def loops() -> list[Callable[[], asyncio.AbstractEventLoop]]:
    if find_spec("uvloop") is None:
        return [asyncio.new_event_loop]
    import uvloop

    return [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.mark.parametrize("make", loops())
def test_what_came_during_a_pause_is_read_before_time_is_up(make: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def main() -> bytes:
        near, far = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=near)
        far.send(b"x")
        async with patience(0.8):
            await reader.read(1)
            waiting = asyncio.ensure_future(reader.read(1))
            await asyncio.sleep(0)
            far.send(b"y")
            time.sleep(2)
            found = await waiting
        writer.close()
        far.close()
        return found

    with asyncio.Runner(loop_factory=make) as runner:
        assert runner.run(main()) == b"y"


async def test_time_is_up_at_last() -> None:
    with pytest.raises(TimeoutError):
        async with patience(0.1):
            await asyncio.sleep(60)


def noted_timers(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many calls are left that the running loop was asked to make later."""
    loop = asyncio.get_running_loop()
    call_later, handles = loop.call_later, list[asyncio.TimerHandle]()

    def noted(seconds: float, callback: Callable[[], object]) -> asyncio.TimerHandle:
        def called() -> None:
            handles.remove(handle)
            callback()

        handle = call_later(seconds, called)
        handles.append(handle)
        return handle

    monkeypatch.setattr(loop, "call_later", noted)
    return lambda: sum(not handle.cancelled() for handle in handles)


async def test_what_is_done_in_time_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    left = noted_timers(monkeypatch)
    async with patience(60):
        assert left() == 1
    assert left() == 0


async def test_of_a_pause_a_quarter_of_the_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(watched_time, "time", SimpleNamespace(monotonic=lambda: now))
    async with patience(80) as timer:
        now += 15
        assert timer.elapsed() == pytest.approx(15)
        now += 3600
        assert timer.elapsed() == pytest.approx(15 + 20)


async def test_a_timer_fires_once_and_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    fired: list[str] = []
    loop, done, left = asyncio.get_running_loop(), asyncio.Event(), noted_timers(monkeypatch)
    other = PatientTimer(loop, 0.02, lambda: fired.append("other"))
    PatientTimer(loop, 0.02, lambda: (fired.append("one"), done.set()))
    assert left() == 2
    other.cancel()
    other.cancel()
    assert left() == 1
    await done.wait()
    assert left() == 0
    assert fired == ["one"]


async def test_draining_gives_the_time_it_promised() -> None:
    """A pause in the midst of it takes a quarter at most: what needs half of the time still ends."""
    lifecycle = Lifecycle()

    async def work() -> None:
        with lifecycle.track():
            await asyncio.sleep(0)
            time.sleep(3)
            await asyncio.sleep(0.3)

    running = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    assert await lifecycle.drain(1.2)
    await running
