"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from penstock.engine.thread_client import ThreadClient
from tests.engine.support import null_engine


@pytest.fixture
async def null_client() -> AsyncIterator[ThreadClient]:
    """A started ThreadClient over the null engine."""
    client = ThreadClient(null_engine)
    await client.start()
    yield client
    await client.close()
