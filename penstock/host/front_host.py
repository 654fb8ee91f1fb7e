"""A host of many models whose HTTP processes are others: they are told of the models, and lease them by messages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Final

from penstock.config.cores import CoreBoard
from penstock.config.counting import together
from penstock.config.engine_stats import EngineStats
from penstock.config.errors import ModelUnavailableError, RequestError
from penstock.config.options import EngineOptions
from penstock.host import front_messages as front
from penstock.host.engine import HostedEngine, ProcessEngines, Progress
from penstock.host.entry import ModelEntry
from penstock.host.front import Front
from penstock.host.front_process import FrontProcess
from penstock.host.host import Host
from penstock.host.model_host import Lease
from penstock.host.names import Names
from penstock.host.process_client import ProcessClient

_LOOK_S: Final = 0.5  # between two looks at what changes without a word: how far loads are
_SPACING_S: Final = 0.1  # between two tellings
_log = logging.getLogger(__name__)


class FrontEngines(ProcessEngines):
    """Engines in processes of their own, of which HTTP processes are told."""

    def __init__(self, processes: Front, cores: CoreBoard | None = None) -> None:
        super().__init__()
        self._front, self._shared = processes, cores

    def engine(self, options: EngineOptions, progress: Progress) -> HostedEngine:
        watcher = self._front.engine(str(options.served_model_name))
        watcher.client = client = ProcessClient(options, on_progress=progress, watcher=watcher, cores=self._shared)
        return client


class FrontHost:
    """What HTTP processes want of a host, and what they are told of its models.

    A process holds what it was given (leases) and waits for (loads); all of that ends with it.
    """

    def __init__(self, host: Host, there: Callable[[], Collection[FrontProcess]]) -> None:
        """`there` are the processes that can be told."""
        self._host = host
        self._there = there
        self._asked: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._leases: dict[tuple[str, int], Lease] = {}
        self._told: dict[str, front.ModelTold] = {}
        self._names: Names | None = None

    @property
    def memory(self) -> int:
        """Bytes that all models may take together."""
        return self._host.memory

    async def watch(self) -> None:
        """Tells what changes; runs until it is cancelled."""
        while True:
            await self._host.changed(_LOOK_S)
            await asyncio.sleep(_SPACING_S)
            self.tell()

    def tell(self) -> None:
        """Tells all what has changed since they were told last."""
        if self._names is not self._host.names:
            self._names = self._host.names
            self._send(front.Listed(dict(self._names.sources)))
        changed = []
        for entry in self._host.entries():
            told = _told(entry)
            if self._told.get(entry.name) != told:
                self._told[entry.name] = told
                changed.append(told)
        if changed:
            self._send(front.Models(changed))

    def started(self, process: FrontProcess) -> None:
        """A process can be told of the models."""
        self.tell()
        process.tell(front.Listed(dict(self._host.names.sources)))
        process.tell(front.Models(list(self._told.values())))

    def heard(self, process: FrontProcess, message: front.Ask | front.GiveUp) -> None:
        """A process wants something, or no more."""
        key = (process.client, message.number)
        if isinstance(message, front.GiveUp):
            self._give_up(key)
        elif key not in self._asked and key not in self._leases:
            self._asked[key] = task = asyncio.create_task(self._answer(process, message))
            task.add_done_callback(lambda task: self._ended(key, task))  # also of one that never had a turn

    def left(self, process: FrontProcess) -> None:
        """A process has ended: nothing that it wanted is wanted any more."""
        for key in [key for key in (*self._asked, *self._leases) if key[0] == process.client]:
            self._give_up(key)

    async def stats(self) -> Mapping[str, EngineStats]:
        """What the engines of each model have counted, also those that are gone.

        What else is known of the models has been told before that, so that whoever asks for it is told no less than
        who asked before.
        """
        there = [entry for entry in self._host.entries() if entry.loads or entry.engine]
        known = [(entry.name, entry.past, entry.engine) for entry in there]
        now = await asyncio.gather(*(engine.stats() for _, _, engine in known if engine is not None))
        counted, found = iter(now), {}
        for name, past, engine in known:
            found[name] = past if engine is None else together(past, next(counted))
        self.tell()
        return found

    async def close(self) -> None:
        """Gives up all that is wanted."""
        tasks = list(self._asked.values())
        for key in (*self._asked, *self._leases):
            self._give_up(key)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _give_up(self, key: tuple[str, int]) -> None:
        if (task := self._asked.get(key)) is not None:
            task.cancel()
        if (lease := self._leases.pop(key, None)) is not None:
            lease.release()

    def _ended(self, key: tuple[str, int], task: asyncio.Task[None]) -> None:
        if self._asked.get(key) is task:
            del self._asked[key]

    async def _answer(self, process: FrontProcess, asked: front.Ask) -> None:
        key, refusal = (process.client, asked.number), None
        try:
            await self._do(key, asked)
        except RequestError as error:
            refusal = front.refusal(error)
        except Exception:
            _log.exception("what an HTTP process asked for failed")
            refusal = front.refusal(ModelUnavailableError("The host of the models failed; its log says why."))
        self._asked.pop(key, None)  # before it is answered: what it gave can be given up then
        self.tell()  # what is answered is known then
        process.tell(front.Answered(asked.number, refusal))

    async def _do(self, key: tuple[str, int], asked: front.Ask) -> None:
        if asked.wanted is front.Wanted.REFRESH:
            await self._host.refresh(anew=asked.anew)
            return
        source = await self._host.find(asked.model)
        match asked.wanted:
            case front.Wanted.LEASE:
                self._leases[key] = await self._host.lease(source, asked.keep_alive)
            case front.Wanted.LOAD:
                await self._host.load(source)
            case front.Wanted.BEGIN_LOAD:
                await self._host.begin_load(source)
            case front.Wanted.UNLOAD:
                await self._host.unload(source)

    def _send(self, message: front.Down) -> None:
        for process in self._there():
            process.tell(message)


def _told(entry: ModelEntry) -> front.ModelTold:
    """What HTTP processes are told of a model: a load that nobody waits for counts as one who does."""
    return front.ModelTold(
        source=entry.source,
        state=entry.state,
        uses=entry.uses,
        waiting=max(entry.waiting, int(entry.task is not None)),
        leaving=entry.leaving,
        keep_alive=entry.keep_alive,
        used_at=entry.used_at,
        expires_at=entry.expires_at,
        progress=entry.progress,
        failure=entry.failure,
        loads=entry.loads,
        planned=entry.planned,
        generates=entry.generates,
    )
