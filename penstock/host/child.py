"""One engine process as its client sees it: started, spoken to, and surely gone at the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Set
from pathlib import Path

import zmq
import zmq.asyncio

from penstock.config.errors import ConfigError, EngineDeadError
from penstock.config.options import EngineOptions
from penstock.engine import messages
from penstock.engine.api import EngineInfo
from penstock.engine.messages import MessageError
from penstock.engine.watched_time import WatchedTime
from penstock.engine.work_record import read_record

TERMINATE_S = 5.0
UNRESPONSIVE_S = 60.0
LOOK_S = 0.5  # between two looks at how long the process has been silent
_DRAIN_S, _SILENT = 0.05, (0, 2, -9, -15)  # statuses of a process that had nothing to say
_MAX_SOCKET_PATH = 100  # what a unix socket address holds, less some
# As `python -m penstock.engine.process`, but with this very package and never a module of the current directory, which
# may be a model folder with Python files in it. A terminal's Ctrl-C is the parent's to judge, also during imports.
_PROGRAM = (
    "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path.append(sys.argv[1]); "
    "runpy.run_module('penstock.engine.process', None, '__main__')"
)
_log = logging.getLogger(__name__)


class EngineChild:
    """An engine process and its two sockets, inside a directory that only this user may enter.

    The receiving side binds each socket, so that nobody who connects can take a message meant for another.
    A process that sends nothing for UNRESPONSIVE_S, while this one runs and listens, is killed.
    """

    def __init__(
        self,
        options: EngineOptions,
        context: zmq.Context[zmq.Socket[bytes]],
        on_event: Callable[[messages.Event], None],
        cores: tuple[int, int] | None = None,
        prefixes: str = "",
    ) -> None:
        """`on_event` gets every event but Ready, Fatal and Heartbeat; `cores` are the file and the place in it where it
        notes that it works; `prefixes` as of Launch. Raises ConfigError for too long a TMPDIR.
        """
        self._directory = private_directory()
        self._launch = messages.Launch(
            options,
            f"ipc://{self._directory / secrets.token_hex(8)}",
            f"ipc://{self._directory / secrets.token_hex(8)}",
            str(self._directory / "work"),
            os.getpid(),
            None if cores is None else cores[0],
            0 if cores is None else cores[1],
            prefixes,
        )
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._last_words: messages.Fatal | None = None
        self._watchdog: asyncio.TimerHandle | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._killed_for_silence = False
        self._clock = WatchedTime(2 * LOOK_S)
        self._last_heard = self._clock.seconds()
        self._silence = 0.0  # at the loop's last look
        self._events: zmq.asyncio.Socket = zmq.asyncio.Socket(context, zmq.PULL)
        self._events.set(zmq.RCVHWM, 0)
        self._events.set(zmq.MAXMSGSIZE, messages.MAX_FRAME_BYTES)
        self._events.bind(self._launch.events)
        self._commands = context.socket(zmq.PUSH)
        self._commands.set(zmq.SNDHWM, 0)
        self._commands.set(zmq.LINGER, 0)
        self._commands.set(zmq.RECONNECT_IVL, 10)

    @property
    def commands(self) -> str:
        """Where the process takes commands, once it serves."""
        return self._launch.commands

    @property
    def pid(self) -> int:
        """The process id; 0 before the start."""
        return self._process.pid if self._process is not None else 0

    @property
    def silence(self) -> float:
        """Seconds for which this process has listened and heard nothing; 0 while something it sent is unread.

        Any thread may ask; others than the loop's are told of the loop's last look, for the socket is the loop's own.
        """
        if self._in_loop():
            if self._unread():
                self._heard()
            self._silence = self._clock.seconds() - self._last_heard
        return self._silence

    def worked_on(self) -> Set[str] | None:
        """Requests that the process worked on last, also if it was killed; None where nobody knows."""
        return read_record(Path(self._launch.work))

    async def start(self) -> EngineInfo:
        """Starts the process and waits until it serves.

        Raises:
            PenstockError: it could not start; the error is the one raised there.
        """
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-c",
            _PROGRAM,
            str(Path(__file__).resolve().parents[2]),
            stdin=asyncio.subprocess.PIPE,
            stdout=2,
            pass_fds=() if self._launch.cores is None else (self._launch.cores,),
        )
        self._receiver = asyncio.create_task(self._receive())
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(messages.encode(self._launch))
            await self._process.stdin.drain()
        self._process.stdin.close()
        death = asyncio.create_task(self.wait())
        try:
            await asyncio.wait((self._ready, death), return_when=asyncio.FIRST_COMPLETED)
        finally:
            death.cancel()
        if not self._ready.done():
            raise messages.fatal_error(self._last_words or self._unexplained())
        self._commands.connect(self._launch.commands)
        return self._ready.result()

    async def wait(self) -> None:
        """Returns when the process has ended and everything it sent has been handled."""
        status = await self._process.wait() if self._process is not None else 0
        for _ in range(1 if status in _SILENT else 40):  # others send last words, behind all else
            await asyncio.sleep(0 if self._last_words else _DRAIN_S)

    def send(self, frame: bytes) -> None:
        """Sends an encoded command; never blocks.

        Raises:
            EngineDeadError: the socket is closed.
        """
        try:
            self._commands.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise EngineDeadError("The engine process is gone.") from error

    async def close(self) -> None:
        """Ends the process (SIGTERM, after TERMINATE_S SIGKILL; at once if cancelled) and closes the sockets."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        try:
            if self._process is not None and self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.terminate()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), TERMINATE_S)
        finally:
            self._kill()
            if self._receiver is not None:
                self._receiver.cancel()
            self._events.close(0)
            self._commands.close(0)
            shutil.rmtree(self._directory, ignore_errors=True)
        if self._process is not None:
            await self._process.wait()

    async def _receive(self) -> None:
        self._watch()
        while True:
            frame = await self._events.recv()
            self._heard()
            try:
                event = messages.decode_event(frame)
            except MessageError as error:
                _log.warning("dropped: %s", error)
                continue
            try:
                self._handle(event)
            except Exception:
                _log.exception("an event could not be handled")

    def _handle(self, event: messages.Event) -> None:
        match event:
            case messages.Heartbeat():
                pass
            case messages.Ready(info=info):
                if not self._ready.done():
                    self._ready.set_result(info)
            case messages.Fatal(message=message):
                # A failed start is the caller's to tell: start raises it.
                _log.log(logging.ERROR if self._ready.done() else logging.DEBUG, "the engine process ends: %s", message)
                self._last_words = event
            case _:
                self._on_event(event)

    def _heard(self) -> None:
        self._last_heard = self._clock.seconds()

    def _in_loop(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def _unread(self) -> bool:
        return not self._events.closed and bool(int(self._events.get(zmq.EVENTS)) & zmq.POLLIN)

    def _watch(self) -> None:
        """Kills the process when it has been silent for too long; else looks again later."""
        if self.silence > UNRESPONSIVE_S:
            self._killed_for_silence = True
            self._kill()
        else:
            self._watchdog = self._loop.call_later(LOOK_S, self._watch)

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def ending(self, when: str = "") -> str:
        """How the process ended, in a sentence; `when` is put into it."""
        if self._killed_for_silence:
            return f"The engine process gave no sign of life for {UNRESPONSIVE_S:g} s and was ended by Penstock{when}."
        code = self._process.returncode if self._process is not None else None
        how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
        hint = " Signal 9 often means that memory ran out." if code == -9 else ""
        return f"The engine process {how}{when}.{hint}"

    def _unexplained(self) -> messages.Fatal:
        return messages.Fatal("EngineDeadError", self.ending(" before it could serve"))


def private_directory(name_chars: int = 17) -> Path:
    """A new directory that only this user may enter, with a path short enough for sockets.

    `name_chars` is how long their names in it are, with what stands before.
    """
    directory = Path(tempfile.mkdtemp(prefix="penstock-"))
    if len(str(directory)) + name_chars > _MAX_SOCKET_PATH:
        directory.rmdir()
        raise ConfigError(
            f"the temporary directory's path, {directory.parent}, is too long for a socket ({_MAX_SOCKET_PATH} "
            "characters with file names); set TMPDIR to a shorter one, for example /tmp."
        )
    return directory
