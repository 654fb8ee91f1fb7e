"""Requests sent ahead on one connection: parsed as they are answered, in order, and the client still missed."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.engine.text_pipeline import TextPipeline
from penstock.server.connection import LimitedProtocol
from tests.server.support import Running, read_all, running, until
from tests.server.test_framing import statuses
from tests.server.test_leaving import post

PIECE = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST = PIECE[:-2] + b"Connection: close\r\n\r\n"
PARSED_AHEAD = 64
UNPARSED = 65536 + 256 * 1024  # what may wait, and one read on top of it


class Counted:
    """How much of a server's connections was parsed at once and waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heads = self.waiting = self.unparsed = self.at_once = 0
        received: Any = LimitedProtocol.data_received
        complete: Any = LimitedProtocol.on_headers_complete

        def on_data(protocol: Any, data: bytes) -> None:
            before = self.heads
            received(protocol, data)
            self.at_once = max(self.at_once, self.heads - before)
            self.unparsed = max(self.unparsed, len(getattr(protocol, "_unparsed", b"")))

        def on_head(protocol: Any) -> None:
            complete(protocol)
            self.heads += 1
            self.waiting = max(self.waiting, len(protocol.pipeline))

        monkeypatch.setattr(LimitedProtocol, "data_received", on_data)
        monkeypatch.setattr(LimitedProtocol, "on_headers_complete", on_head)


@pytest.fixture
def own(text: TextPipeline) -> Iterator[Running]:
    with running(text) as server:
        yield server


def send_all(connection: socket.socket, data: bytes) -> threading.Thread:
    """Sends beside the test, which reads the answers; a connection that ends meanwhile is no failure."""

    def send() -> None:
        with contextlib.suppress(OSError):
            connection.sendall(data)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


def test_few_are_parsed_at_once_and_all_are_answered(own: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    with own.connect() as connection:
        sender = send_all(connection, PIECE * 8000 + LAST)
        connection.settimeout(60)
        assert statuses(read_all(connection)) == [200] * 8001
        sender.join()
    assert counted.heads == 8001
    assert counted.waiting <= PARSED_AHEAD
    assert counted.at_once <= PARSED_AHEAD + 1
    assert counted.unparsed <= UNPARSED


def test_bodies_that_wait_are_whole(own: Running) -> None:
    with own.connect() as connection:
        sender = send_all(connection, (post(stream=False, max_tokens=1) + PIECE) * 150 + LAST)
        connection.settimeout(60)
        assert statuses(read_all(connection)) == [200] * 301
        sender.join()


def test_what_follows_a_bad_request_behind_many_is_not_read(own: Running) -> None:
    with own.connect() as connection:
        connection.sendall(PIECE * 200 + b"nonsense\r\n\r\n" + PIECE)
        connection.settimeout(60)
        assert statuses(read_all(connection))[:200] == [200] * 200


def test_leaving_behind_more_than_are_parsed(own: Running) -> None:
    own.runner.hold()
    with own.connect() as connection:
        connection.sendall(post(stream=False) + PIECE * 1000)
        until(lambda: own.live == 1)
    until(lambda: own.lifecycle.in_flight == 0)
    own.runner.go()
    own.until_idle()
    assert (own.stats().cancelled, own.stats().finished) == (1, 0)


def test_memory_is_bounded_while_one_is_answered(own: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    own.runner.hold()
    with own.connect() as connection:
        send_all(connection, post(stream=False) + PIECE * 200_000)
        until(lambda: counted.unparsed > 65536)
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        assert (counted.heads, counted.unparsed <= UNPARSED) == (PARSED_AHEAD + 1, True)
        connection.shutdown(socket.SHUT_RDWR)
