"""Models come when they are asked for, stay while they are used, and never take more than there is."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from penstock.config.errors import (
    CheckpointError,
    ConfigError,
    MemoryPlanError,
    ModelNotFoundError,
    ModelUnavailableError,
    OverloadedError,
    RequestError,
)
from penstock.config.options import EngineOptions
from penstock.engine.api import EngineState
from penstock.host import entry as entries
from penstock.host import host as hosts
from penstock.host.entry import ModelEntry, ModelState
from penstock.host.host import Host
from penstock.host.loading import STARTS
from penstock.host.memory import ModelPlan
from penstock.host.model_host import KeepAlive, Lease
from penstock.host.source import ModelSource
from tests.engine.support import read, request
from tests.host.support import SIZE, Engines, SupervisedThread, host_of, plan_of, source


@asynccontextmanager
async def closing(host: Host) -> AsyncIterator[Host]:
    try:
        yield host
    finally:
        await host.close()
        assert host.budget.free == host.budget.total


async def use(host: Host, name: str) -> Lease:
    return await host.lease(await host.find(name))


def states(host: Host) -> dict[str, str]:
    return {entry.name: entry.state.value for entry in host.told()}


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_model_is_loaded_once_for_all_who_ask_at_once(engines: Engines) -> None:
    async with closing(host_of(engines, source("a"))) as host:
        leases = await asyncio.gather(*(use(host, "a") for _ in range(20)))
        assert engines.loads == ["a"]
        assert len({id(lease.frontend) for lease in leases}) == 1
        outputs = await read(leases[0].frontend.client.submit(request(max_tokens=3)))
        assert sum(len(output.tokens) for output in outputs) == 3
        for lease in leases:
            lease.release()
            lease.release()
        assert host.entry(await host.find("a")).uses == 0


async def test_the_model_idle_the_longest_makes_room(engines: Engines) -> None:
    async with closing(host_of(engines, *map(source, "abc"))) as host:
        for name in ("a", "b", "a", "c"):
            (await use(host, name)).release()
        assert states(host) == {"a": "ready", "b": "asleep", "c": "ready"}
        (await use(host, "b")).release()
        assert states(host) == {"a": "asleep", "b": "ready", "c": "ready"}
        assert engines.loads == ["a", "b", "c", "b"]
        assert engines.most == 2


async def test_a_model_in_use_is_not_put_away_before_it_is_left(engines: Engines) -> None:
    async with closing(host_of(engines, *map(source, "abc"))) as host:
        first, second = await use(host, "a"), await use(host, "b")
        waiting = asyncio.create_task(use(host, "c"))
        await until(lambda: host.entry(source("a")).leaving)
        late = asyncio.create_task(use(host, "a"))  # behind the one who waits, who would never have a turn otherwise
        await asyncio.sleep(0)
        assert engines.live == {"a", "b"}
        first.release()
        (await waiting).release()
        assert "a" not in engines.live or "b" not in engines.live
        second.release()
        (await late).release()
        assert engines.most == 2


async def test_who_came_first_gets_the_memory_first(engines: Engines) -> None:
    async with closing(host_of(engines, *map(source, "abcd"), memory=SIZE)) as host:
        held = await use(host, "a")
        order: list[str] = []

        async def take(name: str) -> None:
            lease = await use(host, name)
            order.append(name)
            lease.release()

        tasks = []
        for name in "bcd":
            tasks.append(asyncio.create_task(take(name)))
            await until(lambda name=name: host.entry(source(name)).state is ModelState.WAITING)
        held.release()
        await asyncio.gather(*tasks)
        assert order == ["b", "c", "d"]
        assert engines.most == 1


async def test_a_load_nobody_waits_for_any_more_takes_no_memory(engines: Engines) -> None:
    async with closing(host_of(engines, *map(source, "ab"), memory=SIZE)) as host:
        held = await use(host, "a")
        waiting = asyncio.create_task(use(host, "b"))
        await until(lambda: host.entry(source("b")).state is ModelState.WAITING)
        waiting.cancel()
        await asyncio.wait((waiting,))
        held.release()
        await until(lambda: host.entry(source("b")).state is ModelState.UNLOADED)
        assert engines.loads == ["a"]


@pytest.mark.parametrize("seed", range(4))
async def test_memory_is_never_exceeded_whatever_comes(engines: Engines, seed: int) -> None:
    draw = random.Random(seed)
    sizes = {name: draw.randint(50, 120) for name in "abcde"}
    total = 2 * SIZE
    async with closing(host_of(engines, *map(source, "abcde"), memory=total, sizes=sizes)) as host:

        async def one() -> str:
            await asyncio.sleep(draw.random() * 0.05)
            name = draw.choice("abcde")
            waiting = asyncio.ensure_future(use(host, name))
            if draw.random() < 0.1:
                await asyncio.sleep(0.001)
                if waiting.cancel():
                    await asyncio.wait((waiting,))
                    return "left"
            lease = await waiting
            assert lease.frontend.client.state.value == "ready"
            assert sum(host.budget.held.values()) <= total
            assert set(host.budget.held) >= engines.live
            await asyncio.sleep(draw.random() * 0.002)
            assert name in engines.live
            lease.release()
            return "answered"

        async with asyncio.timeout(60):
            results = [result for _ in range(6) for result in await asyncio.gather(*(one() for _ in range(25)))]
        assert results.count("answered") > 100
        assert len(engines.loads) > 10
        await until(lambda: all(entry.idle for entry in host.entries()))


async def test_all_who_wait_are_told_why_a_load_failed_and_it_rests(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines.errors["a"] = CheckpointError("a has no config.json; give a whole folder.")
    async with closing(host_of(engines, source("a"))) as host:
        found = await asyncio.gather(*(use(host, "a") for _ in range(3)), return_exceptions=True)
        for error in found:
            assert isinstance(error, ModelUnavailableError)
            assert str(error) == "The model a could not be loaded: a has no config.json; give a whole folder."
            assert 0 < error.retry_after <= entries.FIRST_PAUSE_S
        assert engines.loads == ["a"]
        with pytest.raises(ModelUnavailableError, match=r"no config\.json"):
            await use(host, "a")
        assert engines.loads == ["a"]
        monkeypatch.setattr("penstock.host.entry.FIRST_PAUSE_S", 0.0)
        host.entry(source("a")).rest_again()
        with pytest.raises(ModelUnavailableError):
            await use(host, "a")
        del engines.errors["a"]
        (await use(host, "a")).release()
        assert engines.loads == ["a"] * 3
        assert host.entry(source("a")).failure is None


async def test_pauses_between_loads_that_fail_grow() -> None:
    entry = ModelEntry(source("a"), None, None)
    pauses = []
    for _ in range(9):
        entry.become(ModelState.WAITING)
        entry.failed("no")
        assert entry.failure is not None
        with pytest.raises(ModelUnavailableError) as refused:
            entry.check_rested()
        pauses.append(refused.value.retry_after)
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300, 300]


async def test_a_model_that_cannot_fit_is_refused_with_what_is_missing(engines: Engines) -> None:
    pinned = source("a", pinned=True)
    async with closing(host_of(engines, pinned, source("b"), memory=150)) as host:
        host.load_pinned()
        await until(lambda: host.entry(pinned).usable)
        with pytest.raises(ModelUnavailableError, match=r"b needs 100 B; models that are pinned \(a\) leave 50 B of"):
            await use(host, "b")
        assert states(host) == {"a": "ready", "b": "failed"}


async def test_an_idle_model_sleeps_and_wakes(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "SLEEP_S", 0.01)
    listed = (source("a", ttl=0.01), source("b", pinned=True), source("c"))
    async with closing(host_of(engines, *listed, memory=3 * SIZE)) as host:
        for name in "abc":
            (await use(host, name)).release()
        await until(lambda: states(host)["a"] == "unloaded")
        assert states(host) == {"a": "unloaded", "b": "ready", "c": "ready"}
        assert host.entry(source("b")).expires_in is None
        assert 0 < (host.entry(source("c")).expires_in or 0) <= 300
        lease = await use(host, "a")
        await asyncio.sleep(0.05)
        assert states(host)["a"] == "ready"
        lease.release()
        await until(lambda: states(host)["a"] != "ready")


@pytest.mark.parametrize(("seconds", "state"), [(0.0, "asleep"), (None, "ready"), (60.0, "ready")])
async def test_a_caller_says_how_long_a_model_stays(engines: Engines, seconds: float | None, state: str) -> None:
    async with closing(host_of(engines, source("a"), source("b"), memory=SIZE)) as host:
        lease = await host.lease(source("a"), KeepAlive(seconds))
        other = lease.again()
        lease.release()
        assert states(host)["a"] == "ready"
        other.release()
        await until(lambda: states(host)["a"] == state)
        assert (host.entry(source("a")).expires_in is None) == (seconds != 60.0)
        (await use(host, "b")).release()  # no caller keeps others' models out


async def test_no_caller_says_how_long_a_pinned_model_stays(engines: Engines) -> None:
    async with closing(host_of(engines, source("a", pinned=True), source("b"), memory=SIZE)) as host:
        (await host.lease(await host.find("a"), KeepAlive(0))).release()
        await asyncio.sleep(0.01)
        assert states(host)["a"] == "ready" and host.entry(source("a")).expires_in is None
        with pytest.raises(ModelUnavailableError, match="pinned"):
            await use(host, "b")


async def test_unloading_waits_for_those_who_use_it(engines: Engines) -> None:
    async with closing(host_of(engines, source("a"))) as host:
        lease = await use(host, "a")
        unloading = asyncio.create_task(host.unload(source("a")))
        await asyncio.sleep(0.01)
        assert engines.live == {"a"}
        assert not unloading.done()
        lease.release()
        assert (await unloading).state is ModelState.UNLOADED
        assert engines.live == set()


async def test_a_load_can_be_called_off(engines: Engines) -> None:
    engines.gates["a"] = threading.Event()
    async with closing(host_of(engines, source("a"))) as host:
        host.start_load(source("a"))
        entry = host.entry(source("a"))
        await until(lambda: entry.progress == (1, 2))
        assert entry.sentence() == "loading a, 50 % of its weights"
        unloading = asyncio.create_task(host.unload(source("a")))
        await until(lambda: entry.task is not None and entry.task.cancelling())
        engines.gates["a"].set()
        await unloading
        assert states(host) == {"a": "unloaded"}


async def test_a_load_called_off_twice_gives_its_memory_back(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    closing_now, may_close = asyncio.Event(), asyncio.Event()
    close = SupervisedThread.close

    async def slowly(engine: SupervisedThread) -> None:
        closing_now.set()
        await may_close.wait()
        await close(engine)

    monkeypatch.setattr(SupervisedThread, "close", slowly)
    engines.gates["a"] = threading.Event()
    async with closing(host_of(engines, source("a"), source("b"), memory=SIZE)) as host:
        task = host.start_load(source("a")).task
        assert task is not None
        await until(lambda: host.entry(source("a")).progress == (1, 2))
        unloads = [asyncio.create_task(host.unload(source("a")))]
        engines.gates["a"].set()
        await closing_now.wait()
        unloads.append(asyncio.create_task(host.unload(source("a"))))
        await asyncio.sleep(0.01)
        task.cancel()  # nor does anybody else keep it from its end
        may_close.set()
        await asyncio.gather(*unloads)
        assert (host.budget.held, engines.live) == ({}, set())
        (await use(host, "b")).release()


async def test_an_engine_that_dies_on_the_way_is_started_again(engines: Engines) -> None:
    async with closing(host_of(engines, source("a"))) as host:
        engines.dying = STARTS
        with pytest.raises(ModelUnavailableError, match="could not be started; the server's log says why"):
            await use(host, "a")
        assert engines.loads == ["a"] * STARTS
        host.entry(source("a")).failure = None
        engines.dying = STARTS - 1
        (await use(host, "a")).release()
        assert engines.loads == ["a"] * 2 * STARTS
        assert states(host) == {"a": "ready"}


@pytest.mark.parametrize("known", [(True, False), (True, True), (False, False)])
async def test_a_model_that_outgrew_the_start_it_was_planned_by_is_planned_again(
    engines: Engines, known: tuple[bool, bool]
) -> None:
    """As where another process keeps a start of its own between the plan and the engine; once, and no more."""
    plans: list[bool] = []

    def plan(options: EngineOptions, room: int) -> ModelPlan:
        plans.append(known[len(plans)])
        if not plans[-1] and known[0]:
            engines.errors.clear()
        return replace(plan_of({})(options, room), exact=plans[-1])

    engines.errors["a"] = MemoryPlanError("The model a does not fit.")
    async with closing(Host(lambda: {"a": source("a")}, engines, 2 * SIZE, keep_alive=300.0, plan=plan)) as host:
        if known == (True, False):
            (await use(host, "a")).release()
            assert (states(host), host.budget.held) == ({"a": "ready"}, {"a": SIZE})
        else:
            with pytest.raises(ModelUnavailableError, match="does not fit"):
                await use(host, "a")
            assert host.budget.held == {}
    assert plans == list(known[: 1 + known[0]])
    assert engines.loads == ["a"] * len(plans)


async def test_calls_wait_for_an_engine_that_is_started_again(engines: Engines) -> None:
    async with closing(host_of(engines, source("a"))) as host:
        (await use(host, "a")).release()
        engines.made["a"]._state = EngineState.RESTARTING
        waiting = asyncio.create_task(use(host, "a"))
        done, _ = await asyncio.wait((waiting,), timeout=0.1)
        assert not done
        assert host.entry(source("a")).told_state == "restarting"
        engines.made["a"]._state = EngineState.READY
        (await waiting).release()
        assert engines.loads == ["a"]


async def test_an_engine_that_is_lost_gives_its_memory_back(engines: Engines) -> None:
    async with closing(host_of(engines, source("a"))) as host:
        (await use(host, "a")).release()
        engines.made["a"].lose()
        await until(lambda: states(host)["a"] == "failed")
        assert host.budget.held == {}
        with pytest.raises(ModelUnavailableError, match="a stopped and could not be started again"):
            await use(host, "a")
        await host.load(source("a"))
        assert states(host)["a"] == "ready"


async def test_an_engine_that_cannot_be_closed_does_not_keep_its_model(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with closing(host_of(engines, source("a"), source("b"), memory=SIZE)) as host:
        (await use(host, "a")).release()
        close = engines.made["a"].close

        async def broken() -> None:
            await close()
            raise OSError("no such process group")

        monkeypatch.setattr(engines.made["a"], "close", broken)
        (await use(host, "b")).release()
        assert states(host) == {"a": "asleep", "b": "ready"}
        assert "the engine of a did not end as it should" in caplog.text
        (await use(host, "a")).release()


async def test_counters_go_on_when_a_model_comes_back(engines: Engines) -> None:
    async with closing(host_of(engines, source("a"))) as host:
        for round in (1, 2):
            lease = await use(host, "a")
            await read(lease.frontend.client.submit(request(max_tokens=3)))
            lease.release()
            await host.unload(source("a"))
            assert host.entry(source("a")).past.generated_tokens == 3 * round


async def test_the_line_of_those_who_wait_is_bounded(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.config.limits.MAX_MODEL_WAITERS", 3)
    engines.gates["a"] = threading.Event()
    async with closing(host_of(engines, source("a"))) as host:
        waiting = [asyncio.create_task(use(host, "a")) for _ in range(3)]
        await until(lambda: host.entry(source("a")).waiting == 3)
        with pytest.raises(OverloadedError, match="3 calls wait for models") as refused:
            await use(host, "a")
        assert refused.value.retry_after > 0
        engines.gates["a"].set()
        for lease in await asyncio.gather(*waiting):
            lease.release()


async def test_names(engines: Engines) -> None:
    listed = (source("qwen", aliases=(("chat", 3.0),)), source("llama", aliases=(("chat", 1.0), ("gpt", 1.0))))
    async with closing(host_of(engines, *listed)) as host:
        assert (await host.find("gpt")).name == "llama"
        drawn = [(await host.find("chat", f"request {number}")).name for number in range(400)]
        assert 270 <= drawn.count("qwen") <= 330
        assert [(await host.find("chat", "one")).name for _ in range(9)] == [(await host.find("chat", "one")).name] * 9
        with pytest.raises(ModelNotFoundError, match=r'"qwne" is not served here; did you mean "qwen"\?'):
            await host.find("qwne")
        with pytest.raises(ModelNotFoundError, match=r'available: "qwen", "llama", "chat", "gpt"'):
            await host.find("zzzzzzzz")
        with pytest.raises(RequestError, match="model is required"):
            await host.find(None)
    with pytest.raises(ConfigError, match="alias 'a' of 'b' is a model's name"):
        host_of(engines, source("a"), source("b", aliases=(("a", 1.0),)))


async def test_models_that_appear_are_found(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_NAMES_S", 0.0)
    listed: dict[str, ModelSource] = {"a": source("a")}
    host = host_of(engines)
    host._sources = lambda: dict(listed)
    async with closing(host):
        listed["b"] = source("b")
        (await use(host, "b")).release()
        assert states(host) == {"a": "unloaded", "b": "ready"}


def test_only_ways_there_are_are_taken() -> None:
    entry = ModelEntry(source("a"), None, None)
    with pytest.raises(ValueError, match="unloaded cannot become ready"):
        entry.become(ModelState.READY)


async def test_closing_refuses_those_who_wait(engines: Engines) -> None:
    engines.gates["a"] = threading.Event()
    host = host_of(engines, source("a"))
    waiting = asyncio.create_task(use(host, "a"))
    await until(lambda: host.entry(source("a")).state is ModelState.LOADING)
    engines.gates["a"].set()
    await host.close()
    with pytest.raises(ModelUnavailableError, match="shutting down"):
        await waiting
