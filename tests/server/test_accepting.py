"""Connections that several processes could take: who has more waits longer, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable

import pytest

from penstock.server import accepting as module
from penstock.server.accepting import LONGEST_S, Accepting, pause


class Echo(asyncio.Protocol):
    """Says back what it is told."""

    there: int = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class Scarce(socket.socket):
    """A listening socket that has no descriptor for the first connection."""

    errors: list[OSError]

    def accept(self) -> tuple[socket.socket, object]:
        if self.errors:
            raise self.errors.pop()
        return super().accept()


def listening(kind: type[socket.socket] = socket.socket) -> tuple[socket.socket, int]:
    listener = kind()
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    return listener, listener.getsockname()[1]


async def said(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"hello")
    answer = await reader.readexactly(5)
    writer.close()
    return answer


def test_who_has_more_waits_longer_and_nobody_long() -> None:
    assert pause(0) == 0 < pause(1) < pause(9) <= pause(10_000) == LONGEST_S


@pytest.mark.parametrize("connections", [lambda: 0, lambda: 1000])
async def test_all_that_come_are_taken(connections: Callable[[], int]) -> None:
    listener, port = listening()
    accepting = Accepting(listener, Echo, connections)
    async with asyncio.timeout(60):
        assert set(await asyncio.gather(*(said(port) for _ in range(20)))) == {b"hello"}
    accepting.close()
    with pytest.raises(ConnectionRefusedError):
        await said(port)


async def test_two_may_share_a_socket() -> None:
    listener, port = listening()
    both = [Accepting(listener.dup(), Echo, lambda: 5) for _ in range(2)]
    async with asyncio.timeout(60):
        assert set(await asyncio.gather(*(said(port) for _ in range(20)))) == {b"hello"}
        both[0].close()
        assert await said(port) == b"hello"
    both[1].close()
    listener.close()


async def test_without_descriptors_it_tries_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_AFTER_ERROR_S", 0.01)
    listener, port = listening(Scarce)
    assert isinstance(listener, Scarce)
    listener.errors = [OSError(errno.EMFILE, "Too many open files"), ConnectionAbortedError()]
    accepting = Accepting(listener, Echo, lambda: 0)
    async with asyncio.timeout(60):
        assert await said(port) == b"hello"
    assert "a connection cannot be taken" in caplog.text
    accepting.close()
