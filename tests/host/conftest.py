"""Fixtures of the host's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.engine.text_pipeline import TextPipeline
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
