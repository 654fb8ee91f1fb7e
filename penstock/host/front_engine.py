"""One engine of those that several HTTP processes are clients of: what they are told of it, and whose turn it is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Set

from penstock.config.engine_stats import EngineStats
from penstock.engine.api import EngineInfo, EngineState
from penstock.host import front_messages as front
from penstock.host.front_process import FrontProcess
from penstock.host.front_turns import TURN_S, FrontTurns
from penstock.host.process_client import ProcessClient

_log = logging.getLogger(__name__)


class FrontEngine:
    """Watches one engine for HTTP processes.

    Attributes:
        client: the host's own client of it; None before there is one.
    """

    def __init__(self, model: str, there: Callable[[], Collection[FrontProcess]]) -> None:
        """`model` is its name among the engines, `there` the processes that can be told."""
        self.client: ProcessClient | None = None
        self._model = model
        self._there = there
        self._turns: FrontTurns[FrontProcess] = FrontTurns(
            lambda process: process.tell(front.Turn(model)), lambda process: process.silence < TURN_S
        )
        self._serving: front.Serving | None = None
        self._stopped: front.Stopped | None = None
        self._silent = False
        self._generation = 0

    # -- what the engine's client tells -------------------------------------------------------------------------------

    def serving(self, info: EngineInfo, commands: str, past: EngineStats) -> None:
        """An engine process serves."""
        self._generation += 1
        self._serving = front.Serving(self._generation, info, commands, past, self._model)
        self._silent, self._stopped = False, None
        self._tell(self._serving)
        self._turns.begin(self._there())

    def died(self, worked_on: Set[str] | None) -> None:
        """It has gone."""
        self._serving = None
        self._turns.end()
        self._tell(front.Died(None if worked_on is None else sorted(worked_on), self._model))

    def unattached(self, client: str) -> None:
        """It cannot reach a process, whose requests would wait for ever: it ends, and another has its place."""
        for process in self._there():
            if process.client == client:
                _log.error("the engine cannot reach an HTTP process, which is ended; often too few files may be open")
                self._turns.through(process)
                process.tell(front.Drain(now=True))

    def stopped(self, why: str) -> None:
        """There will be no engine any more, unless a host starts another one."""
        self._serving, self._stopped = None, front.Stopped(why, self._model)
        self._turns.end()
        self._tell(self._stopped)

    # -- the processes ------------------------------------------------------------------------------------------------

    def started(self, process: FrontProcess) -> None:
        """A process can be told how things are."""
        if self._stopped is not None:
            process.tell(self._stopped)
        if self._serving is not None:
            process.tell(self._serving)
            self._turns.join(process)
            if self._silent:
                process.tell(front.Silent(silent=True, model=self._model))

    def through(self, process: FrontProcess, generation: int) -> None:
        """The requests of a process have gone on in the engine of this number."""
        if generation == self._generation:
            self._turns.through(process)

    def left(self, process: FrontProcess) -> None:
        """A process has ended: so do its requests."""
        if self.client is not None:
            self.client.detach(process.client)
        self._turns.through(process)

    def look(self) -> None:
        """Tells whether the engine is silent, if that has changed."""
        restarting = self.client is not None and self.client.state is EngineState.RESTARTING
        silent = self._serving is not None and restarting
        if silent != self._silent:
            self._silent = silent
            self._tell(front.Silent(silent, self._model))

    def close(self) -> None:
        """Nobody is told anything any more."""
        self._turns.end()

    def _tell(self, message: front.Down) -> None:
        for process in self._there():
            process.tell(message)
