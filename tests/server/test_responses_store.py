"""Where responses are kept: limits, owners, files that are not ours, and what a crash leaves behind."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.config import limits
from penstock.config.errors import ConfigError, ParameterError
from penstock.server.store import Record, ResponseStore


def record(name: str, text: str = "Hello", status: str = "completed") -> Record:
    item = {"id": f"msg_{name}", "type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    return Record({"id": name, "status": status, "error": None, "output": []}, [item], (b"data: 1\n\n", b"data: 2\n\n"))


async def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "new" / "responses.db"
    store = ResponseStore(str(file))
    await store.put("me", record("resp_1"))
    await store.put("me", record("resp_1", "Another"))
    assert await store.get("me", "resp_1") == record("resp_1", "Another")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    await store.aclose()
    await store.aclose()
    again = ResponseStore(str(file))
    assert await again.get("me", "resp_1") == record("resp_1", "Another")
    await again.aclose()


async def test_processes_of_one_server_share_a_file(tmp_path: Path) -> None:
    """What one keeps another finds; one that is started again changes nothing of what is there."""
    file = str(tmp_path / "responses")
    stores = [ResponseStore(file, shared=True, max_bytes=40_000) for _ in range(3)]
    for number, store in enumerate(stores):
        await store.put("me", record(f"resp_{number}", status="queued"), running=True)
    again = ResponseStore(file, shared=True)
    found = [await again.found("me", f"resp_{number}") for number in range(3)]
    assert [one.object["status"] for one in found] == ["queued"] * 3
    for number in range(3, 60):  # by turns: the bound is that of all together
        await stores[number % 3].put("me", record(f"resp_{number}", os.urandom(1000).hex()))
    kept = [number for number in range(60) if await again.get("me", f"resp_{number}")]
    assert kept == list(range(kept[0], 60))
    assert 20 < len(kept) < 40
    for store in (*stores, again):
        await store.aclose()


def test_a_process_makes_no_folder_anew(tmp_path: Path) -> None:
    """Its host has made it, or has gone and taken it along."""
    with pytest.raises(ConfigError, match="cannot be used"):
        ResponseStore(str(tmp_path / "gone" / "responses"), shared=True)
    assert not (tmp_path / "gone").exists()


async def test_owners_see_their_own_alone() -> None:
    store = ResponseStore()
    await store.put("me", record("resp_1"))
    assert await store.get("you", "resp_1") is None
    assert not await store.delete("you", "resp_1")
    assert await store.delete("me", "resp_1")
    assert not await store.delete("me", "resp_1")
    await store.aclose()


async def test_the_oldest_make_room() -> None:
    store = ResponseStore(max_bytes=30_000)
    for number in range(50):
        await store.put("me", record(f"resp_{number}", os.urandom(1000).hex()))
    kept = [number for number in range(50) if await store.get("me", f"resp_{number}")]
    assert kept == list(range(kept[0], 50))
    assert 10 < len(kept) < 20
    for number in kept:
        await store.delete("me", f"resp_{number}")
    assert store._bytes == 0
    await store.put("me", record("resp_big", os.urandom(50_000).hex()))
    assert await store.get("me", "resp_big") is None
    await store.aclose()


async def test_nobody_loses_responses_to_the_room_another_takes() -> None:
    store = ResponseStore(max_bytes=20_000)
    await store.put("me", record("resp_mine", os.urandom(1000).hex()))
    for number in range(50):
        await store.put("you", record(f"resp_{number}", os.urandom(1000).hex()))
    assert await store.get("me", "resp_mine") is not None
    assert await store.get("you", "resp_0") is None
    await store.aclose()


async def test_items_are_given_out_up_to_a_bodys_size(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore()
    for number in range(3):
        await store.put("me", record(f"resp_{number}", os.urandom(1000).hex()))
    ids = [f"msg_{number}_0" for number in range(3)]
    assert await store.items("me", ids) is not None
    monkeypatch.setattr(limits, "MAX_BODY_BYTES", 5000)
    with pytest.raises(ParameterError, match="send the items themselves"):
        await store.items("me", ids)
    await store.aclose()


async def test_what_is_old_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = ResponseStore(max_age=100), time.time()
    await store.put("me", record("resp_1"))
    monkeypatch.setattr(time, "time", lambda: now + 99)
    assert await store.get("me", "resp_1")
    monkeypatch.setattr(time, "time", lambda: now + 101)
    assert await store.get("me", "resp_1") is None
    await store.put("me", record("resp_2"))
    assert await store._run(lambda: store._database.execute("SELECT id FROM responses").fetchall()) == [("resp_2",)]
    await store.aclose()


async def test_deleted_text_leaves_the_file(tmp_path: Path) -> None:
    file, text = tmp_path / "responses.db", os.urandom(500).hex()
    store = ResponseStore(str(file))
    await store.put("me", record("resp_1", text))
    blob = (await store._run(lambda: store._database.execute("SELECT input FROM responses").fetchone()))[0]
    await store.delete("me", "resp_1")
    await store.aclose()
    assert blob not in file.read_bytes()


async def test_what_ran_when_the_server_ended_has_failed(tmp_path: Path) -> None:
    store = ResponseStore(str(tmp_path / "responses.db"))
    await store.put("me", record("resp_1", status="in_progress"), running=True)
    await store.aclose()
    again = ResponseStore(str(tmp_path / "responses.db"))
    found = await again.get("me", "resp_1")
    assert found is not None
    assert (found.object["status"], found.object["error"]["code"]) == ("failed", "server_error")
    await again.aclose()


def damaged(file: Path) -> None:
    file.write_bytes(b"This is no database. " * 100)


def of_another_program(file: Path) -> None:
    with sqlite3.connect(file) as database:
        database.execute("CREATE TABLE mine (x)")
    database.close()


def half(file: Path) -> None:
    store = ResponseStore(str(file))

    async def fill() -> None:
        for number in range(50):
            await store.put("", record(f"resp_{number}", os.urandom(2000).hex()))
        await store.aclose()

    asyncio.run(fill())
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 8 * 4] + os.urandom(len(data) // 2))


def folder(file: Path) -> None:
    file.mkdir()


@pytest.mark.parametrize("make", [damaged, of_another_program, half, folder])
def test_files_that_cannot_be_used_are_named_and_left_alone(tmp_path: Path, make: Any) -> None:
    file = tmp_path / "responses.db"
    make(file)
    before = file.read_bytes() if file.is_file() else b""
    with pytest.raises(ConfigError, match=r"responses\.db.*--responses-store"):
        ResponseStore(str(file))
    assert (file.read_bytes() if file.is_file() else b"") == before


async def test_a_file_serves_one_server(tmp_path: Path) -> None:
    store = ResponseStore(str(tmp_path / "responses.db"))
    await store.put("me", record("resp_1"))
    with pytest.raises(ConfigError, match="locked"):
        ResponseStore(str(tmp_path / "responses.db"))
    await store.aclose()


async def test_writes_while_others_read() -> None:
    store = ResponseStore()
    await asyncio.gather(*(store.put("me", record(f"resp_{number}")) for number in range(200)))
    found = await asyncio.gather(*(store.get("me", f"resp_{number}") for number in range(200)))
    assert all(found)
    await store.aclose()


async def test_a_file_of_the_version_before_is_taken_over(tmp_path: Path) -> None:
    file = tmp_path / "responses.db"
    store = ResponseStore(str(file))
    await store.put("me", record("resp_1"))
    await store.aclose()
    with sqlite3.connect(file) as database:
        database.executescript(
            """
            CREATE TABLE older (
                id TEXT PRIMARY KEY, owner TEXT NOT NULL, created REAL NOT NULL, running INTEGER NOT NULL,
                size INTEGER NOT NULL, response BLOB NOT NULL, input BLOB NOT NULL, events BLOB
            ) WITHOUT ROWID;
            INSERT INTO older SELECT id, owner, created, running, size, response, input, events FROM responses;
            DROP TABLE responses;
            ALTER TABLE older RENAME TO responses;
            CREATE INDEX by_age ON responses (created);
            CREATE INDEX by_owner ON responses (owner, size);
            PRAGMA user_version = 1;
            """
        )
    database.close()
    for _ in range(2):
        again = ResponseStore(str(file))
        assert await again.get("me", "resp_1") == record("resp_1")
        await again.aclose()


async def test_an_id_is_its_owners_own() -> None:
    store = ResponseStore()
    for owner in ("me", "you"):
        await store.put(owner, record("chatcmpl-1", f"of {owner}"))
    assert await store.get("me", "chatcmpl-1") == record("chatcmpl-1", "of me")
    assert await store.delete("you", "chatcmpl-1")
    assert await store.get("me", "chatcmpl-1") is not None
    await store.aclose()


async def test_what_can_be_listed_is_found_by_what_it_is_about() -> None:
    store = ResponseStore()
    for number in range(4):
        about = {"created": 10.0 - number, "model": "ab"[number % 2], "metadata": {"of": str(number), "a.b": "x"}}
        await store.put("me", Record({"id": f"chatcmpl-{number}"}, [], about=about))
    await store.put("you", Record({"id": "chatcmpl-you"}, [], about={"created": 1.0, "model": "a", "metadata": {}}))
    await store.put("me", record("resp_1"))
    assert await store.listed("me", "chatcmpl-", None, {}) == [f"chatcmpl-{number}" for number in (3, 2, 1, 0)]
    assert await store.listed("me", "chatcmpl-", "a", {}) == ["chatcmpl-2", "chatcmpl-0"]
    assert await store.listed("me", "chatcmpl-", None, {"of": "1", "a.b": "x"}) == ["chatcmpl-1"]
    assert await store.listed("me", "chatcmpl-", None, {"of": "1", "a.b": "y"}) == []
    await store.aclose()


async def test_many_small_records_make_room_for_a_large_one_of_another() -> None:
    store = ResponseStore(max_bytes=400_000)
    for number in range(500):
        await store.put("me", record(f"resp_{number}"))
    held = store._bytes
    assert 500 * 512 < held < 400_000
    large = os.urandom(150_000).hex()
    await store.put("you", record("resp_you", large))
    assert await store.get("you", "resp_you")
    assert store._bytes <= 400_000 and store._bytes == store._held()
    kept = [bool(await store.get("me", f"resp_{number}")) for number in range(500)]
    assert kept == sorted(kept) and kept[-1] and not kept[0]  # the oldest have gone
    await store.aclose()
