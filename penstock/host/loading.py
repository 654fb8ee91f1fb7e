"""Loading and putting away: engines are started in the order they were asked for, within the budget of memory."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.config.counting import ended, together
from penstock.config.engine_stats import EngineStats
from penstock.config.errors import EngineDeadError, MemoryPlanError, ModelUnavailableError, PenstockError
from penstock.config.options import EngineOptions
from penstock.engine.frontend import Frontend
from penstock.engine.text_pipeline import TextPipeline
from penstock.host.engine import Engines, HostedEngine, Progress
from penstock.host.entry import ModelEntry, ModelState
from penstock.host.memory import MemoryBudget, ModelPlan, Planner
from penstock.startup.memory_plan import format_bytes

if TYPE_CHECKING:
    from penstock.host.host import Host

STARTS = 3  # of an engine whose process dies before it serves
_log = logging.getLogger(__name__)


class Loading:
    """Starts and ends the engines of a host's models.

    Attributes:
        budget: who holds how much memory: taken before an engine starts, given back when its process has ended.
    """

    def __init__(self, host: Host, engines: Engines, budget: MemoryBudget, plan: Planner) -> None:
        self._host = host
        self._engines, self._plan = engines, plan
        self.budget = budget
        self._turn = asyncio.Lock()  # of those who wait for memory: who came first gets it first
        self._news = asyncio.Event()
        self._watchers: dict[str, asyncio.Task[None]] = {}

    def tell(self) -> None:
        """Wakes all who wait for something to change."""
        self._news.set()
        self._news = asyncio.Event()

    async def changed(self) -> None:
        """Returns when a model was taken, left, loaded or put away."""
        await self._news.wait()

    async def load(self, entry: ModelEntry) -> None:
        """Loads a WAITING model; how that ended is its state."""
        began = time.monotonic()
        try:
            await self._load(entry)
        except asyncio.CancelledError:
            await self._undo(entry)
            raise
        except Exception as error:
            await self._undo(entry)
            entry.failed(_sentence(entry, error))
            if not isinstance(error, PenstockError):
                _log.exception("%s could not be loaded", entry.name)
            else:
                _log.error("%s could not be loaded: %s", entry.name, error)
        else:
            entry.loads += 1
            entry.loaded_at = entry.used_at = time.monotonic()
            entry.rest_again()
            entry.become(ModelState.READY)
            _log.info("%s is loaded: %.2f s, %s", entry.name, entry.loaded_at - began, format_bytes(entry.planned))
            self._host.settle(entry)

    @staticmethod
    def call_off(task: asyncio.Task[None]) -> None:
        """Cancels a load, once: it is undone then, whoever else calls it off."""
        if not task.cancelling():
            task.cancel()

    def ended(self, entry: ModelEntry, task: asyncio.Task[None]) -> None:
        """A load has ended, of which not even the first line ran if it was cancelled before its first turn."""
        if entry.task is not task:
            return
        entry.task = None
        if entry.state in (ModelState.WAITING, ModelState.LOADING):
            entry.become(ModelState.UNLOADED)
        entry.asked = False
        self.tell()

    async def _load(self, entry: ModelEntry, again: bool = False) -> None:
        """Loads a model; `again`, planned anew, where its engine did not fit into what an earlier start had taken:
        another process may have kept one of its own between the plan and the engine's start.
        """
        if entry.source.options is None:
            raise ModelUnavailableError(f"{entry.name} is served elsewhere; it is not loaded here.")
        options = replace(entry.source.options, served_model_name=entry.name)
        pinned = sum(bytes for name, bytes in self.budget.held.items() if self._stays(name, entry))
        options, planned = await asyncio.to_thread(self._planned, options, self.budget.total - pinned)
        await self._make_room(entry, planned)
        if not again:
            entry.become(ModelState.LOADING)
        entry.planned, entry.progress = planned.total_bytes, (0, 0)

        def progress(done: int, total: int) -> None:
            entry.progress = (done, total)

        options = replace(options, memory=planned.engine_bytes)
        reading = asyncio.ensure_future(self._text(entry, options))
        try:
            engine = await self._started(entry, options, progress)
            entry.text = await reading
        except MemoryPlanError as error:
            if again or not planned.exact:
                raise
            _log.info("%s is planned again: %s", entry.name, error)
            reading.cancel()
            await self._undo(entry)
            await self._load(entry, again=True)
            return
        finally:
            reading.cancel()
        entry.generates = entry.text.pooling.generates
        entry.frontend = Frontend(engine, entry.text, served_name=entry.name, seed=options.seed)
        self._watchers[entry.name] = asyncio.create_task(self._watch(entry, engine))

    async def _started(self, entry: ModelEntry, options: EngineOptions, progress: Progress) -> HostedEngine:
        """An engine that serves. One whose process died on the way, for which the model may not be to blame, is started
        again.
        """
        for left in reversed(range(STARTS)):
            engine = entry.engine = self._engines.engine(options, progress)
            try:
                await engine.start()
            except EngineDeadError as error:
                if not left:
                    raise
                _log.warning("%s: %s It is started again.", entry.name, error)
                await engine.close()
            else:
                return engine
        raise AssertionError("unreachable")  # the last start returns or raises

    def _planned(self, options: EngineOptions, room: int) -> tuple[EngineOptions, ModelPlan]:
        options = self._engines.options(options)
        return options, self._plan(options, room)

    async def _text(self, entry: ModelEntry, options: EngineOptions) -> TextPipeline:
        return entry.text if entry.text is not None else await asyncio.to_thread(self._engines.text, options)

    def _stays(self, name: str, wanted: ModelEntry) -> bool:
        """Whether a model keeps its memory whatever `wanted` needs."""
        return any(entry.name == name and entry.pinned and entry is not wanted for entry in self._host.entries())

    async def _make_room(self, entry: ModelEntry, planned: ModelPlan) -> None:
        """Takes the memory a model needs, once it is free: idle models are put away, those in use as they are left.

        Raises:
            ModelUnavailableError: pinned models hold it.
        """
        wanted = planned.total_bytes
        async with self._turn:
            while self.budget.free < wanted:
                if entry.idle and not entry.asked:
                    raise asyncio.CancelledError  # whoever waited has left
                self._check_possible(entry, wanted)
                victim = self._victim(entry)
                if victim is not None:
                    victim.leaving = True
                    self._host.settle(victim)
                await self.changed()
            self.budget.take(entry.name, wanted)

    def _check_possible(self, entry: ModelEntry, wanted: int) -> None:
        stays = {name: size for name, size in self.budget.held.items() if self._stays(name, entry)}
        if wanted <= self.budget.total - sum(stays.values()):
            return
        raise ModelUnavailableError(
            f"{entry.name} needs {format_bytes(wanted)}; models that are pinned ({', '.join(stays)}) leave "
            f"{format_bytes(self.budget.total - sum(stays.values()))} of {format_bytes(self.budget.total)}. Unload "
            "one of them, or start the server with more --memory."
        )

    def _victim(self, wanted: ModelEntry) -> ModelEntry | None:
        """The model to put away: the one idle the longest, else the one in use that was taken the longest ago; None
        where one is leaving already, or those there are have not been used yet by those who waited for them.
        """
        there = [entry for entry in self._host.entries() if entry.state is ModelState.READY and entry is not wanted]
        if any(entry.leaving for entry in there) or any(
            entry.state is ModelState.LEAVING for entry in self._host.entries()
        ):
            return None
        may = [entry for entry in there if not entry.pinned and (entry.uses or entry.idle)]
        return min(may, key=lambda entry: (not entry.idle, entry.used_at), default=None)

    async def _watch(self, entry: ModelEntry, engine: HostedEngine) -> None:
        await engine.given_up()
        self._host.lost(entry)

    async def _undo(self, entry: ModelEntry) -> None:
        """Ends what a load had begun: to the end, however often whoever waits is cancelled."""
        ending = asyncio.ensure_future(self._end(entry))
        while not ending.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((ending,))
        ending.result()

    async def _end(self, entry: ModelEntry) -> None:
        watcher = self._watchers.pop(entry.name, None)
        if watcher is not None:
            watcher.cancel()
        engine, entry.frontend = entry.engine, None
        try:
            if engine is not None:
                counted = await engine.stats() if entry.state is ModelState.LEAVING else EngineStats()
                entry.engine, entry.past = None, ended(together(entry.past, counted))  # at once: no figure goes back
                await engine.close()
        except Exception:  # whatever it was, the model must not stay on its way out for ever
            _log.exception("the engine of %s did not end as it should", entry.name)
        finally:
            entry.engine = None
            self.budget.give_back(entry.name)
            entry.planned = 0

    async def put_away(self, entry: ModelEntry, failure: str = "") -> None:
        """Ends the engine of a LEAVING model, which sleeps then, or has failed with this sentence."""
        await self._undo(entry)
        entry.leaving, entry.keep_alive = False, entry.stays
        if failure:
            entry.failed(failure)
        else:
            entry.become(ModelState.ASLEEP)
            self._host.slept(entry)
        _log.info("%s is %s", entry.name, entry.state.value)
        self.tell()


def _sentence(entry: ModelEntry, error: Exception) -> str:
    """Why a model could not be loaded, for clients: no paths, and nothing of what was not foreseen."""
    if isinstance(error, ModelUnavailableError):
        return str(error)
    told = isinstance(error, PenstockError) and not isinstance(error, EngineDeadError)
    why = str(error) if told else "its engine could not be started; the server's log says why."
    path = entry.source.options.model if entry.source.options is not None else ""
    if path:
        why = why.replace(str(path), entry.name)
    kind = "does not fit" if isinstance(error, MemoryPlanError) else "could not be loaded"
    return f"The model {entry.name} {kind}: {why}"
