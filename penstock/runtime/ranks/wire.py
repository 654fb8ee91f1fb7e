"""Whole frames over a stream socket: between the process that leads and each of the others.

A frame is its length, four bytes in network order, and its bytes. How far a sender can be ahead of a receiver is what
the sockets hold (BUFFER): behind that, sending waits.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from threading import Lock
from typing import Final

_LENGTH: Final = struct.Struct("!I")
MOST_BYTES: Final = 2**30  # of a frame
BUFFER: Final = 256 << 10  # bytes that a socket may hold of what is sent


class WireClosed(Exception):
    """The other end is gone."""


class Wire:
    """One end. Any thread sends; receiving belongs to one."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        with suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        self._sending = Lock()
        self._waiting = bytearray()  # of a frame that has not come whole

    def fileno(self) -> int:
        """The descriptor of the socket."""
        return self._socket.fileno()

    def send(self, frame: bytes) -> None:
        """Sends a frame; waits while the other end is behind.

        Raises:
            WireClosed: nobody reads it.
        """
        if len(frame) > MOST_BYTES:
            raise ValueError(f"a frame of {len(frame)} bytes is over the {MOST_BYTES} bytes that one may have")
        try:
            with self._sending:
                self._socket.sendall(_LENGTH.pack(len(frame)) + frame)
        except OSError as error:
            raise WireClosed(str(error)) from error

    def receive(self) -> bytes | None:
        """The next frame, which is waited for; None at the end."""
        head = self._exactly(_LENGTH.size)
        return None if head is None else self._exactly(_length(head))

    def arrived(self) -> Iterator[bytes | None]:
        """The frames that have come since the last call, without waiting; None at the end. One thread's, not beside
        `receive`.
        """
        try:
            data = self._socket.recv(1 << 16, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        self._waiting += data
        while len(self._waiting) >= _LENGTH.size:
            end = _LENGTH.size + _length(self._waiting[: _LENGTH.size])
            if len(self._waiting) < end:
                break
            frame = bytes(self._waiting[_LENGTH.size : end])
            del self._waiting[:end]
            yield frame
        if not data:
            yield None

    def end(self) -> None:
        """Ends both ways: whoever waits here or at the other end goes on, and finds the end."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Lets go of the socket."""
        self._socket.close()

    def _exactly(self, count: int) -> bytes | None:
        data = bytearray(count)
        return bytes(data) if fill(self._socket, memoryview(data)) else None


def fill(end: socket.socket, view: memoryview) -> bool:
    """Receives as many bytes as the view has; False at the end."""
    have = 0
    while have < len(view):
        try:
            got = end.recv_into(view[have:])
        except OSError:
            return False
        if got == 0:
            return False
        have += got
    return True


def _length(head: bytes | bytearray) -> int:
    (length,) = _LENGTH.unpack(head)
    if length > MOST_BYTES:
        raise ValueError(f"a frame of {length} bytes is over the {MOST_BYTES} bytes that one may have")
    return int(length)
