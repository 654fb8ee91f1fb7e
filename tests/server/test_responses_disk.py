"""Responses kept on a disk that is full or fails: sentences instead of tracebacks, and counts that stay right."""

from __future__ import annotations

import logging
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config.options import ServerOptions
from penstock.engine.text_pipeline import TextPipeline
from penstock.server.errors import HttpError
from penstock.server.store import ResponseStore
from tests.server.support import running
from tests.server.test_responses_store import record


@contextmanager
def no_growing(limit: int = 0) -> Iterator[None]:
    """No file of this process can grow beyond `limit` bytes meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def counted(store: ResponseStore) -> tuple[int, int]:
    """The bytes it believes to hold, and those it does."""
    query = "SELECT COALESCE(SUM(size), 0) FROM responses"
    return store._bytes, (await store._run(lambda: store._database.execute(query).fetchone()))[0]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


async def test_counts_stay_right_when_writes_fail(tmp_path: Path) -> None:
    store = ResponseStore(str(tmp_path / "responses.db"), max_bytes=100_000)
    for number in range(9):
        await store.put("me", record(f"resp_{number}", os.urandom(5000).hex()))
    before = await counted(store)
    assert before[0] == before[1] > 50_000
    with no_growing():
        for name in ("resp_1", "resp_new"):
            with pytest.raises(HttpError) as raised:
                await store.put("me", record(name, os.urandom(30_000).hex()))
            assert (raised.value.status, raised.value.code) == (503, "storage_unavailable")
    assert await counted(store) == before
    assert await store.get("me", "resp_1") and not await store.get("me", "resp_new")
    await store.put("me", record("resp_1", os.urandom(5000).hex()))
    assert (await counted(store))[0] == (await counted(store))[1]
    for number in range(9):
        assert await store.delete("me", f"resp_{number}")
    assert await counted(store) == (0, 0)
    await store.aclose()


async def test_a_full_disk_is_named_and_spoils_nothing(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1792 * 2**10))
    store = ResponseStore(str(small_disk / "responses.db"))
    kept = 0
    while await store.keep("me", record(f"resp_{kept}", os.urandom(4000).hex())) and kept < 100:
        kept += 1
    with pytest.raises(HttpError) as raised:
        await store.put("me", record("resp_more", os.urandom(4000).hex()))
    assert (raised.value.status, raised.value.code) == (507, "storage_full")
    held = await counted(store)
    assert held[0] == held[1] and 0 < kept < 100
    try:
        ballast.unlink()
        deleted = [await store.delete("me", f"resp_{number}") for number in range(kept)]
        assert all(deleted) and await counted(store) == (0, 0)
        await store.put("me", record("resp_again", os.urandom(4000).hex()))
    finally:
        await store.aclose()


def test_deleting_where_nothing_can_be_written_is_no_500(
    text: TextPipeline, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = ServerOptions(responses_store=str(tmp_path / "responses.db"))
    with running(text, options) as server:
        made: dict[str, Any] = httpx.post(f"{server.url}/v1/responses", json={"input": "Hello"}).json()
        path = f"{server.url}/v1/responses/{made['id']}"
        with no_growing():
            refused = httpx.delete(path)
            answer = httpx.post(f"{server.url}/v1/responses", json={"input": "Hello"}).json()
        assert refused.status_code == 503, refused.text
        assert refused.json()["error"]["code"] == "storage_unavailable" and refused.headers["Retry-After"]
        assert (answer["status"], answer["store"]) == ("completed", False)
        assert httpx.get(path).json()["id"] == made["id"]
        assert httpx.delete(path).json()["deleted"] and httpx.get(path).status_code == 404
    assert not any(entry.exc_info for entry in caplog.records if entry.levelno >= logging.ERROR)
