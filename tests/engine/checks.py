"""What both homes of an engine, a thread and a process, must do alike."""

from __future__ import annotations

import asyncio

import pytest

from penstock.config.errors import ContextLengthError
from penstock.engine.streams import StreamTable
from penstock.engine.thread_client import ThreadClient
from penstock.host.process_client import ProcessClient
from tests.engine.support import read, request, tokens_of


def streams_of(client: ThreadClient | ProcessClient) -> StreamTable:
    """A client's live requests."""
    return client._streams if isinstance(client, ThreadClient) else client._line.streams


async def until_empty(client: ThreadClient | ProcessClient, seconds: float = 60) -> None:
    """Waits until every request of the client has ended."""
    async with asyncio.timeout(seconds):
        while len(streams_of(client)):
            await asyncio.sleep(0.01)


async def check_refusal(client: ThreadClient | ProcessClient) -> None:
    """A request that cannot fit is refused with kind, field and code, and forgotten."""
    with pytest.raises(ContextLengthError) as refused:
        await anext(client.submit(request(prompt=100, max_tokens=2000)))
    assert refused.value.param == "max_tokens"
    assert refused.value.code == "context_length_exceeded"
    assert len(streams_of(client)) == 0


async def check_residue(client: ThreadClient | ProcessClient) -> None:
    """A thousand requests, a third of them left early, end and leave nothing behind."""

    async def one(number: int) -> None:
        stream = client.submit(request(max_tokens=4, n=1 + number % 2))
        if number % 3 == 0:
            await anext(stream)
            await stream.aclose()
        else:
            assert len(tokens_of(await read(stream))) == 4

    await asyncio.gather(*map(one, range(1000)))
    await until_empty(client)
    assert (streams_of(client).waiting.requests, streams_of(client).waiting.tokens) == (0, 0)
    stats = await client.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
