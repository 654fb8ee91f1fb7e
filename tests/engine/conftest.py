"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from penstock.engine.thread_client import ThreadClient
from penstock.structured import grammar_compiler
from tests.engine.support import Slow, null_engine


@pytest.fixture
async def null_client() -> AsyncIterator[ThreadClient]:
    """A started ThreadClient over the null engine."""
    client = ThreadClient(null_engine)
    await client.start()
    yield client
    await client.close()


@pytest.fixture
async def slow_client() -> AsyncIterator[ThreadClient]:
    """As null_client, but slow enough that a long answer is never complete before the test has acted on it."""
    client = ThreadClient(lambda: null_engine(wrap=lambda runner: Slow(runner, 0.02)))
    await client.start()
    yield client
    await client.close()


@pytest.fixture
def little_fuel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits within which a long answer of `test_grammars.WORDS` fails and the beginning of one does not."""
    from llguidance import LLParserLimits

    scarce = LLParserLimits(step_lexer_fuel=100_000, max_lexer_states=16_000, verbose_errors=False)
    monkeypatch.setattr(grammar_compiler, "parser_limits", lambda: scarce)
