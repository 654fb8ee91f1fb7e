"""Timeouts by the time the loop ran."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from importlib.util import find_spec

import pytest

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


async def test_what_is_done_in_time_is_left_alone() -> None:
    async with patience(0.05) as timer:
        await asyncio.sleep(0)
        assert timer.elapsed() < 0.05
    await asyncio.sleep(0.1)


async def test_a_timer_fires_once_and_can_be_cancelled() -> None:
    fired: list[str] = []
    loop = asyncio.get_running_loop()
    PatientTimer(loop, 0.02, lambda: fired.append("one"))
    other = PatientTimer(loop, 0.02, lambda: fired.append("other"))
    other.cancel()
    other.cancel()
    await asyncio.sleep(0.2)
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
