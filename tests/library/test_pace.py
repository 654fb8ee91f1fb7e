"""Servers that send next to nothing, but always something: nobody waits for them for ever."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.library import pace, web
from penstock.library.transfer import Manner, Source, fetch
from penstock.library.web import WebError, open_web

OPENING = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n"


@contextlib.contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that answers every connection so, and how often it was asked."""
    ended = threading.Event()

    def serve(listener: socket.socket) -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                threading.Thread(target=one, args=(connection,), daemon=True).start()

    def one(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.recv(65536)
            answer(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        finally:
            ended.set()
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)


def trickle(before: bytes) -> Callable[[socket.socket], None]:
    """After the beginning a byte now and then, until the client has gone."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(before)
        while True:
            time.sleep(0.02)
            connection.sendall(b"a")

    return answer


@pytest.mark.parametrize("before", [b"HTTP/1.1 200 OK\r\nX-Slow: ", OPENING + b"\r\n"], ids=["headers", "body"])
def test_an_answer_that_trickles_is_given_up(before: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "WINDOW_S", 0.2)
    refused = pytest.raises(WebError, match=r"took too long \(less than 1024 bytes a second for 0\.2 s\)")
    with answering(trickle(before)) as url, open_web(lambda seconds: None) as way, refused:
        way.read(url, {})


def test_a_file_that_trickles_is_given_up_and_what_came_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "WINDOW_S", 0.5)
    target = tmp_path / "model.gguf"
    refused = pytest.raises(WebError, match="took too long")
    with answering(trickle(OPENING + b"\r\nbegun")) as url, open_web(lambda seconds: None) as way, refused:
        fetch(way, Source(url, 100_000, version='"1"', ranges=False), target, Manner(streams=1))
    assert not target.exists() and target.with_name("model.gguf.partial").exists()


def test_an_answer_that_goes_on_for_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "ANSWER_S", 0.1)
    refused = pytest.raises(WebError, match=r"did not finish its answer within 0\.1 s")
    with answering(trickle(OPENING + b"\r\n")) as url, open_web(lambda seconds: None) as way, refused:
        way.read(url, {})


def test_a_slow_answer_is_read_while_it_keeps_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "WINDOW_S", 0.05)
    body = b"b" * 4096

    def answer(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (8 * len(body)))
        for _ in range(8):
            time.sleep(0.03)  # 136 kB/s, were nothing else to do
            connection.sendall(body)

    monkeypatch.setattr(pace, "SLOWEST_BYTES_PER_S", 1.0)
    with answering(answer) as url, open_web() as way:
        assert way.read(url, {})[0] == 8 * body
