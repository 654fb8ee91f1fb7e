"""Requests for another protocol: there is none, so the request is answered as it is, and its body is never one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.server.framing import WithoutUpgrade
from tests.server.support import Running, read_all
from tests.server.test_framing import BODY, GET, HEAD, asked, statuses

Frame = Callable[[bytes, bytes], bytes]
INNER = GET + b"\r\n"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\nUpgrade: h2c\r\n"
LAST = GET + b"Connection: close\r\n\r\n"


def sized(body: bytes, fields: bytes) -> bytes:
    return HEAD + fields + b"Content-Length: %d\r\n\r\n" % len(body) + body


def chunked(body: bytes, fields: bytes) -> bytes:
    return HEAD + fields + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


@pytest.mark.parametrize("frame", [sized, chunked])
@pytest.mark.parametrize(
    "fields",
    [H2C, H2C.upper(), b"Upgrade:h2c\r\nConnection: upgrade\r\n", b"Connection: Upgrade\r\n", b"Upgrade: x\r\n"],
)
def test_an_upgrade_is_ignored_and_the_body_read(server: Running, frame: Frame, fields: bytes) -> None:
    assert asked(server, frame(BODY, fields) + LAST) == [200, 200]
    assert asked(server, frame(INNER, fields) + LAST) == [400, 200]  # the body is no JSON, and no request


@pytest.mark.parametrize("frame", [sized, chunked])
def test_a_body_is_no_request_wherever_it_is_cut(server: Running, frame: Frame) -> None:
    data = frame(INNER, b"Connection: Upgrade\r\nuPgRaDe: h2c\r\n")
    for cut in range(1, len(data)):
        with server.connect() as connection:
            connection.sendall(data[:cut])
            connection.sendall(data[cut:])
            connection.sendall(LAST)
            connection.settimeout(60)
            assert statuses(read_all(connection)) == [400, 200], cut


def test_a_websocket_is_answered_as_any_get(server: Running) -> None:
    fields = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: AAAA\r\n\r\n"
    assert asked(server, GET + fields + LAST) == [200, 200]


def test_fields_after_a_chunked_body_ask_for_nothing(server: Running) -> None:
    body = chunked(BODY, b"")[:-2] + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    assert asked(server, body + LAST) == [200, 200]


@pytest.mark.parametrize("fields", [b"", b"Upgrade: h2c\r\nConnection: Upgrade\r\n", b"Content-Length: 43\r\n"])
def test_there_is_no_tunnel(server: Running, fields: bytes) -> None:
    assert asked(server, b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n" + fields + b"\r\n" + INNER) == [501]


@pytest.mark.parametrize("version", [b"2.0", b"0.9"])
def test_other_versions(server: Running, version: bytes) -> None:
    assert asked(server, b"GET /version HTTP/%s\r\nHost: localhost\r\n\r\n" % version + INNER) == [505]


def test_the_preface_of_another_version_is_no_request(server: Running) -> None:
    assert asked(server, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + INNER) in ([400], [505])


def renamed(pieces: list[bytes]) -> bytes:
    """What of one head is handed on."""
    lines = WithoutUpgrade()
    return b"".join(lines.take(piece, number == len(pieces) - 1) for number, piece in enumerate(pieces))


def test_the_field_is_renamed_at_the_start_of_a_line_alone() -> None:
    head = b"GET /upgrade: HTTP/1.1\r\nA: upgrade:\r\nX-Upgrade: 1\r\nUpgrades: 1\r\nUPGRADE: h2c\r\nupgrade:2\r\n\r\n"
    told = head.replace(b"\r\nUPGRADE:", b"\r\nIgnored:").replace(b"\r\nupgrade:", b"\r\nIgnored:")
    assert renamed([head]) == told
    assert renamed([head[at : at + 1] for at in range(len(head))]) == told
    for cut in range(1, len(head)):
        assert renamed([head[:cut], head[cut:]]) == told


def test_little_of_a_head_is_held_back() -> None:
    lines = WithoutUpgrade()
    assert lines.take(b"GET / HTTP/1.1\r\nupgrade", False) == b"GET / HTTP/1.1\r"
    assert lines.take(b"d: 1\r\n", False) == b"\nupgraded: 1\r"
    assert lines.take(b"\r\n", True) == b"\n\r\n"
    assert lines.take(b"upgrade: / HTTP/1.1\r\n\r\n", True) == b"upgrade: / HTTP/1.1\r\n\r\n"  # the next request line
