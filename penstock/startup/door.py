"""Where workers of other machines join, and how what they take and give passes on to the sockets between stages.

No torch here.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Final

from penstock.runtime.ranks import joining

_PIECE: Final = 256 << 10  # bytes that are passed on at a time
_MOST_WAITING: Final = 16  # workers of which not all connections have come


class Door:
    """Gathers the connections of each worker."""

    def __init__(self, address: str, token: str) -> None:
        """Raises ConfigError where nobody can be listened for at HOST:PORT, or for a token that can be guessed."""
        self._token = joining.check_token(token)
        host, port = joining.address_of(address, "--workers-address")
        self._listening = joining.listen(host, port)
        self._waiting: dict[bytes, dict[bytes, socket.socket]] = {}

    @property
    def address(self) -> tuple[str, int]:
        """Where workers call, with the port that the system may have chosen."""
        host, port = self._listening.getsockname()[:2]
        return host, port

    def next(self, wait: float) -> dict[bytes, socket.socket] | None:
        """The connections of a worker, one of each of KINDS, once all are there; looks once, for so many seconds."""
        caller = joining.admit(self._listening, self._token, wait)
        if caller is None:
            return None
        found = self._waiting.setdefault(caller.worker, {})
        if (other := found.get(caller.kind)) is not None:
            other.close()
        found[caller.kind] = caller.connection
        if len(found) == len(joining.KINDS):
            return self._waiting.pop(caller.worker)
        if len(self._waiting) > _MOST_WAITING:
            _close(self._waiting.pop(next(iter(self._waiting))))
        return None

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *error: object) -> None:
        self._listening.close()
        for found in self._waiting.values():
            _close(found)


def _close(found: dict[bytes, socket.socket]) -> None:
    for connection in found.values():
        connection.close()


def relay(source: socket.socket, target: socket.socket) -> None:
    """Passes on what comes, in a thread, until either end has ended; then both are."""
    threading.Thread(target=_relay, args=(source, target), name="penstock-relay", daemon=True).start()


def _relay(source: socket.socket, target: socket.socket) -> None:
    with source, target:
        with suppress(OSError):
            while data := source.recv(_PIECE):
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
