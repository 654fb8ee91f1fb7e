"""What a hostile or broken client can send, byte by byte."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import re
import select
import socket
import struct
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Receive

from penstock.config import limits
from penstock.server import middleware
from penstock.server.body import limited
from tests.server.support import Running, read_all, until

BODY = json.dumps({"prompt": "Hello", "max_tokens": 3}).encode()
SLOW = json.dumps({"prompt": "Hello", "max_tokens": 2000, "ignore_eos": True}).encode()
STREAM = json.dumps({"prompt": "Hello", "max_tokens": 2000, "ignore_eos": True, "stream": True}).encode()
JSON = b"Content-Type: application/json\r\n"


def post(body: bytes, headers: bytes = JSON, path: bytes = b"/v1/completions", host: bytes = b"localhost") -> bytes:
    length = b"Content-Length: %d\r\n" % len(body)
    return b"POST %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n%s%s\r\n%s" % (path, host, headers, length, body)


def chunked(pieces: list[bytes], headers: bytes = JSON) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n"
    return head + headers + b"\r\n" + b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"


def status(answer: bytes) -> int:
    """The status of a well-formed answer; refusals must be OpenAI error objects that give nothing away."""
    head, _, body = answer.partition(b"\r\n\r\n")
    code = int(head.split(b" ", 2)[1])
    if code >= 400:
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        for secret in ("Traceback", str(Path.cwd()), "/secret", ".py", "Error(", "0x"):
            assert secret not in error["message"]
        assert len(error["message"]) <= 600
    return code


def until_closed(connection: socket.socket) -> None:
    """Reads to the end; a connection that stays open ends in TimeoutError."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(65536):
            pass


def still_serves(server: Running) -> None:
    assert status(server.raw(post(BODY))) == 200


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", 400),
        (b"{", 400),
        (b"nonsense", 400),
        (b"[" * 100_000, 400),
        (b'{"a":' * 100_000, 400),
        (b'{"prompt": "x", "temperature": NaN}', 400),
        (b'{"prompt": "x", "temperature": Infinity}', 400),
        (b'{"prompt": "x", "temperature": 1e999}', 400),
        (b'{"prompt": "x", "n": 1000000000}', 400),
        (b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}", 400),
        (b'{"prompt": "\xff\xfe"}', 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b'{"prompt": "x", "prompt": "y"}', 400),
        (b'{"prompt": ""}', 400),
        (b'{"prompt": [[]]}', 400),
        (b'{"prompt": [""]}', 400),
        (b'{"prompt": [999999999]}', 400),
        (b'{"prompt": "x", "logit_bias": {"99999999": 1}}', 400),
        (b'{"prompt": "x", "max_tokens": 100000}', 400),
        (BODY, 200),
    ],
)
def test_bodies(server: Running, body: bytes, expected: int) -> None:
    assert status(server.raw(post(body))) == expected
    still_serves(server)


@pytest.mark.parametrize(
    "headers",
    [
        b"",
        b"Content-Type: text/plain\r\n",
        b"Content-Type: application/x-www-form-urlencoded\r\n",
        b"Content-Type: application/json; charset=utf-16\r\n",
        b"Content-Type: application/json\r\nContent-Encoding: gzip\r\n",
        b"Content-Type: \xff\xfe\r\n",
    ],
)
def test_content_types(server: Running, headers: bytes) -> None:
    body = gzip.compress(b" " * 10**6) if b"gzip" in headers else BODY
    assert status(server.raw(post(body, headers))) == 415


def test_a_declared_length_over_the_limit_is_refused_unread(server: Running) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n%sContent-Length: %d\r\n\r\n"
    assert status(server.raw(head % (JSON, limits.MAX_BODY_BYTES + 1))) == 413


def test_a_chunked_body_is_counted_as_it_comes(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BODY_BYTES", 100_000)
    assert status(server.raw(chunked([b" " * 60_000, b" " * 60_000, BODY]))) == 413
    assert status(server.raw(chunked([b" " * 60_000, BODY]))) == 200


def test_large_bodies_in_flight_are_bounded_together(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BODIES_BYTES", 200_000)
    counted = [0]

    def counting(*args: Any) -> Receive:
        *others, grow, most = args
        return limited(*others, lambda received: (grow(received), counted.append(received)), most)

    monkeypatch.setattr(middleware, "limited", counting)
    large = post(b" " * 150_000 + BODY)
    with server.connect() as connection:
        connection.sendall(post(b" " * 300_000 + BODY)[:250_000])
        until(lambda: max(counted) > 249_000)  # while it comes in, either of two could be the one that is refused
        assert status(server.raw(large)) == 429
        assert b"retry-after: 1" in server.raw(large).lower()
        still_serves(server)
        assert status(server.raw(post(b" " * 60_000 + BODY))) == 200
    until(lambda: status(server.raw(large)) == 200)
    assert status(server.raw(large)) == 200


def test_a_body_of_single_bytes(server: Running) -> None:
    assert status(server.raw(chunked([b" "] * 20_000 + [BODY]))) == 200


def test_slow_headers_are_cut(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADER_TIMEOUT_S", 0.3)
    with server.paused():
        slow = server.connect()
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: loc")
    with slow:
        assert status(read_all(slow)) == 408
    with server.connect() as connection:
        assert read_all(connection) == b""


@pytest.mark.parametrize("path", [b"/v1/completions", b"/nowhere"])
def test_what_follows_an_answer_and_is_no_request_does_not_keep_a_connection(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: bytes
) -> None:
    monkeypatch.setattr(limits, "HEADER_TIMEOUT_S", 0.3)
    body = b"" if path == b"/nowhere" else BODY
    length = max(10, len(body))  # the one is answered before its body, which comes later
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\n%sContent-Length: %d\r\n\r\n" % (path, JSON, length)
    with server.paused():
        connection = server.connect()
        connection.sendall(head + body)
    with connection:
        assert connection.recv(65536)
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"\r\n" if body else b" " * 10)
        until_closed(connection)


def test_slow_bodies_are_cut(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_TIMEOUT_S", 0.3)
    with server.paused():
        connection = server.connect()
        connection.sendall(post(BODY + b" " * 100_000)[:-99_999])
    with connection:

        def answered() -> bool:
            with contextlib.suppress(ConnectionError):
                connection.sendall(b" ")  # what trickles in gives no new time
            return bool(select.select([connection], [], [], 0.05)[0])

        until(answered)
        assert status(read_all(connection)) == 408


def test_headers_over_the_limit(server: Running) -> None:
    big = b"X-Filler: " + b"a" * (limits.MAX_HEADER_BYTES + 10) + b"\r\n"
    many = b"".join(b"X-%d: %s\r\n" % (number, b"b" * 50) for number in range(2000))
    for headers in (big, many, big[:-2] * 20):
        assert status(server.raw(post(BODY, JSON + headers))) == 431
    assert status(server.raw(post(BODY, path=b"/" + b"p" * 70_000))) == 431
    still_serves(server)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\r\n\r\n\x00\x01\x02",
        b"GET\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nBad Header: x\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1e3\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_what_is_not_http(server: Running, request_bytes: bytes) -> None:
    assert status(server.raw(request_bytes, timeout=60)) in (*range(400, 500), 501)
    still_serves(server)


def test_a_smuggled_request_is_never_answered(server: Running) -> None:
    inner = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + JSON
    both = head + b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n%s" % (5 + len(inner), inner)
    answer = server.raw(both, timeout=60)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b'"version"' not in answer


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (b"localhost", 200),
        (b"LOCALHOST:8000", 200),
        (b"127.0.0.1:1", 200),
        (b"127.5.5.5", 200),
        (b"[::1]:8000", 200),
        (b"a.localhost", 200),
        (b"evil.example", 403),
        (b"evil.example:8000", 403),
        (b"localhost.evil.example", 403),
        (b"10.0.0.1", 403),
        (b"", 400),
        (b"localhost/../x", 400),
        (b"x/?", 400),
        (b"localhost@evil.example", 400),
        (b"localhost:port", 400),
        (b"[::1", 400),
        (b"\xff", 400),
    ],
)
def test_hosts(server: Running, host: bytes, expected: int) -> None:
    assert status(server.raw(post(BODY, host=host))) == expected


def test_hosts_must_be_exactly_one(server: Running) -> None:
    assert status(server.raw(b"GET /version HTTP/1.1\r\nConnection: close\r\n\r\n")) == 400
    two = b"GET /version HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    assert status(server.raw(two)) == 400
    assert status(server.raw(b"GET /version HTTP/1.0\r\n\r\n")) == 200


def test_streams_of_http_1_0_have_no_chunks(server: Running) -> None:
    body = b'{"prompt":"Hello","max_tokens":3,"temperature":0,"stream":true}'
    head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    lines, _, events = server.raw(head.encode() + body).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in lines.lower()
    assert b"connection: close" in lines.lower()
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")


def test_random_bytes_never_break_it(server: Running) -> None:
    source = random.Random(7)
    whole = post(BODY)
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(source.randint(1, 8)):
            data[source.randrange(len(data))] = source.randrange(256)
        answer = server.raw(
            bytes(data) + b"\0" * 4096
        )  # neither the rest of a body nor a further request: it is closed
        found = re.findall(rb"HTTP/1\.1 (\d{3})", answer)
        assert found and max(found) < b"500", data
        assert not any(secret in answer for secret in (b"Traceback", str(Path.cwd()).encode(), b".py"))
    still_serves(server)


@pytest.mark.parametrize("body", [SLOW, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize("how", ["fin", "rst", "half-close"])
def test_a_client_that_leaves_frees_its_request(server: Running, body: bytes, how: str) -> None:
    server.runner.delay = 0.05
    connections = [server.connect() for _ in range(8)]
    for connection in connections:
        connection.sendall(post(body))
    until(lambda: server.live == 8)
    for connection in connections:
        if how == "half-close":
            connection.shutdown(socket.SHUT_WR)
            continue
        if how == "rst":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    server.until_idle()
    until(lambda: server.lifecycle.in_flight == 0)
    for connection in connections:
        connection.close()


def test_leaving_during_a_long_prefill(server: Running) -> None:
    before = server.stats()
    for number, stream in enumerate((False, True), 5):
        body = {"prompt": [number] * 1540, "max_tokens": 500, "ignore_eos": True, "stream": stream}  # four steps
        server.runner.hold()
        with server.connect() as connection:
            connection.sendall(post(json.dumps(body).encode()))
            until(lambda: server.live == 1)
        until(lambda: server.lifecycle.in_flight == 0)
        server.runner.go()
        server.until_idle()
    after = server.stats()
    assert after.steps > before.steps
    assert after.generated_tokens == before.generated_tokens


def test_a_reader_that_stalls_is_ended(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STREAM_STALL_TIMEOUT_S", 0.3)
    body = {"prompt": "Hello", "max_tokens": 2000, "ignore_eos": True, "stream": True, "n": 16, "logprobs": 20}
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(post(json.dumps(body).encode()))
        until(lambda: len(server.runner.seen) == 1)
        server.until_idle()
        until(lambda: server.lifecycle.in_flight == 0)
        connection.settimeout(60)
        until_closed(connection)


def test_long_waits_are_filled_with_comments(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SSE_KEEPALIVE_S", 0.05)
    server.runner.hold()
    with httpx.stream("POST", f"{server.url}/v1/completions", json={"prompt": "Hello", "stream": True}) as answer:
        lines = answer.iter_lines()
        assert [next(lines) for _ in range(6)] == [": keep-alive", ""] * 3
        server.runner.go()
        assert list(lines)[-2:] == ["data: [DONE]", ""]


def test_pipelined_requests_are_answered_in_order(server: Running) -> None:
    get = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answer = server.raw(get * 3 + post(BODY))
    assert answer.count(b"HTTP/1.1 200 OK") == 4
    assert answer.rindex(b"text_completion") > answer.rindex(b'"version"')
