"""Models by name, each with an engine of its own that is there while it is used and memory allows."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from penstock.config import limits
from penstock.config.errors import ConfigError, ModelUnavailableError, OverloadedError
from penstock.engine.api import EngineState
from penstock.engine.frontend import Frontend
from penstock.host.engine import Engines
from penstock.host.entry import ModelEntry, ModelState
from penstock.host.loading import Loading
from penstock.host.memory import MemoryBudget, Planner, plan_model
from penstock.host.names import Names
from penstock.host.remote import RemoteServer
from penstock.host.source import ModelSource, Sources

KEEP_ALIVE_S = 300.0  # as Ollama
SLEEP_S = 3600.0  # until what a sleeping model keeps in this process is given back too
RESTART_S, _LOOK_S = 15.0, 0.05  # for which calls wait for an engine that died; between two looks at it
_NAMES_S = 1.0  # for which a list of names is believed where one is missing


class Lease:
    """One use of a loaded model, which is not unloaded while there are any.

    Attributes:
        frontend: what serves it.
    """

    __slots__ = ("_entry", "_host", "_released", "frontend")

    def __init__(self, host: Host, entry: ModelEntry, frontend: Frontend) -> None:
        self._host, self._entry = host, entry
        self.frontend = frontend
        self._released = False
        entry.uses += 1
        entry.cancel_timer()

    @property
    def name(self) -> str:
        return self._entry.name

    def again(self) -> Lease:
        """Another use of the same, for work that goes on after this one."""
        if self._released:
            raise ValueError(f"the lease of {self.name} has been released")
        return Lease(self._host, self._entry, self.frontend)

    def release(self) -> None:
        """Ends the use; safe to call twice."""
        if not self._released:
            self._released = True
            self._host.released(self._entry)


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """How long a model stays after its last use, as a caller says: seconds, 0 for no longer, None for ever."""

    seconds: float | None


class Host:
    """Loads models on first use within a budget of memory, and unloads those that have been idle the longest.

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
        self._remotes: dict[str, tuple[ModelSource, RemoteServer]] = {}
        self._closed = False

    @property
    def budget(self) -> MemoryBudget:
        return self._loading.budget

    @property
    def names(self) -> Names:
        """As they were listed last."""
        return self._names

    def entries(self) -> Iterator[ModelEntry]:
        """Every model that was ever used here."""
        yield from self._entries.values()

    def entry(self, source: ModelSource) -> ModelEntry:
        """A model's entry; what was listed anew counts from its next load on."""
        entry = self._entries.get(source.name)
        if entry is None:
            stays = self._keep_alive if source.ttl is None else source.ttl
            stays = None if source.pinned else stays
            entry = self._entries[source.name] = ModelEntry(source, stays, stays)
        elif entry.source != source and entry.engine is None:
            entry.source = source
        return entry

    def told(self) -> Sequence[ModelEntry]:
        """Every model, in the order of the list; of those not used yet an entry as it would be."""
        return [self.entry(source) for source in self._names.sources.values()]

    async def refresh(self, *, anew: bool = False) -> None:
        """Lists the models anew; unless that is known to be needed, not if it was done just now."""
        if not anew and time.monotonic() - self._named_at < _NAMES_S:
            return
        self._named_at = time.monotonic()
        self._names = Names(await asyncio.to_thread(self._sources))

    async def find(self, name: str | None, draw: str = "") -> ModelSource:
        """The model that a call means.

        Raises:
            RequestError: as `Names.model`.
        """
        if name is not None and name not in self._names:
            await self.refresh()
        return self._names.model(name, draw)

    async def lease(self, source: ModelSource, keep_alive: KeepAlive | None = None) -> Lease:
        """A use of a model, once it is loaded. Cancel it to wait no longer.

        Raises:
            ModelUnavailableError: it could not be loaded, now or just before, or is served elsewhere.
            OverloadedError: too many calls wait for models already.
        """
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
            return Lease(self, entry, frontend)
        finally:
            entry.waiting -= 1
            self.settle(entry)

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
        """Loads a model without using it; one whose last load failed is tried at once.

        Raises:
            ModelUnavailableError: it could not be loaded.
        """
        entry = self.entry(source)
        if entry.state is ModelState.FAILED:
            entry.rest_again()
        (await self.lease(source)).release()
        return entry

    async def changed(self, seconds: float) -> None:
        """Returns when something has changed, after so many seconds at the latest."""
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

    async def unload(self, source: ModelSource) -> ModelEntry:
        """Ends a model's engine once nobody uses it, and forgets what it kept; returns when it has gone."""
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

    def expires_in(self, name: str) -> float | None:
        """Seconds until a model that is loaded will sleep, as far as is known; None for never."""
        entry = self._entries.get(name)
        if entry is None or entry.state is not ModelState.READY or entry.keep_alive is None:
            return None
        return entry.keep_alive if entry.expires_at is None else max(0.0, entry.expires_at - time.monotonic())

    def remote(self, source: ModelSource) -> RemoteServer | None:
        """What hands calls for a model on; None for one that is loaded here.

        Raises:
            ModelUnavailableError: its key is missing.
        """
        if source.remote is None:
            return None
        known = self._remotes.get(source.name)
        if known is None or known[0] != source:
            try:
                known = self._remotes[source.name] = (source, RemoteServer(source, source.remote))
            except ConfigError as error:
                raise ModelUnavailableError(f"{source.name} cannot be asked: {error}", code="remote_key") from None
        return known[1]

    @property
    def has_remotes(self) -> bool:
        """Whether any model is served elsewhere."""
        return any(source.remote is not None for source in self._names.sources.values())

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
        for _, remote in self._remotes.values():
            await remote.aclose()
