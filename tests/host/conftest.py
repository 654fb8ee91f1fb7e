"""Fixtures of the host's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from penstock.config.options import EngineOptions
from penstock.engine.text_pipeline import TextPipeline
from penstock.host.process_client import ProcessClient
from tests.engine.support import null_process
from tests.host.support import Engines
from tests.server.support import engine_threads, until


@pytest.fixture(scope="session")
def text() -> TextPipeline:
    """The text side of the bundled model."""
    return TextPipeline.load("penstock-concierge")


@pytest.fixture
def engines(text: TextPipeline) -> Iterator[Engines]:
    made = Engines(text)
    yield made
    for gate in made.gates.values():
        gate.set()
    until(lambda: not engine_threads())
    assert not made.live


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-in interpreter lies; every process started in the test runs it."""
    monkeypatch.setattr("penstock.host.child.sys.executable", str(null_process(tmp_path)))
    return tmp_path


@pytest.fixture
async def client(folder: Path) -> AsyncIterator[ProcessClient]:
    """Of an engine process that has started."""
    client = ProcessClient(EngineOptions(model="null"))
    await client.start()
    yield client
    await client.close()
