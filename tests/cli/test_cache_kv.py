"""`penstock cache kv`: what people see of --kv-disk, and do with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.kv.node import Namespace
from penstock.core.policies.bounded_tier import Entry
from penstock.core.request import EngineRequest
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.kernels.cpu import native
from penstock.transfer.disk import DiskStore
from penstock.transfer.sealing import sealing_of
from tests.models import tiny

NAME = f"a-model-{'0' * 8}-{'a' * 16}"


class Cache(Protocol):
    def __call__(self, *arguments: str, code: int = 0) -> str: ...


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    environment = {"PENSTOCK_KV_DISK_PATH": str(tmp_path / "kv"), "COLUMNS": "200"}

    def call(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(app, ["cache", "kv", *arguments], env=environment)
        assert result.exit_code == code, result.output
        return result.stdout + result.stderr

    return call


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    if not native.available():
        pytest.skip("the native library is not built")
    tiny.save("qwen3", tmp_path / "tiny")
    given = EngineOptions(
        model=str(tmp_path / "tiny"), device="cpu", pack_cache="off", threads=1, max_num_seqs=2, kv_blocks=60,
        max_model_len=96, block_size=8, kv_disk=4 << 20, kv_disk_path=str(tmp_path / "kv"), served_model_name="a/tiny",
    )  # fmt: skip
    engine, _ = build_engine(given)
    return engine


def test_what_an_engine_keeps_is_listed_checked_and_removed(engine: Engine, cache: Cache, tmp_path: Path) -> None:
    try:
        prompt = tuple(tiny.prompt(40, 1))
        for salt in ("pepper", "cumin"):
            engine.add(EngineRequest(salt, prompt, SamplingParams(max_tokens=1), cache_salt=salt, owner="0wner" * 8))
            while engine.has_work:
                engine.step()
        while engine.prepare() and engine.scheduler.cache.transfers.owed:
            pass
        (row,) = json.loads(cache("list", "--json"))["models"]
        assert (row["model"], row["in_use"]) == ("a/tiny", True)
        assert "in use by a running engine" in cache("rm", "a/tiny", code=1)
        assert "in use by a running engine" in cache("verify", "a/tiny", code=1)
        assert "is left out: it is in use" in cache("verify")
    finally:
        engine.close()
    listed = json.loads(cache("ls", "--json"))
    (row,) = listed["models"]
    assert listed["folder"] == str(tmp_path / "kv")
    assert not row["in_use"] and row["tokens"] == 80 and row["blocks"] == 10 and row["bytes"] >= 10 * 4096
    assert "a/tiny" in cache("list") and "just now" in cache("list")
    shown = cache("show", "a/tiny")
    assert f"{row['name']}: 2 prefixes, 80 tokens in 10 blocks" in shown
    (told,) = json.loads(cache("show", "--json"))["models"]
    assert told["longest"] == [{"tokens": 40, "blocks": 5}] * 2 and told["block_size"] == 8
    everything = shown + json.dumps(told) + cache("list") + cache("list", "--json")
    for secret in ("pepper", "cumin", "0wner", ", ".join(map(str, prompt[:3]))):
        assert secret not in everything
    assert f"{row['name']}: 10 whole, 0 damaged, 0 unreadable" in cache("verify", row["name"])
    blocks = tmp_path / "kv" / row["name"] / "blocks"
    data = bytearray(blocks.read_bytes())
    data[100] ^= 1
    blocks.write_bytes(data)
    (verdict,) = json.loads(cache("verify", "--json", code=1))["models"]
    assert (verdict["whole"], verdict["damaged"], verdict["first"]) == (9, 1, "place 1: it is damaged")
    assert cache("rm", "a/tiny").startswith(f"removed {row['name']} (")
    assert json.loads(cache("list", "--json"))["models"] == []


def test_what_is_encrypted_is_shown_to_who_has_the_key(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, place = "0f" * 32, tmp_path / "kv" / NAME
    sealing = sealing_of(bytes.fromhex(key))
    store = DiskStore(place, (100,), (range(1, 3),), model="m", block_size=2, sealing=sealing)
    one = Entry(0, b"d" * 16, b"", Namespace("", ("pepper", "0wner")), (7, 8))
    store.describe(1, one)
    store.write(1, one, (b"what was said" * 7 + b"123456789",))
    store.close()
    written = b"".join(path.read_bytes() for path in place.iterdir())
    assert not any(text in written for text in (b"what was said", b"pepper", b"0wner", b"[7,8]"))
    for given in ("", "f0" * 32):
        monkeypatch.setenv("PENSTOCK_KV_KEY", given)
        (row,) = json.loads(cache("list", "--json"))["models"]
        assert row["encrypted"] and row["tokens"] is None and "encrypted" in cache("list")
        for verb in ("show", "verify"):
            assert "set it to the key that the engine had" in cache(verb, "m", code=1)
    monkeypatch.setenv("PENSTOCK_KV_KEY", "short")
    assert "PENSTOCK_KV_KEY is unusable" in cache("list", code=1)
    monkeypatch.setenv("PENSTOCK_KV_KEY", key)
    assert "1 prefix, 2 tokens in 1 blocks" in cache("show", "m")
    assert "1 whole, 0 damaged" in cache("verify", "m")
    monkeypatch.delenv("PENSTOCK_KV_KEY")
    assert cache("rm", "m").startswith(f"removed {NAME}")


def test_wrong_names_and_nothing_at_all(cache: Cache, tmp_path: Path) -> None:
    assert "0 B in" in cache("list") and cache("verify") == cache("show") == ""
    assert "name what to remove, or say --all." in cache("rm", code=2)
    DiskStore(tmp_path / "kv" / NAME, (100,), (range(1, 3),), model="a\x1b[31mmodel", block_size=2).close()
    held = DiskStore(tmp_path / "kv" / f"b-{NAME[2:]}", (100,), (range(1, 3),), model="other", block_size=2)
    assert "Did you mean 'other'?" in cache("show", "othr", code=1)
    assert "\x1b" not in cache("list") and "�[31mmodel" in cache("list")
    last = cache("rm", "--all", code=1)
    assert f"removed {NAME}" in last and f"b-{NAME[2:]} is in use" in last
    held.close()
    (tmp_path / "kv" / f"b-{NAME[2:]}" / "index").chmod(0o644)
    (tmp_path / "kv" / f"b-{NAME[2:]}" / "index").unlink()
    (tmp_path / "kv" / f"b-{NAME[2:]}" / "index").mkdir()
    assert "cannot be read or written" in cache("list", code=1)
