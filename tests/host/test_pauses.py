"""Processes that are stopped for longer than any patience, and go on: nobody healthy is killed for it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from penstock.config import limits
from penstock.config.options import EngineOptions
from penstock.core.request import EngineOutput
from penstock.engine.api import EngineState
from penstock.engine.streams import StreamTable
from penstock.engine.watched_time import WatchedTime
from penstock.host import child as child_module
from penstock.host import process_client as client_module
from penstock.host.child import EngineChild
from penstock.host.process_client import ProcessClient
from tests.engine.support import null_process, read, request, tokens_of

PATIENCE_S, PAUSE_S = 8.0, 10.0
LOOPS = ("asyncio", "uvloop") if find_spec("uvloop") else ("asyncio",)
# A client that waits for at most PATIENCE_S, in a process that can be stopped. It says what has become of its
# engine: its process id, its state at the first moment after each line it reads, and how a long answer ended.
PARENT = """
import asyncio, sys, time
sys.executable, loop, patience, pause = sys.argv[1:]
from penstock.config.options import EngineOptions
from penstock.host import child, process_client as client
from tests.engine.support import read, request, tokens_of
child.UNRESPONSIVE_S = client.HEARTBEAT_TIMEOUT_S = float(patience)
async def main():
    engine = client.ProcessClient(EngineOptions(model="null"))
    await engine.start()
    running = asyncio.ensure_future(read(engine.submit(request(max_tokens=1500))))
    print(engine.pid, flush=True)
    command = (await asyncio.to_thread(sys.stdin.readline)).strip()
    if command == "block":
        time.sleep(float(pause))
    states = {engine.state.value}
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        states.add(engine.state.value)
        await asyncio.sleep(0.01)
    outputs = await running
    print(engine.pid, *sorted(states), len(tokens_of(outputs)), outputs[-1].finish_reason.value, flush=True)
    await engine.close()
if loop == "uvloop":
    import uvloop
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
else:
    asyncio.run(main())
"""


@contextmanager
def client_process(folder: Path, loop: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The client in a process of its own, and the process id of its engine."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", PARENT, str(null_process(folder)), loop, str(PATIENCE_S), str(PAUSE_S)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as parent:
        assert parent.stdout is not None
        try:
            yield parent, int(parent.stdout.readline())
        finally:
            parent.kill()


def test_a_pause_ends_no_engine(tmp_path: Path) -> None:
    """Of the whole server, of the client's process, and of its event loop alone."""
    with ExitStack() as held:
        cases = [(what, loop) for what in ("both", "client", "loop") for loop in LOOPS]
        parents = [held.enter_context(client_process(tmp_path, loop)) for _, loop in cases]
        stopped = [
            {"both": (engine, parent.pid), "client": (parent.pid,), "loop": ()}[what]
            for (what, _), (parent, engine) in zip(cases, parents, strict=True)
        ]
        for pids in stopped:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
        for (what, _), (parent, _) in zip(cases, parents, strict=True):
            print("block" if what == "loop" else "go on", file=parent.stdin, flush=True)
        time.sleep(PAUSE_S)
        for pids in stopped:
            for pid in reversed(pids):  # the client first: its timers are due, and the engine has said nothing yet
                os.kill(pid, signal.SIGCONT)
        said = [parent.stdout.readline().split() for parent, _ in parents if parent.stdout is not None]
    assert said == [[str(engine), "ready", "1500", "length"] for _, engine in parents]


async def test_an_engine_that_is_silent_is_ended_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.host.child.sys.executable", str(null_process(tmp_path)))
    monkeypatch.setattr(child_module, "UNRESPONSIVE_S", 8.0)
    client = ProcessClient(EngineOptions(model="null"))
    await client.start()
    assert client.pid > 0
    os.kill(client.pid, signal.SIGSTOP)
    async with asyncio.timeout(60):
        while "no sign of life" not in caplog.text:
            await asyncio.sleep(0.05)
    assert "memory" not in caplog.text
    await client.close()


async def test_an_engine_that_somebody_else_killed_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.host.child.sys.executable", str(null_process(tmp_path)))
    client = ProcessClient(EngineOptions(model="null"))
    await client.start()
    assert client.pid > 0
    os.kill(client.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        while "signal 9" not in caplog.text:
            await asyncio.sleep(0.05)
    assert "memory ran out" in caplog.text and "sign of life" not in caplog.text
    await client.close()


async def test_a_busy_engine_is_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it sends is a sign of life: here nothing but outputs, as when the thread that beats gets no turn."""
    monkeypatch.setattr("penstock.host.child.sys.executable", str(null_process(tmp_path)))
    monkeypatch.setattr(client_module, "HEARTBEAT_TIMEOUT_S", 2.0)
    client = ProcessClient(EngineOptions(model="mute"))
    await client.start()
    states = set()
    async for _ in client.submit(request(max_tokens=2000)):  # at least four seconds
        states.add(client.state.value)
    assert states == {"ready"}
    await client.close()


async def test_a_pause_within_a_step_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine alone is stopped for longer than a step may take."""
    monkeypatch.setattr("penstock.host.child.sys.executable", str(null_process(tmp_path)))
    client = ProcessClient(EngineOptions(model="busy"))
    await client.start()
    pid, stream = client.pid, client.submit(request(max_tokens=40))
    assert pid > 0
    first = await anext(stream)
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(5)
    os.kill(pid, signal.SIGCONT)
    assert len(tokens_of([first, *await asyncio.wait_for(read(stream), 120)])) == 40
    assert client.pid == pid
    await client.close()


async def test_what_was_sent_is_read_before_it_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.host.child.sys.executable", str(null_process(tmp_path)))
    client = ProcessClient(EngineOptions(model="null"))
    await client.start()
    child = client._child
    assert isinstance(child, EngineChild)
    monkeypatch.setattr(child, "_clock", clock := Stepped())
    child._heard()
    while not child._unread():  # the loop is blocked, and heartbeats arrive
        time.sleep(0.01)
    clock.now = 1000.0
    assert child.silence == 0
    await client.close()


class Stepped(WatchedTime):
    """A clock that shows what a test sets."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.now = 0.0

    def seconds(self) -> float:
        return self.now


async def test_any_thread_may_read_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket is asked on its loop alone: elsewhere there may be no loop, and no socket is for two threads."""
    monkeypatch.setattr("penstock.host.child.sys.executable", str(null_process(tmp_path)))
    client = ProcessClient(EngineOptions(model="null"))
    await client.start()
    try:
        assert client._child is not None
        asked: list[int] = []
        unread = EngineChild._unread

        def noted(child: EngineChild) -> bool:
            asked.append(threading.get_ident())
            return unread(child)

        monkeypatch.setattr(EngineChild, "_unread", noted)
        states = await asyncio.to_thread(lambda: [client.state for _ in range(100)])
        assert set(states) == {EngineState.READY}
        assert await asyncio.to_thread(lambda: asyncio.run(state_of(client))) is EngineState.READY
        assert client.state is EngineState.READY
        assert set(asked) == {threading.get_ident()}
    finally:
        await client.close()


async def state_of(client: ProcessClient) -> EngineState:
    """In a loop that is not the client's."""
    return client.state


def test_a_pause_counts_as_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("penstock.engine.watched_time.time.monotonic", lambda: now)
    clock = WatchedTime(1.0)
    for _ in range(10):
        now += 0.5
        seen = clock.seconds()
    assert seen == 5.0
    now += 3600.0
    assert clock.seconds() == 6.0


async def test_a_reader_is_not_stalled_by_a_pause_of_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("penstock.engine.watched_time.time.monotonic", lambda: now)
    cancelled: list[str] = []
    table = StreamTable(cancelled.append)
    asked = request()
    table.open(asked)
    news = [EngineOutput(asked.request_id, 0, (1,))]
    table.deliver(news)
    now += 10 * limits.STREAM_STALL_TIMEOUT_S
    table.deliver(news)
    assert cancelled == []
    for _ in range(14):  # one that really reads nothing while outputs keep coming
        now += limits.STREAM_STALL_TIMEOUT_S / 12
        table.deliver(news)
    assert cancelled == [asked.request_id] * len(cancelled) != []
