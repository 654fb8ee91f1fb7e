"""Several HTTP processes over one engine or many: started, told of engines, and started again when they die."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from typing import Final, Protocol

import msgspec

from penstock.config.engine_stats import EngineStats
from penstock.config.errors import ConfigError, PenstockError
from penstock.config.options import EngineOptions, ServerOptions
from penstock.host import front_messages as front
from penstock.host.accounts import Accounts
from penstock.host.child import private_directory
from penstock.host.figures import Figures
from penstock.host.front_engine import FrontEngine
from penstock.host.front_process import FrontProcess

FIRST_DELAY_S, LAST_DELAY_S = 0.1, 5.0
MAX_FAILURES: Final = 5
_LOOK_S = 0.5
_FIGURES_S = 5.0
_LAST_WORDS_S = 5.0  # for a process to end after it was told to
_NAME_CHARS = 30  # of a process's folder and a socket in it
_log = logging.getLogger(__name__)

Stats = Callable[[], Awaitable[Mapping[str, EngineStats]]]
"""Gives what engines have counted, by model, also those that are gone."""


async def _none_counted() -> Mapping[str, EngineStats]:
    return {}


class Hosted(Protocol):
    """A host of many models, as its HTTP processes have part in it."""

    @property
    def memory(self) -> int:
        """Bytes that all its models may take together."""

    def started(self, process: FrontProcess) -> None:
        """A process can be told of the models."""

    def heard(self, process: FrontProcess, message: front.Ask | front.GiveUp) -> None:
        """A process wants something."""

    def left(self, process: FrontProcess) -> None:
        """A process has ended, and with it all it wanted."""


class Front:
    """The HTTP processes of a server, which share a listening socket.

    Attributes:
        options: the server's, as these processes have them.
        hosted: the host of many models that they have part in; None where there is one engine. Set before `start`.
    """

    def __init__(self, engine: EngineOptions | None, server: ServerOptions, listener: socket.socket) -> None:
        """`engine` are the options of the one engine there is, None where there are many. Raises ConfigError for too
        long a TMPDIR.
        """
        self._engine, self._listener = engine, listener
        self._directory = private_directory(_NAME_CHARS)
        kept = str(self._directory / "responses") if server.responses_store == "memory" else server.responses_store
        self.options = replace(server, responses_store=kept)
        self.hosted: Hosted | None = None
        self._there: dict[str, FrontProcess] = {}
        self._places: list[asyncio.Task[None]] = []
        self._watching: asyncio.Task[None] | None = None
        self._engines: dict[str, FrontEngine] = {}
        self._starts = 0
        self._have_listened = False
        self._draining = asyncio.Event()
        self._stats: Stats = _none_counted
        self._figures = Figures(self._counted, self._listening)
        self._accounts = Accounts(self._listening)

    def start(self, stats: Stats) -> None:
        """Starts all of them; `stats` gives what engines have counted, by model."""
        self._stats = stats
        self._places = [asyncio.create_task(self._keep(place)) for place in range(self.options.api_server_count)]
        self._watching = asyncio.create_task(self._watch())

    async def failed(self) -> None:
        """Returns when all have ended, or raises why HTTP processes cannot be started."""
        assert self._watching is not None
        await asyncio.gather(*self._places, self._watching)

    def engine(self, model: str = "") -> FrontEngine:
        """What the client of an engine tells of that: of the one there is, or of that of a host's model."""
        if model not in self._engines:
            self._engines[model] = FrontEngine(model, self.processes)
        return self._engines[model]

    def processes(self) -> Collection[FrontProcess]:
        """Those that can be told something."""
        return self._there.values()

    # -- what the processes tell --------------------------------------------------------------------------------------

    def started(self, process: FrontProcess) -> None:
        """It can be told how things are."""
        self._there[process.client] = process
        if self.hosted is not None:
            self.hosted.started(process)
        for engine in self._engines.values():
            engine.started(process)
        if self._draining.is_set():
            process.tell(front.Drain())

    def heard(self, process: FrontProcess, message: front.Up) -> None:
        """One of them has sent a message."""
        match message:
            case front.Listening():
                self._have_listened = True
            case front.Through(generation=generation, model=model):
                if model in self._engines:
                    self._engines[model].through(process, generation)
            case front.AskFigures(number=number):
                self._figures.asked(process, number)
            case front.OwnFigures(counted=counted):
                self._figures.told(process, counted)
            case front.AskRequests():
                self._accounts.asked(process, message)
            case front.OwnRequests():
                self._accounts.told(process, message)
            case front.Ask() | front.GiveUp():
                if self.hosted is not None:
                    self.hosted.heard(process, message)

    def _left(self, process: FrontProcess) -> None:
        """A process has ended: so do its requests in the engines."""
        self._there.pop(process.client, None)
        self._figures.left(process)
        self._accounts.left(process)
        if self.hosted is not None:
            self.hosted.left(process)
        for engine in self._engines.values():
            engine.left(process)

    # -- the processes ------------------------------------------------------------------------------------------------

    async def _keep(self, place: int) -> None:
        """Keeps one of them alive."""
        delay, failures = FIRST_DELAY_S, 0
        while not self._draining.is_set():
            self._starts += 1
            process = FrontProcess(f"{place}.{self._starts}", self)
            folder, began = self._directory / process.client, time.monotonic()
            listener = self._listener.fileno()
            memory = 0 if self.hosted is None else self.hosted.memory
            launch = front.FrontLaunch(self._engine, self.options, process.client, place, str(folder), listener, memory)
            try:
                self._make_directory()
                ended = await process.run(launch)
            except OSError as error:  # no memory, no descriptor: others go on
                ended = f"could not be started: {error}"
            except (PenstockError, msgspec.MsgspecError) as error:
                ended = f"said what cannot be read: {error}"
            finally:
                self._left(process)
            if self._draining.is_set():
                return
            if process.why is not None and not self._have_listened:
                raise ConfigError(process.why)
            failures = 0 if process.listens else failures + 1
            delay = FIRST_DELAY_S if time.monotonic() - began > LAST_DELAY_S else min(2 * delay, LAST_DELAY_S)
            _log.error("an HTTP process %s%s; it is started again.", ended, f" ({process.why})" if process.why else "")
            if failures >= MAX_FAILURES and not self._listening():
                raise ConfigError("HTTP processes cannot be started; what they logged says why.")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._draining.wait(), delay)

    def _make_directory(self) -> None:
        """Makes the directory again where somebody has removed it; raises OSError where that is not possible."""
        if not self._directory.is_dir():
            self._directory.parent.mkdir(parents=True, exist_ok=True)
            self._directory.mkdir(mode=0o700)  # not one that somebody else has made

    def _listening(self) -> list[FrontProcess]:
        return [process for process in self._there.values() if process.listens]

    async def _watch(self) -> None:
        """Tells whether engines are silent."""
        figures_at = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            await self._counted()  # what an engine has counted is known when it dies
            for engine in self._engines.values():
                engine.look()
            if time.monotonic() - figures_at > _FIGURES_S:
                self._figures.look()
                figures_at = time.monotonic()

    async def _counted(self) -> Mapping[str, EngineStats]:
        return await self._stats()

    async def drain(self, timeout: float, now: asyncio.Event) -> None:
        """Has all of them finish what they answer, and end; when `now` is set they end at once."""
        self._draining.set()
        for process in self._there.values():
            process.tell(front.Drain())
        if not self._places:
            return
        keeping, hurried = asyncio.ensure_future(asyncio.wait(self._places)), asyncio.ensure_future(now.wait())
        await asyncio.wait((keeping, hurried), timeout=timeout + _LAST_WORDS_S, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        for process in self._there.values():
            process.tell(front.Drain(now=True))
        await asyncio.wait((keeping,), timeout=_LAST_WORDS_S)

    async def close(self) -> None:
        """Ends all of them."""
        self._draining.set()
        for engine in self._engines.values():
            engine.close()
        tasks = self._places if self._watching is None else [*self._places, self._watching]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._figures.close()
        await self._accounts.close()
        shutil.rmtree(self._directory, ignore_errors=True)
