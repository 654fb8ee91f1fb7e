"""A host whose HTTP processes are others: what they are told, what they are given, and what ends with them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import pytest

from penstock.config.errors import CheckpointError, ModelNotFoundError, ModelUnavailableError, OverloadedError
from penstock.config.options import EngineOptions, ServerOptions
from penstock.engine.frontend import Frontend
from penstock.host import front_messages as front
from penstock.host.attached_host import AttachedHost
from penstock.host.entry import ModelEntry, ModelState
from penstock.host.front_host import FrontHost
from penstock.host.host import Host
from penstock.host.model_host import KeepAlive
from penstock.host.source import ModelSource, RemoteModel
from tests.host.support import SIZE, Engines, host_of, plan_of, source

LAUNCH = front.FrontLaunch(None, ServerOptions(api_server_count=2), "0.1", 0, "/tmp", 0, 2 * SIZE)
down = msgspec.msgpack.Decoder(front.Down)
up = msgspec.msgpack.Decoder(front.Up)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


class Attached(AttachedHost):
    """Over engines in threads, of which nobody is told: they are taken from who made them."""

    engines: Engines

    async def _frontend(self, entry: ModelEntry) -> Frontend:
        text = await self._text(entry)
        return Frontend(self.engines.made[entry.name], text, served_name=entry.name)


@dataclass
class Process:
    """An HTTP process in this one; messages cross as bytes."""

    client: str
    fronted: FrontHost
    engines: Engines
    reads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inbox: asyncio.Queue[front.Down] = asyncio.Queue()
        self.host = Attached(LAUNCH, self.send, self.read)
        self.host.engines = self.engines
        self.reading = asyncio.create_task(self.take())

    def read(self, options: EngineOptions) -> object:
        self.reads.append(str(options.model))
        return self.engines.pipeline

    def tell(self, message: front.Down) -> None:
        self.inbox.put_nowait(down.decode(msgspec.msgpack.encode(message)))

    def send(self, message: front.Up) -> None:
        told = up.decode(msgspec.msgpack.encode(message))
        assert isinstance(told, front.Ask | front.GiveUp)
        self.fronted.heard(self, told)  # type: ignore[arg-type]

    async def take(self) -> None:
        while True:
            told = await self.inbox.get()
            assert isinstance(told, front.Listed | front.Models | front.Answered)
            await self.host.heard(told)

    async def die(self) -> None:
        self.reading.cancel()
        self.fronted.left(self)  # type: ignore[arg-type]


@asynccontextmanager
async def processes(host: Host, engines: Engines, count: int = 2) -> AsyncIterator[list[Process]]:
    there: list[Process] = []
    fronted = FrontHost(host, lambda: there)  # type: ignore[arg-type,return-value]
    watching = asyncio.create_task(fronted.watch())
    try:
        for number in range(count):
            there.append(Process(f"{number}.1", fronted, engines))
            fronted.started(there[-1])  # type: ignore[arg-type]
        await until(lambda: all(process.host.names.all for process in there))
        yield there
    finally:
        watching.cancel()
        for process in there:
            process.reading.cancel()
            await process.host.close()
        await fronted.close()
        for gate in engines.gates.values():
            gate.set()
        await host.close()


def states(host: AttachedHost) -> dict[str, str]:
    return {entry.name: entry.told_state for entry in host.told()}


async def test_one_load_for_all_and_a_use_is_counted_until_its_process_ends(engines: Engines) -> None:
    host = host_of(engines, source("a"), source("b"), source("c"))
    async with processes(host, engines) as (one, two):
        sources = one.host.names.sources
        leases = await asyncio.gather(one.host.lease(sources["a"]), two.host.lease(sources["a"]))
        assert engines.loads == ["a"] and host.entry(source("a")).uses == 2
        assert leases[0].frontend.served_name == "a" and one.reads == two.reads == ["a"]
        again = leases[0].again()
        leases[0].release()
        leases[0].release()
        await until(lambda: two.host.entry(sources["a"]).uses == 2)  # the other use of the first is still there
        again.release()
        await until(lambda: host.entry(source("a")).uses == 1)
        await two.die()
        assert host.entry(source("a")).uses == 0
        (await one.host.lease(sources["b"])).release()
        (await one.host.lease(sources["c"])).release()  # "a" makes room, since nobody uses it
        await until(lambda: states(one.host) == {"a": "asleep", "b": "ready", "c": "ready"})


async def test_who_waits_is_told_how_far_it_is_and_may_leave(engines: Engines) -> None:
    gate = engines.gates["a"] = threading.Event()
    host = host_of(engines, source("a"))
    async with processes(host, engines) as (one, two):
        entry = two.host.told()[0]
        waiting = asyncio.create_task(one.host.lease(source("a")))
        await until(lambda: entry.state is ModelState.LOADING and entry.progress == (1, 2))
        assert entry.sentence() == "loading a, 50 % of its weights" and not entry.unwanted
        leaver = asyncio.create_task(two.host.lease(source("a")))
        await until(lambda: host.entry(source("a")).waiting == 2)
        leaver.cancel()
        await until(lambda: host.entry(source("a")).waiting == 1)
        gate.set()
        (await waiting).release()
        await until(lambda: entry.unwanted and not host.entry(source("a")).uses)
        assert entry.loads == 1


async def test_who_dies_waits_no_longer(engines: Engines) -> None:
    gate = engines.gates["a"] = threading.Event()
    host = host_of(engines, source("a"))
    async with processes(host, engines) as (one, two):
        waiting = asyncio.create_task(one.host.lease(source("a")))
        await until(lambda: host.entry(source("a")).waiting)
        await one.die()
        await until(lambda: not host.entry(source("a")).waiting)
        waiting.cancel()
        gate.set()
        (await two.host.lease(source("a"))).release()
        assert engines.loads == ["a"]


async def test_by_hand_and_how_long_it_stays(engines: Engines) -> None:
    host = host_of(engines, source("a"), source("b"), keep_alive=60)
    async with processes(host, engines) as (one, two):
        assert (await one.host.begin_load(source("a"))).state is not ModelState.UNLOADED
        assert (await two.host.load(source("a"))).state is ModelState.READY
        (await two.host.lease(source("a"), KeepAlive(None))).release()
        await until(lambda: one.host.entry(source("a")).expires_in is None and one.host.entry(source("a")).idle)
        (await one.host.lease(source("a"), KeepAlive(0))).release()
        await until(lambda: states(two.host)["a"] == "asleep")
        assert (await one.host.unload(source("a"))).state is ModelState.UNLOADED


async def test_refusals_cross(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    engines.errors["a"] = CheckpointError("it is damaged.")
    away = ModelSource("away", remote=RemoteModel("http://127.0.0.1:9/v1", "x"))
    host = host_of(engines, source("a"), away)
    async with processes(host, engines, 1) as (one,):
        assert one.host.has_remotes and one.host.memory == 2 * SIZE
        with pytest.raises(ModelUnavailableError, match="a could not be loaded: it is damaged") as refused:
            await one.host.lease(source("a"))
        assert (refused.value.code, refused.value.retry_after) == ("model_load_failed", 5)
        with pytest.raises(ModelNotFoundError, match="not served here"):
            await one.host.find("nobody")
        monkeypatch.setattr("penstock.config.limits.MAX_MODEL_WAITERS", 0)
        with pytest.raises(OverloadedError) as crowded:
            await one.host.lease(source("a"))
        assert crowded.value.retry_after == 5


async def test_a_list_that_changes_is_told_to_all(engines: Engines) -> None:
    listed = {"a": source("a")}
    host = Host(lambda: dict(listed), engines, 2 * SIZE)
    async with processes(host, engines) as (one, two):
        listed["b"] = source("b")
        await one.host.refresh(anew=True)
        assert "b" in one.host.names
        await until(lambda: "b" in two.host.names)


async def test_another_source_has_another_text_side(engines: Engines) -> None:
    listed = {"a": source("a")}
    host = Host(lambda: dict(listed), engines, 2 * SIZE, plan=plan_of({}))
    async with processes(host, engines, 1) as (one,):
        (await one.host.lease(source("a"), KeepAlive(0))).release()
        await until(lambda: states(one.host) == {"a": "asleep"})
        entry = host.entry(source("a"))
        assert entry.text is not None and one.host.entry(source("a")).text is not None
        listed["a"] = other = ModelSource("a", EngineOptions(model="another"))
        await one.host.refresh(anew=True)
        assert host.told()[0].source == other and entry.text is None
        await until(lambda: one.host.entry(other).source == other)
        assert one.host.entry(other).text is None
        (await one.host.lease(other)).release()
        assert one.reads == ["a", "another"]


async def test_what_is_given_up_before_its_first_turn_leaves_nothing(engines: Engines) -> None:
    host = host_of(engines, source("a"))
    async with processes(host, engines, 1) as (one,):
        for wanted in front.Wanted:
            one.fronted.heard(one, front.Ask(1000, wanted, "a"))  # type: ignore[arg-type]
            one.fronted.heard(one, front.GiveUp(1000))  # type: ignore[arg-type]
            await until(lambda: not one.fronted._asked)
        assert not one.fronted._leases and engines.loads == []
        (await one.host.lease(source("a"))).release()


async def test_a_text_side_that_cannot_be_read_is_a_sentence_and_the_use_ends(engines: Engines) -> None:
    host = host_of(engines, source("a"))
    async with processes(host, engines, 1) as (one,):

        def broken(options: EngineOptions) -> object:
            raise OSError("/secret/path")

        one.host._read_text = broken  # type: ignore[assignment]
        plain = AttachedHost._frontend
        Attached_frontend, Attached._frontend = Attached._frontend, plain  # type: ignore[method-assign]
        try:
            with pytest.raises(ModelUnavailableError, match="its text side cannot be read; the server's log says why"):
                await one.host.lease(source("a"))
        finally:
            Attached._frontend = Attached_frontend  # type: ignore[method-assign]
        await until(lambda: not host.entry(source("a")).uses)
        assert host.entry(source("a")).state is ModelState.READY


async def test_figures_never_go_back(engines: Engines) -> None:
    """Of a model that is put away they are those of its engine a moment ago."""
    host = host_of(engines, source("a"))
    async with processes(host, engines, 1) as (one,):
        fronted = one.fronted
        for loads in (1, 2):
            (await one.host.lease(source("a"))).release()
            assert list(await fronted.stats()) == ["a"]
            assert one.host.entry(source("a")).loads == loads
            await one.host.unload(source("a"))
        assert list(await fronted.stats()) == ["a"]
