"""A host's HTTP processes: real ones on a socket, whose engine never comes."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.config.engine_stats import EngineStats
from penstock.config.errors import ConfigError, PenstockError
from penstock.config.options import EngineOptions, ServerOptions
from penstock.host import child, front_process, quantizing
from penstock.host import front_messages as messages
from penstock.host.front import Front
from penstock.host.front_process import FrontProcess
from penstock.host.process_client import ProcessClient

ENGINE = EngineOptions(model="penstock-concierge", served_model_name="m")
SERVER = ServerOptions(port=0, api_server_count=1, drain_timeout=0)


async def until(condition: Callable[[], object]) -> None:
    """Waits until it is true."""
    async with asyncio.timeout(90):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where all directories are made, with a path that is short enough for sockets wherever tests run."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        monkeypatch.setattr(tempfile, "tempdir", made)
        yield Path(made)


@asynccontextmanager
async def begun(listener: socket.socket, folder: Path, engine: EngineOptions = ENGINE) -> AsyncIterator[Front]:
    """HTTP processes that are being started; they leave nothing behind."""
    front = Front(engine, SERVER, listener)
    front.engine().client = client = ProcessClient(engine)

    async def stats() -> dict[str, EngineStats]:
        return {"m": await client.stats()}

    front.start(stats)
    try:
        yield front
    finally:
        await front.close()
        assert list(folder.iterdir()) == []


async def test_one_that_is_silent_is_ended(
    listener: socket.socket, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[object] = []

    class Host:
        def started(self, process: FrontProcess) -> None:
            heard.append(process)

        def heard(self, process: FrontProcess, message: messages.Up) -> None:
            heard.append(message)

    process = FrontProcess("0.1", Host())
    launch = messages.FrontLaunch(ENGINE, SERVER, "0.1", 0, str(folder / "0.1"), listener.fileno())
    running = asyncio.ensure_future(process.run(launch))
    await until(lambda: process.listens)
    assert heard[0] is process and messages.Alive() in heard
    os.kill(process.pid, signal.SIGSTOP)
    monkeypatch.setattr(front_process, "UNRESPONSIVE_S", 0.0)
    assert "gave no sign of life" in await running
    assert list(folder.iterdir()) == []


async def test_one_that_cannot_be_started_is_tried_again(
    listener: socket.socket, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, calls = asyncio.create_subprocess_exec, []

    async def scarce(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        calls.append(arguments)
        if len(calls) == 1:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await start(*arguments, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", scarce)
    async with begun(listener, folder) as front:
        await until(front._listening)
    assert "could not be started: [Errno 11]" in caplog.text
    assert len(calls) == 2


@pytest.mark.parametrize("error", [PenstockError("a message of 9 bytes"), msgspec.DecodeError("truncated")])
async def test_one_that_cannot_be_understood_is_replaced(
    listener: socket.socket,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    read, errors = messages.read_up, [error]

    async def garbled(reader: asyncio.StreamReader) -> messages.Up | None:
        if errors:
            raise errors.pop()
        return await read(reader)

    monkeypatch.setattr(messages, "read_up", garbled)
    async with begun(listener, folder) as front:
        await until(lambda: [one.client for one in front._listening()] == ["0.2"])
    assert f"said what cannot be read: {error}; it is started again" in caplog.text


async def test_one_that_ends_by_itself_says_why(listener: socket.socket, folder: Path) -> None:
    nowhere = replace(ENGINE, model="/nowhere/at-all")
    async with begun(listener, folder, nowhere) as front:
        with pytest.raises(ConfigError, match="/nowhere/at-all"):
            await front.failed()


async def test_one_that_is_killed_is_started_again(listener: socket.socket, folder: Path) -> None:
    async with begun(listener, folder) as front:
        await until(front._listening)
        os.kill(front._listening()[0].pid, signal.SIGKILL)
        await until(lambda: [one.client for one in front._listening()] == ["0.2"])


async def test_a_directory_that_was_removed_is_made_again(listener: socket.socket, folder: Path) -> None:
    async with begun(listener, folder) as front:
        await until(front._listening)
        shutil.rmtree(front._directory)
        os.kill(front._listening()[0].pid, signal.SIGKILL)
        await until(lambda: [one.client for one in front._listening()] == ["0.2"])
        assert front._directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "program", [front_process._PROGRAM, child._PROGRAM, quantizing._PROGRAM], ids=["http", "engine", "quantising"]
)
def test_an_interrupt_while_modules_are_imported_is_the_hosts(program: str) -> None:
    begun, _ = program.split("runpy.run_module")
    imports = f"{begun} print('imports', flush=True); sys.stdin.read(); print('on')"
    command = [sys.executable, "-c", imports, "."]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "imports\n"
        process.send_signal(signal.SIGINT)
        process.stdin.close()
        assert process.stdout.read() == "on\n"
    assert process.returncode == 0


async def test_one_that_the_engine_cannot_reach_is_ended_and_another_started(
    listener: socket.socket, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with begun(listener, folder) as front:
        front.engine().unattached("0.1")  # which has not been started
        await until(front._listening)
        front.engine().unattached("0.1")
        await until(lambda: [one.client for one in front._listening()] == ["0.2"])
    assert caplog.text.count("cannot reach an HTTP process") == 1
    assert "ended with status 0" in caplog.text


async def test_draining_reaches_those_that_are_being_started(listener: socket.socket, folder: Path) -> None:
    async with begun(listener, folder) as front:
        await until(lambda: front._there)
        await front.drain(60, asyncio.Event())
        await asyncio.wait_for(asyncio.gather(*front._places), 60)
        assert not front._there


def test_a_folder_too_deep_for_sockets_is_named(
    listener: socket.socket, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = folder / (
        "d" * (child._MAX_SOCKET_PATH - len(str(folder)) - len("/penstock-12345678/63.9/0123456789abcdef"))
    )
    deep.mkdir()  # in which an engine's sockets have room
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError, match="set TMPDIR to a shorter one"):
        Front(ENGINE, SERVER, listener)
    assert list(deep.iterdir()) == []
