"""How slowly a server may answer: a connection that gives bytes, but next to none, is given up.

A client's own timeouts are of one read, which a server that sends a byte every second never exceeds.
"""

from __future__ import annotations

import time
from typing import Any, Final

import httpx2

SLOWEST_BYTES_PER_S: Final = 1024.0
WINDOW_S: Final = 30.0
"""From the first byte of an answer on, headers among them, each so many seconds of reading bring that rate at least."""


class PacedStream:
    """A connection whose reads are held to a lowest rate. Only time spent in reads counts, not that of who reads."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._answers = False  # its first byte has come
        self._seconds = 0.0
        self._bytes = 0

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """As the stream's own; raises ReadTimeout where an answer trickles."""
        began = time.monotonic()
        data: bytes = self._stream.read(max_bytes, timeout)
        if self._answers:
            self._seconds += time.monotonic() - began
        self._answers = True
        self._bytes += len(data)
        if self._seconds > WINDOW_S:
            if data and self._bytes < self._seconds * SLOWEST_BYTES_PER_S:
                raise httpx2.ReadTimeout(f"less than {SLOWEST_BYTES_PER_S:g} bytes a second for {WINDOW_S:g} s")
            self._seconds, self._bytes = 0.0, 0
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """As the stream's own; another answer follows."""
        self._stream.write(buffer, timeout)
        self._answers, self._seconds = False, 0.0
        self._bytes = 0

    def start_tls(self, *args: Any, **options: Any) -> PacedStream:
        """As the stream's own."""
        return PacedStream(self._stream.start_tls(*args, **options))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class PacedBackend:
    """Connects as another backend does, to streams that are held to a lowest rate."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def connect_tcp(self, *args: Any, **options: Any) -> PacedStream:
        """As the backend's own."""
        return PacedStream(self._backend.connect_tcp(*args, **options))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def hold_to_pace(client: httpx2.Client) -> None:
    """Holds all answers of a client to the lowest rate, also through proxies."""
    for transport in (client._transport, *client._mounts.values()):
        if (pool := getattr(transport, "_pool", None)) is not None:
            pool._network_backend = PacedBackend(pool._network_backend)
