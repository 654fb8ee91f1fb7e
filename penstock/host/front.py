"""Several HTTP processes over one engine: started, told of the engine, and started again when they die."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import socket
import time
from collections.abc import Set
from dataclasses import replace
from typing import Final

import msgspec

from penstock.config.errors import ConfigError, PenstockError
from penstock.config.options import EngineOptions, ServerOptions
from penstock.core.request import EngineStats
from penstock.engine.api import EngineInfo, EngineState
from penstock.host import front_messages as front
from penstock.host.child import private_directory
from penstock.host.figures import Figures
from penstock.host.front_process import FrontProcess
from penstock.host.front_turns import TURN_S, FrontTurns
from penstock.host.process_client import ProcessClient

FIRST_DELAY_S, LAST_DELAY_S = 0.1, 5.0
MAX_FAILURES: Final = 5
_LOOK_S = 0.5
_FIGURES_S = 5.0
_LAST_WORDS_S = 5.0  # for a process to end after it was told to
_NAME_CHARS = 30  # of a process's folder and a socket in it
_log = logging.getLogger(__name__)


class Front:
    """The HTTP processes of a server, which share a listening socket.

    Attributes:
        options: the server's, as these processes have them.
    """

    def __init__(self, engine: EngineOptions, server: ServerOptions, listener: socket.socket) -> None:
        """Raises ConfigError for too long a TMPDIR."""
        self._engine, self._listener = engine, listener
        self._directory = private_directory(_NAME_CHARS)
        kept = str(self._directory / "responses") if server.responses_store == "memory" else server.responses_store
        self.options = replace(server, responses_store=kept)
        self._there: dict[str, FrontProcess] = {}
        self._places: list[asyncio.Task[None]] = []
        self._watching: asyncio.Task[None] | None = None
        self._turns: FrontTurns[FrontProcess] = FrontTurns(
            lambda process: process.tell(front.Turn()), lambda process: process.silence < TURN_S
        )
        self._serving: front.Serving | None = None
        self._stopped: front.Stopped | None = None
        self._silent = False
        self._generation = 0
        self._starts = 0
        self._have_listened = False
        self._draining = asyncio.Event()
        self._client: ProcessClient | None = None
        self._figures = Figures(self._stats, self._listening)

    def start(self, client: ProcessClient) -> None:
        """Starts all of them; `client` is the one of the engine's that is theirs."""
        self._client = client
        self._places = [asyncio.create_task(self._keep(place)) for place in range(self.options.api_server_count)]
        self._watching = asyncio.create_task(self._watch(client))

    async def failed(self) -> None:
        """Returns when all have ended, or raises why HTTP processes cannot be started."""
        assert self._watching is not None
        await asyncio.gather(*self._places, self._watching)

    # -- what the engine's client tells -------------------------------------------------------------------------------

    def serving(self, info: EngineInfo, commands: str, past: EngineStats) -> None:
        """An engine process serves."""
        self._generation += 1
        self._serving, self._silent = front.Serving(self._generation, info, commands, past), False
        for process in self._there.values():
            process.tell(self._serving)
        self._turns.begin(self._there.values())

    def died(self, worked_on: Set[str] | None) -> None:
        """It has gone."""
        self._serving = None
        self._turns.end()
        for process in self._there.values():
            process.tell(front.Died(None if worked_on is None else sorted(worked_on)))

    def unattached(self, client: str) -> None:
        """It cannot reach a process, whose requests would wait for ever: it ends, and another has its place."""
        if (process := self._there.get(client)) is not None:
            _log.error("the engine cannot reach an HTTP process, which is ended; often too few files may be open")
            self._turns.through(process)
            process.tell(front.Drain(now=True))

    def stopped(self, why: str) -> None:
        """There will be no engine any more."""
        self._stopped = front.Stopped(why)
        for process in self._there.values():
            process.tell(self._stopped)

    # -- what the processes tell --------------------------------------------------------------------------------------

    def started(self, process: FrontProcess) -> None:
        """It can be told how things are."""
        self._there[process.client] = process
        if self._stopped is not None:
            process.tell(self._stopped)
        if self._serving is not None:
            process.tell(self._serving)
            self._turns.join(process)
            if self._silent:
                process.tell(front.Silent(silent=True))
        if self._draining.is_set():
            process.tell(front.Drain())

    def heard(self, process: FrontProcess, message: front.Up) -> None:
        """One of them has sent a message."""
        match message:
            case front.Listening():
                self._have_listened = True
            case front.Through(generation=generation):
                if generation == self._generation:
                    self._turns.through(process)
            case front.AskFigures(number=number):
                self._figures.asked(process, number)
            case front.OwnFigures(counted=counted):
                self._figures.told(process, counted)

    def _left(self, process: FrontProcess) -> None:
        """A process has ended: so do its requests in the engine."""
        self._there.pop(process.client, None)
        self._figures.left(process)
        if self._client is not None:
            self._client.detach(process.client)
        self._turns.through(process)

    # -- the processes ------------------------------------------------------------------------------------------------

    async def _keep(self, place: int) -> None:
        """Keeps one of them alive."""
        delay, failures = FIRST_DELAY_S, 0
        while not self._draining.is_set():
            self._starts += 1
            process = FrontProcess(f"{place}.{self._starts}", self)
            folder, began = self._directory / process.client, time.monotonic()
            listener = self._listener.fileno()
            launch = front.FrontLaunch(self._engine, self.options, process.client, place, str(folder), listener)
            try:
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

    def _listening(self) -> list[FrontProcess]:
        return [process for process in self._there.values() if process.listens]

    async def _watch(self, client: ProcessClient) -> None:
        """Tells whether the engine is silent."""
        figures_at = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            await self._stats()  # what an engine has counted is known when it dies
            now = self._serving is not None and client.state is EngineState.RESTARTING
            if now != self._silent:
                self._silent = now
                for process in self._there.values():
                    process.tell(front.Silent(now))
            if time.monotonic() - figures_at > _FIGURES_S:
                self._figures.look()
                figures_at = time.monotonic()

    async def _stats(self) -> EngineStats:
        with contextlib.suppress(PenstockError):
            if self._client is not None:
                return await self._client.stats()
        return EngineStats()

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
        self._turns.end()
        tasks = self._places if self._watching is None else [*self._places, self._watching]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._figures.close()
        shutil.rmtree(self._directory, ignore_errors=True)
