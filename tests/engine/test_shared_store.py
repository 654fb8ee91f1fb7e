"""A store that engines share: what one has computed the other loads, with the same bits, whatever the store does."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions
from penstock.core.policies import bounded_tier, shared_tier
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.kernels.cpu import native
from penstock.runtime.runner import ModelRunner
from penstock.transfer import redis_store, shared
from penstock.transfer.carrier import Carrier
from penstock.transfer.shared import SharedStore
from tests.engine.test_tiers import DEADLINE_S, KINDS, answers, asked, folder, options, tier_of
from tests.models import tiny
from tests.transfer.stores import (
    LMCacheServer,
    RedisServer,
    free_port,
    running_lmcache,
    running_mooncake,
    running_objects,
    running_redis,
    slowed,
)

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
__all__ = ["folder"]
PLAIN_KEY, OTHER_KEY = "11" * 32, "22" * 32


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine decides nothing: an answer is waited for, and a load always is sooner done than computing."""
    monkeypatch.setattr(shared_tier, "_MOST_PATIENCE", DEADLINE_S)
    monkeypatch.setattr(shared_tier, "_LEAST_PATIENCE", DEADLINE_S)
    monkeypatch.setattr(bounded_tier, "_LEAST_PATIENCE", DEADLINE_S)
    monkeypatch.setattr(shared_tier.SharedTier, "_is_worth", lambda *arguments: True)
    monkeypatch.setattr(shared_tier, "_SHARE", float("inf"))


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with running_redis(tmp_path) as server:
        yield server


def store_of(engine: Engine) -> SharedStore:
    assert isinstance(engine.runner, ModelRunner) and isinstance(engine.runner.mover, Carrier)
    store = engine.runner.mover._store
    store = getattr(store, "_store", store)  # behind memory
    assert isinstance(store, SharedStore)
    return store


def sent(engine: Engine) -> None:
    """All that was computed has been sent, or given up."""
    until = time.monotonic() + DEADLINE_S
    while store_of(engine).unsent:
        assert time.monotonic() < until
        time.sleep(0.001)


def ask(engine: Engine, names: str = "abcd", **others: Any) -> tuple[list[Any], list[int]]:
    told = answers(engine, list(asked(names, **others)))
    sent(engine)
    return told


def truth(model: Path) -> list[Any]:
    """What is said without a tier."""
    engine, _ = build_engine(options(model))
    with closing(engine):
        return answers(engine, list(asked("abcd")))[0]


def built(given: EngineOptions) -> Any:
    return closing(build_engine(given)[0])


def both(model: Path, url: str, **others: Any) -> tuple[list[Any], list[int]]:
    """What a second engine says, and finds, that was there before the first one has computed anything."""
    plain = truth(model)
    with built(options(model, kv_store=url, **others)) as second, built(options(model, kv_store=url)) as first:
        said, cold = ask(first)
        assert said == plain and cold[0] == 0
        said, warm = ask(second)
        assert said == plain
        counters = tier_of(second).counters
        assert counters.loaded and not counters.failed
        return said, warm


def save(family: str, place: Path) -> Path:
    place.mkdir()
    tiny.save(family, place)
    return place


@pytest.mark.parametrize("family", KINDS)
def test_what_one_engine_computes_another_loads(family: str, tmp_path: Path, redis: RedisServer) -> None:
    _, warm = both(save(family, tmp_path / "model"), redis.url)
    assert warm[0] >= 64 and warm[2] >= 48, warm


@pytest.mark.parametrize("family", ["qwen3", "qwen3-next"])
def test_an_object_store_too(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_objects(monkeypatch) as objects:
        _, warm = both(save(family, tmp_path / "model"), "s3://blocks/of/ours")
        assert warm[0] >= 64 and warm[2] >= 48, warm
        assert all(
            one.object_name.startswith("of/ours/penstock/") for one in objects.list_objects("blocks", recursive=True)
        )


@pytest.mark.parametrize("family", ["qwen3", "qwen3-next"])
def test_an_lmcache_server_too(family: str, tmp_path: Path) -> None:
    with running_lmcache() as url:
        _, warm = both(save(family, tmp_path / "model"), url)
        assert warm[0] >= 64 and warm[2] >= 48, warm
        assert all(world == 1 and kind == "uint8" for _, world, _, _, kind in LMCacheServer.values)


def test_mooncake_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_mooncake(monkeypatch) as url:
        _, warm = both(folder, url)
        assert warm[0] >= 64 and warm[2] >= 48, warm


@pytest.mark.parametrize("how", ["killed", "another", "emptied", "damaged"])
def test_whatever_becomes_of_an_lmcache_server_answers_stay(how: str, folder: Path) -> None:
    plain = truth(folder)
    with running_lmcache() as url, built(options(folder, kv_store=url)) as engine:
        ask(engine)
        engine.scheduler.cache.tree.clear()
        if how == "another":
            LMCacheServer.values.update(dict.fromkeys(LMCacheServer.values, b"GET / HTTP/1.1" * 20))
        elif how == "emptied":
            LMCacheServer.values.clear()
        elif how == "damaged":
            for name, value in LMCacheServer.values.items():
                LMCacheServer.values[name] = value[:-1] + bytes([value[-1] ^ 1])
        else:
            store_of(engine)._remote.interrupt()
        assert ask(engine)[0] == plain
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"lm://127.0.0.1:{silent.getsockname()[1]}"
        threading.Thread(target=lambda: silent.accept()[0].sendall(b"HTTP/1.1 400 no\r\n" * 9), daemon=True).start()
        with built(options(folder, kv_store=url)) as engine:
            assert ask(engine)[0] == plain


def test_another_process_finds_it(folder: Path, redis: RedisServer) -> None:
    plain = truth(folder)
    program = (
        "import sys; from tests.engine import test_shared_store as here\n"
        "with here.built(here.options(sys.argv[1], kv_store=sys.argv[2])) as engine: here.ask(engine)"
    )
    with built(options(folder, kv_store=redis.url)) as second:
        subprocess.run([sys.executable, "-c", program, str(folder), redis.url], check=True, timeout=2 * DEADLINE_S)
        said, warm = ask(second)
    assert said == plain and warm[0] >= 64


def test_what_came_from_it_stays_on_the_own_disk(folder: Path, redis: RedisServer, tmp_path: Path) -> None:
    plain = truth(folder)
    given = options(folder, kv_store=redis.url, kv_disk=1 << 24, kv_disk_path=str(tmp_path / "kv"), kv_ram=1 << 20)
    with built(options(folder, kv_store=redis.url)) as first:
        ask(first)
    with built(given) as second:
        assert ask(second)[1][0] >= 64
        loaded = tier_of(second).counters.loaded
    redis.client().flushall()
    with built(given) as again:
        said, warm = ask(again)
        assert said == plain and warm[0] >= 64 and loaded and tier_of(again).counters.loaded


def test_nobody_finds_what_is_not_theirs(folder: Path, redis: RedisServer, tmp_path: Path) -> None:
    """Salts, owners, and models: what is written by one is no hit of another, and each finds its own."""
    rng = random.Random(5)
    whose = [(salt, owner) for salt in ("", "s", "t") for owner in ("", "o")]
    known: set[tuple[str, str]] = set()
    with built(options(folder, kv_store=redis.url)) as one, built(options(folder, kv_store=redis.url)) as two:
        for number in range(40):
            salt, owner = rng.choice(whose)
            engine = rng.choice((one, two))
            _, cached = answers(engine, [next(asked(f"{number}", salt=salt, owner=owner))][:1])
            sent(engine)
            assert (cached[0] > 0) == ((salt, owner) in known), (number, salt, owner)
            known.add((salt, owner))
    other = tmp_path / "other"
    other.mkdir()
    tiny.save("qwen3", other, rms_norm_eps=1e-4)
    with built(options(other, kv_store=redis.url)) as engine:
        assert ask(engine)[1][0] == 0
    with built(options(folder, kv_store=redis.url, kv_cache_dtype="int8")) as engine:
        assert ask(engine)[1][0] == 0


def test_encrypted_blocks_are_only_for_who_has_the_key(
    folder: Path, redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = truth(folder)
    given = options(folder, kv_store=redis.url, kv_disk=1 << 24, kv_disk_path=str(tmp_path / "kv"))
    with built(replace(given, kv_store=None)):
        pass
    (clear,) = (tmp_path / "kv").rglob("index")
    monkeypatch.setenv("PENSTOCK_KV_KEY", PLAIN_KEY)
    with built(given) as engine:
        assert ask(engine)[0] == plain
    assert not clear.exists(), "nothing stays in clear"
    index = next((tmp_path / "kv").rglob("index")).read_bytes()
    assert b"[" not in index and len(index) > 1000
    monkeypatch.setenv("PENSTOCK_KV_KEY", OTHER_KEY)
    with built(options(folder, kv_store=redis.url)) as engine:
        assert ask(engine) == (plain, [0, 40, 0, 68])
    monkeypatch.delenv("PENSTOCK_KV_KEY")
    with built(options(folder, kv_store=redis.url)) as engine:
        assert ask(engine)[1][0] == 0
    monkeypatch.setenv("PENSTOCK_KV_KEY", PLAIN_KEY)
    with built(given) as engine:  # from its disk
        said, warm = ask(engine)
        assert said == plain and warm[0] >= 64 and not tier_of(engine).counters.failed
    with built(options(folder, kv_store=redis.url)) as engine:
        said, warm = ask(engine)
        assert said == plain and warm[0] >= 64 and not tier_of(engine).counters.failed


# -- a store that fails ------------------------------------------------------------------------------------------------


def damaged(server: RedisServer, share: float) -> None:
    rng = random.Random(1)
    client = server.client()
    for name in client.keys("*"):
        value = bytearray(client.get(name))
        for _ in range(max(1, int(len(value) * share))):
            value[rng.randrange(len(value))] ^= rng.randrange(1, 256)
        client.set(name, bytes(value))


def lost(server: RedisServer) -> None:
    client = server.client()
    for number, name in enumerate(sorted(client.keys("*"))):
        if number % 3 == 0:
            client.delete(name)


def truncated(server: RedisServer) -> None:
    client = server.client()
    for name in client.keys("*"):
        client.set(name, client.get(name)[: random.Random(name).randrange(200)])


def exchanged(server: RedisServer) -> None:
    client = server.client()
    names = sorted(client.keys("*"))
    values = [client.get(name) for name in names]
    for name, value in zip(names, (*values[1:], values[0]), strict=True):
        client.set(name, value)


def of_another_kind(server: RedisServer) -> None:
    client = server.client()
    for name in client.keys("*"):
        client.delete(name)
        client.rpush(name, "x")


BROKEN = {
    "killed": lambda server: server.kill(), "flushed": lambda server: server.client().flushall(),
    "damaged": lambda server: damaged(server, 0.01), "lost": lost, "truncated": truncated, "exchanged": exchanged,
    "another kind": of_another_kind,
}  # fmt: skip


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("known", [False, True])
def test_whatever_becomes_of_it_answers_stay(how: str, known: bool, folder: Path, redis: RedisServer) -> None:
    """Before a prefix was looked up, and after that was found and has not been loaded."""
    plain = truth(folder)
    with built(options(folder, kv_store=redis.url)) as first:
        ask(first)
    with built(options(folder, kv_store=redis.url)) as second:
        if known:
            ask(second)
            second.scheduler.cache.tree.clear()
        BROKEN[how](redis)
        said, _ = ask(second)
        assert said == plain
        second.scheduler.cache.tree.clear()
        assert ask(second, "efgh")[0] == plain
        counters = tier_of(second).counters
        assert counters.failed or how in ("killed", "flushed", "lost")


def test_a_store_that_does_not_answer_holds_nobody_up(
    folder: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in (
        (shared_tier, "_MOST_PATIENCE"),
        (shared_tier, "_LEAST_PATIENCE"),
        (bounded_tier, "_LEAST_PATIENCE"),
    ):
        monkeypatch.setattr(module, name, 0.05)
    monkeypatch.setattr(redis_store, "ANSWER_S", 1.0)
    monkeypatch.setattr(shared, "_CLOSING_S", 0.1)
    plain = truth(folder)
    with built(options(folder, kv_store=redis.url)) as first:
        ask(first)
    engine, _ = build_engine(options(folder, kv_store=redis.url))
    os.kill(redis.process.pid, signal.SIGSTOP)
    try:
        assert answers(engine, list(asked("abcd")))[0] == plain
        engine.close()
    finally:
        os.kill(redis.process.pid, signal.SIGCONT)


def test_a_store_that_trickles_is_given_up(
    folder: Path, redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers before each deadline, and never ends; what lies on the own disk is loaded all the same."""
    monkeypatch.setattr(bounded_tier, "_LEAST_PATIENCE", 0.05)
    monkeypatch.setattr(shared, "WHOLE_ANSWER_S", 0.2)
    monkeypatch.setattr(shared, "_WATCHED_S", 0.05)
    monkeypatch.setattr(shared, "_CLOSING_S", 0.1)
    plain = truth(folder)
    with built(options(folder, kv_store=redis.url)) as first:
        ask(first)
    with slowed(redis.port, 5_000) as port:
        given = options(
            folder, kv_store=f"redis://127.0.0.1:{port}/0", kv_disk=1 << 24, kv_disk_path=str(tmp_path / "kv")
        )
        with built(given) as engine:
            said, _ = answers(engine, list(asked("abcd")))
            assert said == plain
            until = time.monotonic() + DEADLINE_S
            while not store_of(engine)._rests.resting or store_of(engine)._calls:
                assert time.monotonic() < until
                time.sleep(0.01)
            engine.scheduler.cache.tree.clear()
            said, warm = answers(engine, list(asked("efgh")))
            assert said == plain and warm[0] >= 64


def test_a_full_store_refuses_and_nothing_is_wrong(
    folder: Path, redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    plain = truth(folder)
    with built(options(folder, kv_store=redis.url)) as first, built(options(folder, kv_store=redis.url)) as second:
        assert answers(first, list(asked("a")))[0] == plain[:6]
        sent(first)
        held = redis.client().dbsize()
        redis.client().config_set("maxmemory", 1)
        assert ask(first)[0] == plain and redis.client().dbsize() == held
        assert "cannot be sent to the shared store" in caplog.text
        said, warm = ask(second)
        assert said == plain and warm[0] >= 64  # what was there before


def test_a_store_that_comes_later_is_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.transfer.remote._FIRST_REST_S", 0.0)
    plain = truth(folder)
    with running_redis(tmp_path) as server:
        server.kill()
        with built(options(folder, kv_store=server.url)) as engine:
            assert "starts without it" in caplog.text
            assert ask(engine)[0] == plain
            server.start()
            engine.scheduler.cache.clear()
            until = time.monotonic() + DEADLINE_S
            while not server.client().dbsize():
                assert time.monotonic() < until
                engine.scheduler.cache.clear()
                assert ask(engine, "efgh")[0] == plain


# -- what it is called -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url, told",
    [
        ("redis//x", "allowed: redis://HOST:6379/0"),
        ("memcached://x", "--kv-store is 'memcached://x'; allowed: redis://"),
        ("redis://:secret@x/abc", "the number of a database"),
        ("redis://x:99999/0", "Port out of range"),
        ("lm://x:1/2", "a host and a port alone"),
        ("nixl://x", "not spoken here"),
        ("s3://", "no more than a path"),
        ("s3://Bucket_/x", "names no bucket"),
    ],
)
def test_what_is_no_address_is_refused(url: str, told: str, folder: Path) -> None:
    with pytest.raises(ConfigError) as error:
        build_engine(options(folder, kv_store=url))
    assert told in str(error.value) and "secret" not in str(error.value)


def test_a_wrong_password_is_told_at_the_start(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_redis(tmp_path, "--requirepass", "right") as server:
        url = server.url.replace("//", "//:wrong@")
        with pytest.raises(ConfigError, match=r"--kv-store redis://….* refuses the name or password") as error:
            build_engine(options(folder, kv_store=url))
        assert "wrong" not in str(error.value).replace("WRONGPASS", "")
        monkeypatch.setenv("PENSTOCK_KV_STORE_PASSWORD", "right")
        with built(options(folder, kv_store=server.url)) as engine:
            ask(engine)
        assert server.client().dbsize()


def test_what_is_not_installed_or_not_there_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(url: str, told: str) -> None:
        with pytest.raises(ConfigError, match=told):
            build_engine(options(folder, kv_store=url))

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    refused("s3://blocks", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    with running_objects(monkeypatch):
        refused("s3://others", "there is no bucket others; make it first")
    with monkeypatch.context() as without:
        for package in ("redis", "minio"):
            without.setitem(sys.modules, package, None)
        refused(f"redis://127.0.0.1:{free_port()}", r"pip install 'penstock-llm\[redis\]'")
        refused("s3://blocks", r"pip install 'penstock-llm\[s3\]'")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "cryptography.exceptions", None)
        without.setenv("PENSTOCK_KV_KEY", PLAIN_KEY)
        refused(f"redis://127.0.0.1:{free_port()}", r"pip install 'penstock-llm\[encryption\]'")
    monkeypatch.setenv("PENSTOCK_KV_KEY", "short")
    refused(f"redis://127.0.0.1:{free_port()}", "PENSTOCK_KV_KEY is unusable; allowed: 32 random bytes")
