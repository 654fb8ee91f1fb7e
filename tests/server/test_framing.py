"""What HTTP leaves no choice about: codings, lengths, expectations, targets, and requests that follow each other."""

from __future__ import annotations

import json
import logging
import re
import socket
import struct

import httpx
import pytest

from penstock.config import limits
from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions, ServerOptions
from penstock.server.auth import check_origins
from penstock.server.framing import Chunks, Refused
from penstock.server.serve import serve
from tests.server.support import Running, read_all, until

BODY = json.dumps({"prompt": "Hello", "max_tokens": 3}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n"
SIZED = b"%sContent-Length: %d\r\n\r\n%s" % (HEAD, len(BODY), BODY)


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", answer)]


def asked(server: Running, data: bytes) -> list[int]:
    """The statuses of the answers, of a connection the client ends by saying no more."""
    with server.connect() as connection:
        connection.sendall(data)
        return statuses(read_all(connection))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (b"Transfer-Encoding: chunked\r\n", [200]),
        (b"Transfer-Encoding: CHUNKED\r\n", [200]),
        (b"Transfer-Encoding: gzip, chunked\r\n", [501]),
        (b"Transfer-Encoding: identity, chunked\r\n", [501]),
        (b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n", [501]),
        (b"Transfer-Encoding: ,chunked\r\n", [400]),
        (b"Transfer-Encoding: chunked,\r\n", [400]),
        (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", [400]),
        (b"Transfer-Encoding: chunked;q=1\r\n", [400]),
        (b"Transfer-Encoding: \r\n", [400]),
    ],
)
def test_transfer_codings(server: Running, fields: bytes, expected: list[int]) -> None:
    assert asked(server, HEAD + fields + b"Connection: close\r\n\r\n" + CHUNKED) == expected


def test_an_older_version_has_no_transfer_coding(server: Running) -> None:
    old = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED
    assert asked(server, old) == [400]


@pytest.mark.parametrize("size", [b"7fffffffffffffff", b"2000001", b"10\r\n0123456789abcdef\r\n2000000"])
def test_a_chunk_that_will_be_too_large_is_refused_at_once(server: Running, size: bytes) -> None:
    """The client sends no more, so that a server which waits for the chunk answers 408 at the earliest."""
    assert asked(server, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + size + b"\r\nabc") == [413]


@pytest.mark.parametrize("size", [b"fffffffffffffffff", b"-1", b"0x5", b"", b"5 5", b"5;" + b"a" * 5000])
def test_a_chunk_without_a_size_is_refused(server: Running, size: bytes) -> None:
    assert asked(server, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + size + b"\r\nabcde\r\n0\r\n\r\n") == [400]


def test_chunks_are_followed_wherever_they_are_cut() -> None:
    data = b"5;name=value\r\nabcde\r\nA\r\n0\r\n\r\n45678\r\n0\r\nTrailer: x\r\n\r\nGET / HTTP/1.1\r\n"
    for step in range(1, len(data) + 1):
        chunks, end = Chunks(), 0
        for start in range(0, len(data), step):
            if not chunks.complete:
                end = chunks.take(data[: start + step], start)
        assert (chunks.announced, chunks.complete) == (15, True)
        assert data[end:] == b"GET / HTTP/1.1\r\n"


def test_a_line_of_a_chunk_is_bounded() -> None:
    with pytest.raises(Refused):
        Chunks().take(b"5;" + b"a" * 10_000, 0)


def test_requests_are_told_apart_wherever_they_are_cut(server: Running) -> None:
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED
    data = b"\r\n" + chunked + GET + b"\r\n" + SIZED + GET + b"Connection: close\r\n\r\n"
    for step in (1, 2, 3, 5, 17, 100, len(data)):
        with server.connect() as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for start in range(0, len(data), step):
                connection.sendall(data[start : start + step])
            assert statuses(read_all(connection)) == [200] * 4


@pytest.mark.parametrize(
    ("value", "expected"), [(b"100-Continue", [100, 200]), (b"200-ok", [417]), (b"100-continue, x", [417])]
)
def test_expectations(server: Running, value: bytes, expected: list[int]) -> None:
    fields = b"Expect: %s\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % (value, len(BODY))
    assert asked(server, HEAD + fields + BODY) == expected


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (b"http://localhost/version", [200]),
        (b"http://evil.example/version", [403]),
        (b"http://u:p@localhost/version", [400]),
        (b"http://localhost:99999/version", [400]),
        (b"ftp://localhost/version", [400]),
        (b"/version#part", [400]),
        (b"version", [400]),
    ],
)
def test_targets(server: Running, target: bytes, expected: list[int]) -> None:
    request = b"GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % target
    assert asked(server, request) == expected


def test_ports_that_there_are_not(server: Running) -> None:
    for port, status in ((65535, 200), (65536, 400), (99999, 400)):
        request = b"GET /version HTTP/1.1\r\nHost: localhost:%d\r\nConnection: close\r\n\r\n" % port
        assert asked(server, request) == [status]


def test_a_length_with_space_after_it(server: Running) -> None:
    assert asked(server, HEAD + b"Connection: close\r\nContent-Length: %d \r\n\r\n" % len(BODY) + BODY) == [200]


def test_many_fields(server: Running) -> None:
    few = b"".join(b"X-%d: a\r\n" % number for number in range(limits.MAX_HEADERS - 10))
    many = b"".join(b"X-%d: a\r\n" % number for number in range(limits.MAX_HEADERS + 1))
    assert asked(server, GET + b"Connection: close\r\n" + few + b"\r\n") == [200]
    assert asked(server, GET + many + b"\r\n") == [431]


def test_what_came_before_a_bad_request_is_answered(server: Running) -> None:
    server.runner.first_delay = 0.1
    assert asked(server, SIZED + GET + b"Bad : field\r\n\r\n") == [200]
    assert asked(server, GET + b"\r\n" + GET + b"Bad : field\r\n\r\n") in ([200], [200, 400])


def test_a_slow_head_does_not_cut_the_answer_before_it(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADER_TIMEOUT_S", 0.1)
    server.runner.delay = 0.02
    streamed = json.dumps({"prompt": "Hello", "max_tokens": 30, "ignore_eos": True, "stream": True}).encode()
    request = b"%sContent-Length: %d\r\n\r\n%s" % (HEAD, len(streamed), streamed)
    answer = server.raw(request + b"GET /ver")
    assert statuses(answer) == [200]
    assert b"data: [DONE]" in answer


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("framed", [b"Content-Length: 5000\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n500\r\n{"])
def test_a_client_that_leaves_in_mid_body_is_no_failure(
    server: Running, caplog: pytest.LogCaptureFixture, framed: bytes, how: str
) -> None:
    def counted(status: int) -> float:
        text = httpx.get(f"{server.url}/metrics").text
        found = re.search(
            rf'^penstock_http_requests_total\{{[^}}]*completions[^}}]*status="{status}"\}} (\S+)', text, re.M
        )
        return float(found[1]) if found else 0.0

    gone, failed = counted(499), counted(500)
    with caplog.at_level(logging.INFO, "penstock"), server.connect() as connection:
        connection.sendall(HEAD + framed)
        until(lambda: server.lifecycle.in_flight == 1)
        if how == "rst":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        until(lambda: server.lifecycle.in_flight == 0)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    until(lambda: counted(499) == gone + 1)
    assert counted(500) == failed


@pytest.mark.parametrize(
    "origin",
    [
        *("localhost:3000", "http://localhost/", "https://app.example/path", "HTTPS://app.example"),
        *("https://App.example", "https://app.example:443", "http://a:99999", "//app.example", "https://*.example", ""),
    ],
)
def test_origins_that_can_never_match_are_refused_at_start(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"scheme://host\[:port\].*\* for all") as caught:
        serve(EngineOptions(), ServerOptions(port=0, allowed_origins=("https://app.example", origin)))
    assert repr(origin) in str(caught.value)


def test_origins_that_browsers_send() -> None:
    check_origins(("none",))
    check_origins(("localhost",))
    check_origins(("*", "https://app.example", "http://localhost:3000", "http://[::1]:8080", "app://obsidian.md"))
