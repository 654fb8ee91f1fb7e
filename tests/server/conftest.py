"""Fixtures of the server's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.config.options import EngineOptions
from penstock.engine.api import EngineState
from penstock.engine.build import build_engine
from penstock.engine.text_pipeline import TextPipeline
from penstock.engine.thread_client import ThreadClient
from tests.host.support import Engines
from tests.server.support import Running, Serving, running, serving, until


@pytest.fixture(scope="session")
def text(shared_data: Path) -> TextPipeline:
    """The text side of a small chat model."""
    return TextPipeline.load(str(shared_data / "models" / "penstock-concierge"))


@pytest.fixture
def engines(text: TextPipeline) -> Iterator[Engines]:
    """Engines of a server of many models, which have all ended when the test has."""
    made = Engines(text)
    yield made
    until(lambda: not made.live)


@pytest.fixture(scope="module")
def module_server(text: TextPipeline) -> Iterator[Running]:
    with running(text) as server:
        yield server


@pytest.fixture(scope="module")
def concierge(text: TextPipeline) -> Iterator[Serving]:
    """A server of the bundled model, computed in this process."""
    client = ThreadClient(lambda: build_engine(EngineOptions(model="penstock-concierge", threads=1)))
    with serving(client, text) as server:
        until(lambda: client.state is EngineState.READY)
        yield server


@pytest.fixture
def server(module_server: Running) -> Running:
    """A running server whose runner has its default behaviour."""
    until(lambda: module_server.lifecycle.in_flight == 0)  # what a test left in the background has not begun, perhaps
    module_server.until_idle()
    module_server.runner.reset()
    return module_server
