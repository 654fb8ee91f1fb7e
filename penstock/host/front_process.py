"""One HTTP process of several, as its host sees it: started, told of the engine, watched, and gone at the end."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final, Protocol

from penstock.engine.watched_time import WatchedTime
from penstock.host import front_messages as front

UNRESPONSIVE_S: Final = 60.0
_LOOK_S = 0.5
# As for an engine. A terminal's Ctrl-C is the host's to judge, also while modules are imported.
_PROGRAM = (
    "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path.append(sys.argv[1]); "
    "runpy.run_module('penstock.server.worker', None, '__main__')"
)


class Listener(Protocol):
    """Told what HTTP processes have to say."""

    def started(self, process: FrontProcess) -> None:
        """It can be told of the engine."""

    def heard(self, process: FrontProcess, message: front.Up) -> None:
        """It has sent a message."""


class FrontProcess:
    """One HTTP process. One that says nothing for UNRESPONSIVE_S, while its host listens, is killed.

    Attributes:
        client: its name among the engine's clients.
        listens: whether it answers, or did.
        why: what it said was the reason for its end.
    """

    def __init__(self, client: str, listener: Listener) -> None:
        self.client = client
        self.listens = False
        self.why: str | None = None
        self._listener = listener
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._clock = WatchedTime(2 * _LOOK_S)
        self._last_heard = self._clock.seconds()
        self._killed_for_silence = False

    @property
    def pid(self) -> int:
        """Its process id; 0 before the start."""
        return self._process.pid if self._process is not None else 0

    @property
    def silence(self) -> float:
        """Seconds for which its host has listened and heard nothing of it."""
        return self._clock.seconds() - self._last_heard

    async def run(self, launch: front.FrontLaunch) -> str:
        """Starts it; returns how it ended, in words, when it has.

        Raises:
            OSError: it cannot be started.
        """
        Path(launch.folder).mkdir(mode=0o700)
        try:
            async with self._started(launch) as (process, reader):
                watching = asyncio.create_task(self._watch(process))
                try:
                    while (message := await front.read_up(reader)) is not None:
                        self._hear(message)
                    status = await process.wait()
                finally:
                    watching.cancel()
        finally:
            shutil.rmtree(launch.folder, ignore_errors=True)
        if self._killed_for_silence:
            return f"gave no sign of life for {UNRESPONSIVE_S:g} s and was ended by Penstock"
        return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"

    def tell(self, message: front.Down) -> None:
        """Sends it a message; nothing where it has gone."""
        if self._writer is not None:
            front.write(self._writer, message)

    @contextlib.asynccontextmanager
    async def _started(
        self, launch: front.FrontLaunch
    ) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.StreamReader]]:
        """The process, which has ended afterwards, and what it sends."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as failing:
            failing.callback(ours.close)
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-c",
                _PROGRAM,
                str(Path(__file__).resolve().parents[2]),
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), launch.listener),
            )
            failing.pop_all()
        try:
            reader, self._writer = await asyncio.open_unix_connection(sock=ours)
            self.tell(launch)
            self._listener.started(self)
            yield process, reader
        finally:
            if self._writer is not None:
                self._writer.close()
            self._kill(process)
            await process.wait()

    def _hear(self, message: front.Up) -> None:
        self._last_heard = self._clock.seconds()
        match message:
            case front.Listening():
                self.listens = True
            case front.Failed(why=why):
                self.why = why
        self._listener.heard(self, message)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        while self.silence <= UNRESPONSIVE_S:
            await asyncio.sleep(_LOOK_S)
        self._killed_for_silence = True
        self._kill(process)

    def _kill(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
