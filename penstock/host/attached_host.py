"""A host of many models that is another process: what an HTTP process knows of it and asks of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from penstock.config.counting import together
from penstock.config.engine_stats import EngineStats
from penstock.config.errors import ModelUnavailableError
from penstock.config.options import EngineOptions
from penstock.engine.frontend import Frontend
from penstock.engine.text_pipeline import TextPipeline
from penstock.host import front_messages as front
from penstock.host.attached_client import AttachedClient
from penstock.host.engine import ProcessEngines
from penstock.host.entry import ModelEntry, ModelState
from penstock.host.model_host import KeepAlive, Lease
from penstock.host.names import Names
from penstock.host.remote import RemoteServer, RemoteServers
from penstock.host.source import ModelSource

Tell = Callable[[front.Up], None]
_log = logging.getLogger(__name__)


class AttachedHost:
    """The ModelHost of an HTTP process: entries are as they were told last, and text sides its own, read when used."""

    def __init__(
        self, launch: front.FrontLaunch, tell: Tell, text: Callable[[EngineOptions], TextPipeline] | None = None
    ) -> None:
        """`tell` sends the host a message; `text` reads the text side of a model, and takes a while."""
        self.memory = launch.memory
        self._launch, self._tell = launch, tell
        self._read_text = text or _read_text
        self._names = Names({})
        self._entries: dict[str, ModelEntry] = {}
        self._clients: dict[str, AttachedClient] = {}
        self._own: dict[str, EngineStats] = {}  # of clients that are gone
        self._reading: dict[str, asyncio.Task[TextPipeline]] = {}
        self._answers: dict[int, asyncio.Future[front.Refusal | None]] = {}
        self._number = 0
        self._news = asyncio.Event()
        self._remotes = RemoteServers()

    # -- what the host tells ------------------------------------------------------------------------------------------

    async def heard(self, told: front.OfEngine | front.OfHost) -> None:
        """The host has told something."""
        match told:
            case front.Listed(sources=sources):
                self._names = Names(sources)
            case front.Models(told=models):
                for model in models:
                    self._know(model)
            case front.Answered(number=number, refusal=refusal):
                if (answer := self._answers.pop(number, None)) is not None and not answer.done():
                    answer.set_result(refusal)
            case front.Stopped(model=name, why=why):
                await self._stopped(name, why)
            case _:
                await self._client(told.model).heard(told)
        self._news.set()
        self._news = asyncio.Event()

    def _know(self, told: front.ModelTold) -> None:
        entry = self.entry(told.source)
        unloaded = told.state is ModelState.UNLOADED and entry.state is not ModelState.UNLOADED
        if unloaded:
            entry.text = None
        if told.source != entry.source:  # whose text side is another
            entry.text = None
            self._reading.pop(entry.name, None)
        entry.source = told.source
        entry.state = told.state
        entry.uses, entry.waiting = told.uses, told.waiting
        entry.leaving = told.leaving
        entry.keep_alive = told.keep_alive
        entry.used_at, entry.expires_at = told.used_at, told.expires_at
        entry.progress = told.progress
        entry.failure = told.failure
        entry.loads, entry.planned = told.loads, told.planned
        entry.generates = told.generates

    def _client(self, name: str) -> AttachedClient:
        if name not in self._clients:
            options = self._launch.server
            self._clients[name] = client = AttachedClient(
                self._launch.client,
                Path(self._launch.folder),
                self._tell,
                model=name,
                max_queue_seconds=options.max_queue_seconds,
                processes=options.api_server_count,
            )
            self._named(name).engine = client
        return self._clients[name]

    def _named(self, name: str) -> ModelEntry:
        source = self._names.sources.get(name)
        return self.entry(ModelSource(name) if source is None else source)

    async def _stopped(self, name: str, why: str) -> None:
        """A model has no engine any more."""
        client = self._clients.pop(name, None)
        if client is None:
            return
        entry = self._named(name)
        entry.engine = entry.frontend = None
        client.stopped(why)
        counted = EngineStats(resumed=client.own().resumed)
        self._own[name] = together(self._own.get(name, EngineStats()), counted)
        await client.close()

    def own(self) -> Mapping[str, EngineStats]:
        """What this process knows of its requests, which no engine counts, by model."""
        found = dict(self._own)
        for name, client in self._clients.items():
            found[name] = together(found.get(name, EngineStats()), client.own())
        return found

    # -- the models, for this process ---------------------------------------------------------------------------------

    @property
    def names(self) -> Names:
        return self._names

    @property
    def has_remotes(self) -> bool:
        return self._names.has_remotes

    def entries(self) -> Iterator[ModelEntry]:
        yield from self._entries.values()

    def entry(self, source: ModelSource) -> ModelEntry:
        if source.name not in self._entries:
            self._entries[source.name] = ModelEntry(source, None, None)
        return self._entries[source.name]

    def told(self) -> Sequence[ModelEntry]:
        return [self.entry(source) for source in self._names.sources.values()]

    def remote(self, source: ModelSource) -> RemoteServer | None:
        return self._remotes.of(source)

    async def refresh(self, *, anew: bool = False) -> None:
        await self._ask(front.Wanted.REFRESH, anew=anew)

    async def find(self, name: str | None, draw: str = "") -> ModelSource:
        if name is not None and name not in self._names:
            await self.refresh()
        return self._names.model(name, draw)

    async def lease(self, source: ModelSource, keep_alive: KeepAlive | None = None) -> Lease:
        entry = self.entry(source)
        if entry.frontend is None:
            self._text(entry)  # is read while the model loads
        try:
            grant = _Grant(self, await self._ask(front.Wanted.LEASE, source.name, keep_alive))
        except BaseException:
            if entry.state in (ModelState.UNLOADED, ModelState.FAILED):
                entry.text = None
            raise
        try:
            return Lease(entry.name, await self._frontend(entry), grant.begin)
        except BaseException:
            self.give_up(grant.number)
            raise

    async def load(self, source: ModelSource) -> ModelEntry:
        await self._ask(front.Wanted.LOAD, source.name)
        return self.entry(source)

    async def begin_load(self, source: ModelSource) -> ModelEntry:
        await self._ask(front.Wanted.BEGIN_LOAD, source.name)
        return self.entry(source)

    async def unload(self, source: ModelSource) -> ModelEntry:
        await self._ask(front.Wanted.UNLOAD, source.name)
        return self.entry(source)

    async def changed(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    def give_up(self, number: int) -> None:
        """What was asked under this number is wanted no more."""
        self._tell(front.GiveUp(number))

    async def close(self) -> None:
        """Ends what runs, and hangs up."""
        for answer in self._answers.values():
            answer.cancel()
        reading = list(self._reading.values())
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        for client in self._clients.values():
            await client.close()
        await self._remotes.aclose()

    async def _ask(
        self, wanted: front.Wanted, name: str = "", keep_alive: KeepAlive | None = None, *, anew: bool = False
    ) -> int:
        """Has the host do something, and returns under which number it was asked when that is done.

        Raises:
            RequestError: the host refuses.
        """
        self._number += 1
        number = self._number
        answer: asyncio.Future[front.Refusal | None] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._tell(front.Ask(number, wanted, name, keep_alive, anew))
        try:
            refusal = await answer
        except BaseException:
            self._answers.pop(number, None)
            self.give_up(number)
            raise
        if refusal is not None:
            raise front.refusal_error(refusal)
        return number

    async def _frontend(self, entry: ModelEntry) -> Frontend:
        """What serves a model that is leased."""
        if entry.frontend is not None:
            return entry.frontend
        try:
            text = await asyncio.shield(self._text(entry))
        except Exception as error:
            _log.error("the text side of %s cannot be read: %s", entry.name, error)
            why = "its text side cannot be read; the server's log says why."
            raise ModelUnavailableError(f"The model {entry.name} could not be loaded: {why}", retry_after=5) from None
        client = self._clients.get(entry.name)
        if client is None:
            raise ModelUnavailableError(f"{entry.name} stopped; retry shortly.")
        if entry.frontend is None:
            options = entry.source.options
            entry.frontend = Frontend(client, text, served_name=entry.name, seed=options.seed if options else 0)
        return entry.frontend

    def _text(self, entry: ModelEntry) -> asyncio.Task[TextPipeline]:
        """Reads a model's text side, once for all who wait for it."""
        if entry.name not in self._reading:
            task = self._reading[entry.name] = asyncio.create_task(self._texts(entry))
            task.add_done_callback(lambda task: self._read(entry.name, task))
            task.add_done_callback(lambda task: None if task.cancelled() else task.exception())  # told by who waits
        return self._reading[entry.name]

    def _read(self, name: str, task: asyncio.Task[TextPipeline]) -> None:
        if self._reading.get(name) is task:
            del self._reading[name]

    async def _texts(self, entry: ModelEntry) -> TextPipeline:
        options = entry.source.options
        if options is None:
            raise ModelUnavailableError(f"{entry.name} is served elsewhere; it is not loaded here.")
        if entry.text is not None:
            return entry.text
        text = await asyncio.to_thread(self._read_text, options)
        if entry.source.options == options:  # it has not changed meanwhile
            entry.text = text
        return text


class _Grant:
    """A lease that the host has given, which several uses may share."""

    def __init__(self, host: AttachedHost, number: int) -> None:
        self.number = number
        self._host = host
        self._uses = 0

    def begin(self) -> Callable[[], None]:
        """A use begins; what ends it."""
        self._uses += 1
        return self._end

    def _end(self) -> None:
        self._uses -= 1
        if not self._uses:
            self._host.give_up(self.number)


def _read_text(options: EngineOptions) -> TextPipeline:
    engines = ProcessEngines()
    return engines.text(engines.options(options))
