"""More connections than a process may have files: operators get in, those idle longest go, and one line tells so."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import httpx
import pytest

from tests.server.served import Served, listening
from tests.server.support import until

FILES = 160
SCRIPT = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({FILES}, {FILES}))
from penstock.config.options import EngineOptions, ServerOptions
from penstock.server.serve import serve
serve(EngineOptions(threads=1, max_model_len=256, kv_blocks=40), ServerOptions(port=0))
"""


@pytest.fixture(scope="module")
def narrow() -> Iterator[Served]:
    """A server that may open few files."""
    served = listening("-c", SCRIPT)
    served.wait_ready()
    yield served
    assert served.stop(30) == 0, served.lines


def connect(served: Served) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), 10)


def answer(connection: socket.socket, path: str = "/livez") -> bytes:
    """What comes back, up to the end of a JSON object."""
    found = b""
    connection.settimeout(60)
    with contextlib.suppress(ConnectionError):
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        while not found.endswith(b"}") and (piece := connection.recv(65536)):
            found += piece
    return found


def lives(served: Served) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{served.url}/livez", timeout=60).status_code == 200
    return False


@pytest.mark.parametrize("sent", [b"", b"GET /livez HTTP/1.1\r\nHost: loc"], ids=["silent", "within a head"])
def test_idle_connections_leave_room_for_operators(narrow: Served, sent: bytes) -> None:
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(narrow)) for _ in range(FILES * 2)]
        for connection in idle:
            with contextlib.suppress(OSError):
                connection.sendall(sent)
        for _ in range(5):
            assert httpx.get(f"{narrow.url}/livez", timeout=60).status_code == 200
        with connect(narrow) as late:
            assert b"200 OK" in answer(late)
        idle[0].settimeout(60)
        with contextlib.suppress(ConnectionError):
            assert idle[0].recv(1) == b""  # idle longest, closed
    told = [line for line in narrow.lines if "limit of open files" in line]
    assert len(told) == 1 and "ulimit -n" in told[0]


def test_the_ones_in_use_stay(narrow: Served) -> None:
    with contextlib.ExitStack() as stack:
        used = stack.enter_context(connect(narrow))
        assert b"200 OK" in answer(used)
        for _ in range(FILES):
            stack.enter_context(connect(narrow))
            assert b"200 OK" in answer(used), "the connection used last was closed"


def test_while_all_are_busy_only_operators_get_in(narrow: Served) -> None:
    """Requests whose bodies do not come keep connections busy."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(FILES):
            busy = stack.enter_context(connect(narrow))
            with contextlib.suppress(OSError):
                busy.sendall(head + b"Content-Length: 99\r\n\r\n{")
        until(lambda: lives(narrow))
        late = stack.enter_context(connect(narrow))
        refused = answer(late, "/v1/models")
        assert b"503 Service Unavailable" in refused and b"as many connections" in refused
        assert httpx.get(f"{narrow.url}/livez", timeout=60).status_code == 200
        assert httpx.get(f"{narrow.url}/metrics", timeout=60).status_code == 200
    until(lambda: httpx.get(f"{narrow.url}/v1/models", timeout=60).status_code == 200)
