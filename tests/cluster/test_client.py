"""Engine processes around null engines as one engine: where requests go, and what becomes of them when one dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from penstock.cluster.client import ClusterClient, Life, Watching
from penstock.cluster.policies import POLICIES
from penstock.cluster.router import Router
from penstock.config.cache_asks import Ask, Pin
from penstock.config.errors import CheckpointError, EngineDeadError, RequestError
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.policies.pause import Control
from penstock.core.request import EngineRequest, FinishReason
from penstock.engine.api import EngineState
from penstock.engine.streams import OutputStream
from penstock.host.process_client import ProcessClient, ToldPrefixes
from penstock.transfer.prefix_names import PrefixNames
from tests.engine.support import POISON, read, request, tokens_of


def cluster(count: int = 3, policy: str = "cost", model: str = "null") -> ClusterClient:
    router = Router(POLICIES[policy](), PrefixNames("seed"), count, 16, shared=False)

    def make(watching: Watching) -> Sequence[ProcessClient]:
        return [
            ProcessClient(
                EngineOptions(model=model),
                watcher=Life(number, watching),
                told_prefixes=ToldPrefixes("seed", partial(router.hear, number)),
            )
            for number in range(count)
        ]

    return ClusterClient(make, router, closing=lambda: None)


@pytest.fixture
async def client(folder: Path) -> AsyncIterator[ClusterClient]:
    client = cluster()
    await client.start()
    yield client
    await client.close()


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def pids(client: ClusterClient) -> list[int]:
    return [engine.pid for engine in client.engines if isinstance(engine, ProcessClient)]


def homes(client: ClusterClient, request_id: str) -> list[int]:
    """The engines that have a request."""
    return [n for n, engine in enumerate(client.engines) if engine.line.streams.get(request_id) is not None]


def leftovers(client: ClusterClient) -> int:
    return sum(len(engine.line.streams) for engine in client.engines)


async def test_requests_are_dealt_and_counted(client: ClusterClient) -> None:
    asked = [request(40, max_tokens=20) for _ in range(12)]
    alone = await asyncio.gather(*(read(client.submit(one)) for one in asked))
    assert all(len(tokens_of(outputs)) == 20 for outputs in alone)
    stats = await client.stats()
    assert len(stats.engines) == 3
    assert min(one.generated_tokens for one in stats.engines) > 0
    assert stats.generated_tokens == sum(one.generated_tokens for one in stats.engines) == 240
    assert leftovers(client) == 0


async def test_a_conversation_stays_where_its_prefix_is(client: ClusterClient) -> None:
    rounds = []
    for turn in range(1, 5):
        asked = [request(100 * turn, request_id=f"{turn}.{person}", max_tokens=4) for person in range(6)]
        asked = [
            EngineRequest(one.request_id, tuple((person * 7 + at) % 90 for at in range(100 * turn)), one.sampling)
            for person, one in enumerate(asked)
        ]
        streams = [client.submit(one) for one in asked]
        rounds.append([homes(client, one.request_id) for one in asked])
        await asyncio.gather(*map(read, streams))
    assert all(one == rounds[0] for one in rounds)
    assert {home for (home,) in rounds[0]} == {0, 1, 2}
    stats = await client.stats()
    assert stats.cached_tokens >= 6 * (96 + 192 + 288)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "n": 2, "logprobs": 2}])
async def test_requests_of_an_engine_that_dies_go_on_in_others(
    client: ClusterClient, sampling: dict[str, object]
) -> None:
    asked = [request(30, max_tokens=300, **sampling) for _ in range(9)]
    expected = await asyncio.gather(*(read(client.submit(one)) for one in asked))
    streams = [client.submit(one) for one in asked]
    readers = [asyncio.create_task(read(stream)) for stream in streams]
    await until(lambda: all(isinstance(s, OutputStream) and s.tokens > 20 for s in streams))
    victim = homes(client, asked[0].request_id)[0]
    moved = [one.request_id for one in asked if homes(client, one.request_id) == [victim]]
    os.kill(pids(client)[victim], signal.SIGKILL)
    outputs = await asyncio.wait_for(asyncio.gather(*readers), 60)
    for sequence in range(int(sampling.get("n", 1))):  # type: ignore[call-overload]
        assert [tokens_of(one, sequence) for one in outputs] == [tokens_of(one, sequence) for one in expected]
    count = 300 * int(sampling.get("n", 1))  # type: ignore[call-overload]
    if "logprobs" in sampling:
        assert all(sum(len(output.logprobs) for output in one) == count for one in outputs)
    assert all(one[-1].finish_reason is FinishReason.LENGTH for one in outputs)
    assert leftovers(client) == 0
    stats = await client.stats()
    assert stats.resumed == len(moved) > 0
    await until(lambda: client.engines[victim].state is EngineState.READY)
    assert (await client.stats()).restarts == 1
    again = [client.submit(request(30, max_tokens=2)) for _ in range(9)]
    assert victim in {home for stream in again for home in homes(client, stream.request.request_id)}  # type: ignore[attr-defined]
    await asyncio.gather(*map(read, again))


async def test_when_all_die_requests_wait_for_the_first_that_is_back(client: ClusterClient) -> None:
    asked = [request(30, max_tokens=400) for _ in range(6)]
    expected = await asyncio.gather(*(read(client.submit(one)) for one in asked))
    streams = [client.submit(one) for one in asked]
    readers = [asyncio.create_task(read(stream)) for stream in streams]
    await until(lambda: all(isinstance(s, OutputStream) and s.tokens > 20 for s in streams))
    for pid in pids(client):
        os.kill(pid, signal.SIGKILL)
    await until(lambda: client.state is EngineState.RESTARTING)
    with pytest.raises(EngineDeadError, match="restarted"):
        client.submit(request())
    outputs = await asyncio.wait_for(asyncio.gather(*readers), 60)
    assert [tokens_of(one) for one in outputs] == [tokens_of(one) for one in expected]
    assert leftovers(client) == 0


async def test_a_request_that_engines_die_of_does_not_take_all_of_them(folder: Path) -> None:
    client = cluster(3, "round-robin", "deadly")
    await client.start()
    try:
        others = [client.submit(request(20, max_tokens=2000)) for _ in range(3)]
        poison = EngineRequest("poison", (POISON, 30, *range(20)), SamplingParams(max_tokens=50, temperature=0.0))
        outputs = await asyncio.wait_for(read(client.submit(poison)), 60)
        assert outputs[-1].finish_reason is FinishReason.ERROR
        assert "more than once" in str(outputs[-1].error)
        for stream in others:
            assert len(tokens_of(await asyncio.wait_for(read(stream), 60))) == 2000
        assert leftovers(client) == 0
    finally:
        await client.close()


async def test_an_engine_that_is_retired_leaves_its_requests_to_others(client: ClusterClient) -> None:
    asked = [request(30, max_tokens=400) for _ in range(6)]
    expected = await asyncio.gather(*(read(client.submit(one)) for one in asked))
    streams = [client.submit(one) for one in asked]
    readers = [asyncio.create_task(read(stream)) for stream in streams]
    await until(lambda: all(isinstance(s, OutputStream) and s.tokens > 20 for s in streams))
    (victim,) = homes(client, asked[0].request_id)
    await asyncio.wait_for(client.retire(victim), 30)
    assert client.engines[victim].state is EngineState.STOPPED
    outputs = await asyncio.wait_for(asyncio.gather(*readers), 60)
    assert [tokens_of(one) for one in outputs] == [tokens_of(one) for one in expected]
    assert client.state is EngineState.READY
    streams = [client.submit(request()) for _ in range(6)]
    assert all(homes(client, stream.request.request_id) != [victim] for stream in streams)  # type: ignore[attr-defined]
    await asyncio.gather(*map(read, streams))
    (other, last) = (number for number in range(3) if number != victim)
    await client.retire(other)
    with pytest.raises(EngineDeadError, match="only engine"):
        await client.retire(last)


async def test_cancelling_finds_the_request(client: ClusterClient) -> None:
    streams = [client.submit(request(request_id=f"c{number}", max_tokens=2000)) for number in range(6)]
    readers = [asyncio.create_task(read(stream)) for stream in streams]
    for number in range(6):
        client.cancel(f"c{number}")
    client.cancel("nobody's")
    outputs = await asyncio.wait_for(asyncio.gather(*readers), 30)
    assert all(one[-1].finish_reason is FinishReason.CANCELLED for one in outputs)
    assert leftovers(client) == 0


async def test_an_id_is_in_use_once_in_all_engines(client: ClusterClient) -> None:
    stream = client.submit(request(request_id="same", max_tokens=1000))
    for _ in range(4):
        with pytest.raises(RequestError, match="in use"):
            client.submit(request(request_id="same"))
    await stream.aclose()


async def test_all_sleep_and_wake(client: ClusterClient) -> None:
    before = pids(client)
    await read(client.submit(request(40, max_tokens=2)))
    assert sum(map(len, client._router._known))
    await client.sleep()
    assert client.state is EngineState.SLEEPING
    with pytest.raises(EngineDeadError, match="sleeps"):
        client.submit(request())
    await client.wake()
    assert client.state is EngineState.READY
    assert not set(before) & set(pids(client))
    assert not sum(map(len, client._router._known))  # engines that were started again have nothing cached
    assert len(tokens_of(await read(client.submit(request(max_tokens=5))))) == 5


async def test_a_pause_holds_all_and_one_that_comes_back(client: ClusterClient) -> None:
    client.control(Control.WAIT)
    async with asyncio.timeout(30):
        while (await client.stats()).paused != 1:
            await asyncio.sleep(0.01)
    os.kill(pids(client)[1], signal.SIGKILL)
    await until(lambda: client.engines[1].state is EngineState.RESTARTING)
    await until(lambda: client.engines[1].state is EngineState.READY)
    async with asyncio.timeout(30):
        while [one.paused for one in (await client.stats()).engines] != [1, 1, 1]:
            await asyncio.sleep(0.01)
    client.control(Control.RESUME)
    assert len(tokens_of(await read(client.submit(request(max_tokens=5))))) == 5


async def test_all_engines_are_asked_for_pins(client: ClusterClient) -> None:
    ask = EngineRequest("ask", (1,), SamplingParams(max_tokens=1), ask=Ask("pins"))
    answer = (await anext(client.submit(ask))).answer
    assert answer == {"pins": []}
    ask = EngineRequest("ask", (1,), SamplingParams(max_tokens=1), ask=Ask("unpin", "none"))
    assert (await anext(client.submit(ask))).answer == {"deleted": False}
    assert leftovers(client) == 0


async def test_a_pin_is_in_one_engine(folder: Path) -> None:
    client = cluster(2, "round-robin")
    await client.start()
    try:
        for prompt in (range(50), range(1, 51), range(2, 52)):  # each goes to the other engine
            how = SamplingParams(max_tokens=2, temperature=0.0)
            await read(client.submit(EngineRequest("r", tuple(prompt), how, owner="o", pin=Pin("p", 60.0))))
            ask = EngineRequest("ask", (1,), SamplingParams(max_tokens=1), owner="o", ask=Ask("pins"))
            answer = (await anext(client.submit(ask))).answer
            assert answer is not None and [pin["name"] for pin in answer["pins"]] == ["p"]
            told = [await anext(engine.submit(ask)) for engine in client.engines]
            assert sum(len((one.answer or {})["pins"]) for one in told) == 1
        ask = EngineRequest("ask", (1,), SamplingParams(max_tokens=1), owner="o", ask=Ask("unpin", "p"))
        assert (await anext(client.submit(ask))).answer == {"deleted": True}
        assert leftovers(client) == 0
    finally:
        await client.close()


async def test_an_engine_that_cannot_start_ends_the_start(folder: Path) -> None:
    client = cluster(model="missing")
    with pytest.raises(CheckpointError, match="no model"):
        await client.start()
    assert client.state is EngineState.STOPPED
    assert pids(client) == [0, 0, 0]


async def test_one_that_cannot_start_again_is_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.host.process_client.LAST_RESTART_DELAY_S", 0.02)
    client = cluster(2)
    await client.start()
    try:
        lost = asyncio.create_task(client.given_up())
        (folder / "broken").touch()
        os.kill(pids(client)[0], signal.SIGKILL)
        await until(lambda: client.engines[0].state is EngineState.STOPPED)
        assert client.state is EngineState.READY
        assert len(tokens_of(await read(client.submit(request(max_tokens=5))))) == 5
        os.kill(pids(client)[1], signal.SIGKILL)
        assert "could not be started again" in str(await asyncio.wait_for(lost, 60))
        assert client.state is EngineState.STOPPED
    finally:
        await client.close()
