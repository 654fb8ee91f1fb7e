"""Fixtures of the server's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.engine.text_pipeline import TextPipeline
from tests.server.support import Running, ScriptedClient, running, script_of


@pytest.fixture(scope="session")
def text(shared_data: Path) -> TextPipeline:
    """The text side of a small chat model."""
    return TextPipeline.load(str(shared_data / "models" / "penstock-concierge"))


@pytest.fixture
def client(text: TextPipeline) -> ScriptedClient:
    return ScriptedClient(script_of(text), text.vocab_size)


@pytest.fixture
def server(client: ScriptedClient, text: TextPipeline) -> Iterator[Running]:
    with running(client, text) as server:
        yield server
