"""Models by name, each with an engine of its own that is there while it is used and memory allows."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from penstock.config import limits
from penstock.config.errors import ModelUnavailableError, OverloadedError
from penstock.engine.api import EngineState
from penstock.engine.frontend import Frontend
from penstock.host.engine import Engines
from penstock.host.entry import ModelEntry, ModelState
from penstock.host.loading import Loading
from penstock.host.memory import MemoryBudget, Planner, plan_model
from penstock.host.model_host import KeepAlive, Lease
from penstock.host.names import Names
from penstock.host.remote import RemoteServer, RemoteServers
from penstock.host.source import ModelSource, Sources

KEEP_ALIVE_S = 300.0  # as Ollama
SLEEP_S = 3600.0  # until what a sleeping model keeps in this process is given back too
RESTART_S, _LOOK_S = 15.0, 0.05  # for which calls wait for an engine that died; between two looks at it
_NAMES_S = 1.0  # for which a list of names is believed where one is missing


class Host:
    """The ModelHost whose engines are its own. Loads models on first use within a budget of memory, and unloads those
    that have been idle the longest.

    Belongs to one event loop. Calls for a model that is not there wait for it; all of them for one load.
    """

    def __init__(
        self,
        sources: Sources,
        engines: Engines,
        memory: int,
        *,
        keep_alive: float | None = KEEP_ALIVE_S,
        plan: Planner = plan_model,
    ) -> None:
        """`memory` is what engines may take together, bytes; `keep_alive` what a model stays unless others say so."""
        self._sources = sources
        self._names = Names(sources())
        self._named_at = time.monotonic()
        self._keep_alive = keep_alive
        self._entries: dict[str, ModelEntry] = {}
        self._loading = Loading(self, engines, MemoryBudget(memory), plan)
        self._tasks: set[asyncio.Task[None]] = set()
        self._remotes = RemoteServers()
        self._closed = False

    @property
    def budget(self) -> MemoryBudget:
        return self._loading.budget

    @property
    def memory(self) -> int:
        return self.budget.total

    @property
    def names(self) -> Names:
        return self._names

    def entries(self) -> Iterator[ModelEntry]:
        yield from self._entries.values()

    def entry(self, source: ModelSource) -> ModelEntry:
        """A model's entry; what was listed anew counts from its next load on."""
        entry = self._entries.get(source.name)
        if entry is None:
            stays = self._keep_alive if source.ttl is None else source.ttl
            stays = None if source.pinned else stays
            entry = self._entries[source.name] = ModelEntry(source, stays, stays)
        elif entry.source != source and entry.engine is None and entry.task is None:
            entry.source, entry.text = source, None
        return entry

    def told(self) -> Sequence[ModelEntry]:
        return [self.entry(source) for source in self._names.sources.values()]

    async def refresh(self, *, anew: bool = False) -> None:
        if not anew and time.monotonic() - self._named_at < _NAMES_S:
            return
        self._named_at = time.monotonic()
        self._names = Names(await asyncio.to_thread(self._sources))

    async def find(self, name: str | None, draw: str = "") -> ModelSource:
        if name is not None and name not in self._names:
            await self.refresh()
        return self._names.model(name, draw)

    async def lease(self, source: ModelSource, keep_alive: KeepAlive | None = None) -> Lease:
        entry = self.entry(source)
        if not entry.usable and sum(other.waiting for other in self._entries.values()) >= limits.MAX_MODEL_WAITERS:
            message = f"{limits.MAX_MODEL_WAITERS} calls wait for models to be loaded already; try again later."
            raise OverloadedError(message, retry_after=5)
        entry.waiting += 1
        entry.cancel_timer()
        try:
            frontend = await self._ready(entry)
            if keep_alive is not None and not entry.pinned:
                entry.keep_alive = keep_alive.seconds
            return Lease(entry.name, frontend, functools.partial(self._taken, entry))
        finally:
            entry.waiting -= 1
            self.settle(entry)

    def _taken(self, entry: ModelEntry) -> Callable[[], None]:
        """A use begins; what ends it."""
        entry.uses += 1
        entry.cancel_timer()
        return functools.partial(self.released, entry)

    async def _ready(self, entry: ModelEntry) -> Frontend:
        while not (entry.usable and entry.frontend is not None and await self._recovered(entry)):
            if self._closed:
                raise ModelUnavailableError("The server is shutting down; send the request to another one.")
            if entry.state in (ModelState.READY, ModelState.LEAVING):
                await self._loading.changed()  # until the engine that is to go has gone
                continue
            entry.check_rested()
            await asyncio.wait((self._start(entry),))
            entry.check_loaded()
        return entry.frontend

    async def _recovered(self, entry: ModelEntry) -> bool:
        """Waits for an engine that died and is started again; for a while, since that may not succeed. It says how it
        is, not when that changes.

        Returns:
            whether the model is still there.
        """
        for _ in range(round(RESTART_S / _LOOK_S)):
            if entry.engine is None or entry.engine.state is not EngineState.RESTARTING:
                break
            await asyncio.sleep(_LOOK_S)
        return entry.usable and entry.frontend is not None

    def _start(self, entry: ModelEntry) -> asyncio.Task[None]:
        """The load of a model, of which there is one at a time."""
        if entry.task is not None and entry.task.done():
            self._loading.ended(entry, entry.task)
        if entry.task is None:
            entry.become(ModelState.WAITING)
            entry.cancel_timer()
            entry.task = asyncio.create_task(self._loading.load(entry))
            entry.task.add_done_callback(functools.partial(self._loading.ended, entry))
        return entry.task

    async def load(self, source: ModelSource) -> ModelEntry:
        entry = self.entry(source)
        if entry.state is ModelState.FAILED:
            entry.rest_again()
        (await self.lease(source)).release()
        return entry

    async def changed(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._loading.changed()

    def start_load(self, source: ModelSource) -> ModelEntry:
        """Begins to load a model; `entry.state` tells how that goes."""
        entry = self.entry(source)
        if entry.state is ModelState.FAILED:
            entry.rest_again()
        if entry.state in (ModelState.UNLOADED, ModelState.ASLEEP, ModelState.FAILED):
            self._start(entry)
            entry.asked = True
        return entry

    async def begin_load(self, source: ModelSource) -> ModelEntry:
        return self.start_load(source)

    async def unload(self, source: ModelSource) -> ModelEntry:
        entry = self.entry(source)
        entry.asked = False
        if entry.task is not None:
            task = entry.task
            self._loading.call_off(task)
            await asyncio.wait((task,))
            self._loading.ended(entry, task)
        if entry.state is ModelState.READY:
            entry.leaving = True
            self.settle(entry)
        while entry.leaving or entry.state is ModelState.LEAVING:
            await self._loading.changed()
        self._forget(entry)
        return entry

    def released(self, entry: ModelEntry) -> None:
        """A use has ended."""
        entry.uses -= 1
        entry.used_at = time.monotonic()
        self.settle(entry)

    def settle(self, entry: ModelEntry) -> None:
        """Decides what becomes of a model that somebody has left, or that is to leave."""
        self._loading.tell()
        if entry.uses or entry.state is not ModelState.READY or self._closed:
            return
        if entry.leaving or (entry.keep_alive == 0 and entry.idle):
            self.put_away(entry)
        elif entry.idle and entry.keep_alive is not None:
            self._set_timer(entry, entry.keep_alive)

    def put_away(self, entry: ModelEntry) -> None:
        """Ends a model's engine; it sleeps."""
        if entry.state is ModelState.READY:
            entry.become(ModelState.LEAVING)
            self._run(self._loading.put_away(entry))

    def slept(self, entry: ModelEntry) -> None:
        """An engine has been ended: after a while what was kept for the next is given back too."""
        if entry.state is ModelState.ASLEEP:
            self._set_timer(entry, SLEEP_S)

    def lost(self, entry: ModelEntry) -> None:
        """An engine died and could not be started again."""
        if entry.state is ModelState.READY:
            entry.become(ModelState.LEAVING)
            self._run(self._loading.put_away(entry, f"{entry.name} stopped and could not be started again."))

    def _set_timer(self, entry: ModelEntry, seconds: float) -> None:
        entry.cancel_timer()
        entry.expires_at = time.monotonic() + seconds
        entry.timer = asyncio.get_running_loop().call_later(seconds, self._expired, entry)

    def _expired(self, entry: ModelEntry) -> None:
        entry.timer, entry.expires_at = None, None
        if entry.state is ModelState.ASLEEP:
            self._forget(entry)
        elif entry.idle:
            self.put_away(entry)

    def _forget(self, entry: ModelEntry) -> None:
        """What a model kept here beside its engine is given back."""
        if entry.state in (ModelState.ASLEEP, ModelState.FAILED):
            entry.become(ModelState.UNLOADED)
            entry.cancel_timer()
            entry.text = None

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def remote(self, source: ModelSource) -> RemoteServer | None:
        return self._remotes.of(source)

    @property
    def has_remotes(self) -> bool:
        return self._names.has_remotes

    def load_pinned(self) -> None:
        """Begins to load the models that are always there."""
        for source in self._names.sources.values():
            if source.pinned and source.options is not None:
                self.start_load(source)

    def shares(self) -> Mapping[str, int]:
        """Bytes held, by model."""
        return self.budget.held

    async def close(self) -> None:
        """Ends all engines; who waits is refused."""
        self._closed = True
        tasks = [entry.task for entry in self._entries.values() if entry.task is not None]
        for task in tasks:
            self._loading.call_off(task)
        await asyncio.gather(*tasks, return_exceptions=True)
        for entry in self._entries.values():
            entry.cancel_timer()
            self.put_away(entry)
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))
        self._loading.tell()
        await self._remotes.aclose()
