"""Several clients of one engine process: each has its own requests, its turn after a death, and nobody else's end."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import zmq

from penstock.config.engine_stats import EngineStats
from penstock.config.errors import EngineDeadError, OverloadedError, RequestError
from penstock.config.options import EngineOptions
from penstock.core.policies.waiting import Waiting
from penstock.core.request import EngineOutput, EngineRequest, FinishReason
from penstock.engine import messages
from penstock.engine.api import EngineInfo, EngineState
from penstock.engine.streams import OutputStream
from penstock.host import front_messages as front
from penstock.host import process_client as client_module
from penstock.host.attached_client import AttachedClient
from penstock.host.front_turns import FrontTurns
from penstock.host.process_client import ProcessClient
from penstock.host.resumption import ENDED_ENGINES
from tests.engine.support import POISON, null_engine, read, request, tokens_of


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarts do not wait."""
    monkeypatch.setattr(client_module, "FIRST_RESTART_DELAY_S", 0.01)


async def until(condition: Callable[[], object]) -> None:
    """Waits until it is true."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


@dataclass
class Host:
    """What a host tells clients, at once: it watches an engine, and deals out turns where `turns` are wanted."""

    folder: Path
    turns: bool = True
    clients: dict[str, AttachedClient] = field(default_factory=dict)
    deaths: list[frozenset[str] | None] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    generation: int = 0
    telling: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.order: FrontTurns[str] = FrontTurns(lambda name: self.clients[name].turn(), lambda _: True)

    def add(self, name: str, **bounds: float) -> AttachedClient:
        (folder := self.folder / name).mkdir()

        def through(told: front.Through) -> None:
            assert told == front.Through(self.generation)
            asyncio.get_running_loop().call_soon(self.order.through, name)

        found = self.clients[name] = AttachedClient(name, folder, through, **bounds)  # type: ignore[arg-type]
        return found

    def serving(self, info: EngineInfo, commands: str, past: EngineStats) -> None:
        self.generation += 1
        told = front.Serving(self.generation, info, commands, past)
        telling = list(self.telling)

        async def tell() -> None:
            await asyncio.gather(*telling)
            for client in self.clients.values():
                client.serving(told)
            if self.turns:
                self.order.begin(self.clients)

        self.begin(tell())

    def died(self, worked_on: Set[str] | None) -> None:
        self.deaths.append(None if worked_on is None else frozenset(worked_on))
        self.order.end()
        told = front.Died(None if worked_on is None else sorted(worked_on))

        async def tell() -> None:
            await asyncio.gather(*(client.died(told) for client in self.clients.values()))

        self.begin(tell())

    def unattached(self, client: str) -> None:
        self.unreached.append(client)

    def stopped(self, why: str) -> None:
        self.ends.append(why)

    def begin(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[arg-type]
        self.telling.add(task)
        task.add_done_callback(self.telling.discard)


@asynccontextmanager
async def hosted(folder: Path, *names: str, model: str = "null", turns: bool = True) -> AsyncIterator[tuple[
    ProcessClient, Host]]:  # fmt: skip
    """An engine process and so many clients of it."""
    host = Host(folder, turns)
    engine = ProcessClient(EngineOptions(model=model), watcher=host)
    for name in names:
        host.add(name)
    await engine.start()
    await until(lambda: not host.telling)
    try:
        yield engine, host
    finally:
        for client in host.clients.values():
            await client.close()
        await engine.close()


@pytest.fixture
def short(folder: Path) -> Iterator[Path]:
    """A folder for sockets, and for engines that have no model."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        yield Path(made)


def kill(engine: ProcessClient) -> None:
    assert engine._child is not None
    engine._child._kill()


def asked(number: int, **sampling: object) -> EngineRequest:
    given = {"n": 1 + number % 2, "max_tokens": 200, "temperature": 0.8, **sampling}
    return replace(request(40 + number, **given), request_id=f"it{number}", seed=number)  # type: ignore[arg-type]


def whole(outputs: list[EngineOutput]) -> list[tuple[list[int], object]]:
    """All that a reader was told of a request."""
    ends = {output.sequence: output.finish_reason for output in outputs if output.finish_reason is not None}
    return [(tokens_of(outputs, sequence), ends[sequence]) for sequence in sorted(ends)]


async def test_the_same_names_of_several_are_different_requests(short: Path) -> None:
    async with hosted(short, "0.1", "1.2") as (engine, host):
        clients: list[ProcessClient | AttachedClient] = [engine, *host.clients.values()]
        requests = [[replace(asked(number), seed=100 * place + number) for number in range(8)] for place in range(3)]
        alone = [whole(await read(engine.submit(one))) for of_one in requests for one in of_one]
        streams = [client.submit(one) for client, own in zip(clients, requests, strict=True) for one in own]
        assert [whole(outputs) for outputs in await asyncio.gather(*map(read, streams))] == alone
        one = host.clients["0.1"]
        stream = one.submit(asked(1, max_tokens=1900))
        with pytest.raises(RequestError, match="request_id 'it1' is in use"):
            one.submit(asked(1))
        other = host.clients["1.2"].submit(asked(1, max_tokens=50))
        one.cancel("it1")
        assert {end for _, end in whole(await read(stream))} == {FinishReason.CANCELLED}
        assert {end for _, end in whole(await read(other))} == {FinishReason.LENGTH}


async def test_requests_wait_for_their_turn_and_are_not_refused(short: Path) -> None:
    async with hosted(short, "0.1", "1.2", turns=False) as (engine, host):
        first, second = host.clients.values()
        assert first.state is second.state is EngineState.READY
        kept = first.submit(one := asked(1))
        left = first.submit(asked(2))
        second.turn()
        assert {end for _, end in whole(await read(second.submit(asked(3))))} == {FinishReason.LENGTH}
        assert (await engine.stats()).prompt_tokens == 2 * 43  # of that one's answers alone
        assert not (kept.admitted or left.admitted)
        await left.aclose()
        first.turn()
        assert whole(await read(kept)) == whole(await read(engine.submit(one)))
        assert len(first._line.streams) == 0


async def test_a_client_that_has_gone_leaves_nothing(short: Path) -> None:
    async with hosted(short, "0.1", "1.2") as (engine, host):
        going, staying = host.clients.values()
        os.kill(engine.pid, signal.SIGSTOP)  # so that it meets all of this at once
        lost = [going.submit(asked(number, max_tokens=1900)) for number in range(4)]
        kept = staying.submit(asked(8, max_tokens=400))
        engine.detach("0.1")
        os.kill(engine.pid, signal.SIGCONT)
        assert {end for _, end in whole(await read(kept))} == {FinishReason.LENGTH}
        stats = await engine.stats()
        assert (stats.running, stats.waiting, stats.finished) == (0, 0, 1)
        assert len(going._line.streams) == len(lost)  # nobody tells the dead


async def test_one_that_the_engine_cannot_reach_is_told_to_the_host(short: Path) -> None:
    async with hosted(short, "0.1") as (engine, host):
        assert engine._child is not None
        engine._child.send(messages.encode(messages.Attach("1.2", f"ipc:///{'x' * 200}")))
        assert {end for _, end in whole(await read(host.clients["0.1"].submit(asked(3))))} == {FinishReason.LENGTH}
        await until(lambda: host.unreached == ["1.2"])


async def test_all_go_on_when_the_engine_dies(short: Path) -> None:
    async with hosted(short, "0.1", "1.2", "2.3") as (engine, host):
        requests = [asked(number, max_tokens=800) for number in range(9)]
        truth = [whole(one) for one in await asyncio.gather(*(read(engine.submit(one)) for one in requests))]
        clients = list(host.clients.values())
        streams = [clients[number % 3].submit(one) for number, one in enumerate(requests)]
        readers = [asyncio.ensure_future(read(stream)) for stream in streams]
        for generation in (2, 3):
            before = [stream.tokens for stream in streams]
            await until(lambda before=before: all(map(further, streams, before)))
            kill(engine)
            await until(lambda generation=generation: host.generation == generation and serves(engine, host))
        assert [whole(outputs) for outputs in await asyncio.gather(*readers)] == truth
        assert (await clients[0].stats()).restarts == len(host.deaths) == 2
        assert sum(client.own().resumed for client in clients) <= 2 * len(requests)


def further(stream: OutputStream, tokens: int) -> bool:
    """Whether it is some tokens further than that, or has ended."""
    return stream.tokens > tokens + 10 or not stream.open


def serves(engine: ProcessClient, host: Host) -> bool:
    """Whether there is an engine, all know of it, and in it all requests have gone on."""
    going_on = [client for client in host.clients.values() if client._line.resumption.goes_on]
    return engine.state is EngineState.READY and not (host.telling or going_on)


@pytest.mark.parametrize("position", [0, 60])
async def test_a_request_that_kills_engines_is_found_among_those_of_several(short: Path, position: int) -> None:
    async with hosted(short, "0.1", "1.2", model="deadly") as (_, host):
        first, second = host.clients.values()
        requests = [asked(number) for number in range(24)]
        truth = [whole(await read(first.submit(one))) for one in requests]
        poisonous = replace(asked(1), request_id="poison", prompt_ids=(POISON, position, *range(40)))
        streams = [(first, second)[number % 2].submit(one) for number, one in enumerate(requests)]
        poisoned = second.submit(poisonous)
        again = [whole(outputs) for outputs in await asyncio.gather(*map(read, streams))]
        ends = [output for output in await read(poisoned) if output.finish_reason is not None]
        assert {(end.finish_reason, end.error) for end in ends} == {(FinishReason.ERROR, ENDED_ENGINES)}
        assert again == truth
        assert len(host.deaths) <= 4


async def test_no_engine_any_more_ends_all(short: Path) -> None:
    async with hosted(short, "0.1") as (_, host):
        client = host.clients["0.1"]
        stream = client.submit(asked(1, max_tokens=1900))
        await until(lambda: stream.tokens)
        client.silent(front.Silent(silent=True))
        assert client.state is EngineState.RESTARTING
        with pytest.raises(EngineDeadError, match="restarted"):
            client.submit(asked(2))
        client.stopped("It is over.")
        assert [output.error for output in await read(stream) if output.error] == ["It is over."] * 2
        with pytest.raises(EngineDeadError, match="It is over"):
            client.submit(asked(2))


async def test_before_there_is_an_engine_calls_are_refused(short: Path) -> None:
    client = Host(short).add("0.1")
    with pytest.raises(EngineDeadError, match="still starting"):
        client.submit(asked(1))
    client.turn()  # of an engine that has died meanwhile
    await client.died(front.Died(None))
    assert await client.stats() == EngineStats()
    await client.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("commands", ["ipc:///nowhere/at-all", f"ipc:///{'x' * 200}"])
async def test_one_that_cannot_listen_says_so_and_can_be_closed(short: Path, commands: str) -> None:
    """Its folder is not there, or is and the engine's socket cannot be reached."""
    client = Host(short).add("0.1")
    if "nowhere" in commands:
        (short / "0.1").rmdir()
    with pytest.raises(zmq.ZMQError) as raised:
        client.serving(front.Serving(1, null_engine()[1], commands, EngineStats()))
    await client.close()  # also while the error, and what it holds, is there
    assert raised.tb is not None


def test_bounds_are_shared_by_processes() -> None:
    share = Waiting(30.0, processes=4)
    big = replace(request(), prompt_ids=(1,) * 2**23)
    share.enter(big)  # alone it may be as long as anywhere
    with pytest.raises(OverloadedError, match="the limit of 4194304"):
        share.enter(request())
    many = Waiting(None, processes=4)
    for _ in range(1024):
        many.enter(request(prompt=1))
    with pytest.raises(OverloadedError, match="1024 requests wait"):
        many.enter(request(prompt=1))
