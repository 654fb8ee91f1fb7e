"""A store that engines share in an LMCache server: a value a block, under a key of the form that it reads.

The server's protocol: a message of nine little-endian int32 (command, length, format, type, location, four sizes) and a
key of 150 characters, answered by nine int32 (status, length, …) and the value; values that are put are not answered
(LMCache 0.5, `lmcache.v1.protocol`). Other programs' blocks there have other names. A server keeps what it is given
until it ends: there is no command that removes a value, so that one of no bytes takes its place.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock, local
from typing import Final, TypeVar

from penstock.config.kv_store import StoreAddress
from penstock.transfer.pieces import Bytes
from penstock.transfer.remote import ANSWER_S, CONNECT_S, leading_rows
from penstock.transfer.store import StoreError

_PUT: Final = 1  # commands
_GET: Final = 2
_EXIST: Final = 3
_HEALTH: Final = 5
_BYTES: Final = 4  # a format
_UINT8: Final = 6  # a type
_THERE: Final = 200
_ASKED: Final = struct.Struct("<9i150s")
_ANSWER: Final = struct.Struct("<9i")
_MOST_BYTES: Final = 1 << 30  # of a value
_TOGETHER: Final = 256  # questions that are sent before their answers are read
_T = TypeVar("_T")


class LMCacheStore:
    """Blocks as values of an LMCache server. Each thread has a connection of its own."""

    def __init__(self, address: StoreAddress) -> None:
        """Connects with the first command."""
        self._place = (address.host, address.port)
        self._of_thread = local()
        self._lock = Lock()
        self._open: set[socket.socket] = set()

    def check(self) -> None:
        """Raises OSError if the server does not answer."""
        self._asked(lambda line: self._answers(line, [_message(_HEALTH, "health:0:0")]))

    def get(self, name: str) -> Bytes:
        value = self._asked(lambda line: _value(line, name))
        if not value:
            raise StoreError("it is not there any more")
        return value

    def put(self, name: str, value: Bytes) -> None:
        if len(value) > _MOST_BYTES:
            raise StoreError(f"it has {len(value)} bytes; an LMCache server is sent {_MOST_BYTES} at most")
        if not self._asked(lambda line: self._kept(line, name, value)):
            raise StoreError("the server has not kept it")

    def leading(self, rows: Sequence[Sequence[str]]) -> int:
        return leading_rows(rows, self.held)

    def held(self, names: Sequence[str]) -> Sequence[bool]:
        messages = [_message(_EXIST, name) for name in names]
        return self._asked(lambda line: self._answers(line, messages))

    def remove(self, name: str) -> None:
        self.put(name, b"")

    def interrupt(self) -> None:
        with self._lock:
            for line in self._open:
                with suppress(OSError):  # it is closed by its thread
                    line.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.interrupt()

    def _kept(self, line: socket.socket, name: str, value: Bytes) -> bool:
        line.sendall(_message(_PUT, name, len(value)))
        line.sendall(value)
        return self._answers(line, [_message(_EXIST, name)])[0]  # there is no other sign that it has come

    def _answers(self, line: socket.socket, messages: Sequence[bytes]) -> list[bool]:
        found: list[bool] = []
        for first in range(0, len(messages), _TOGETHER):
            part = messages[first : first + _TOGETHER]
            line.sendall(b"".join(part))
            found += (_status(line)[0] for _ in part)
        return found

    def _asked(self, call: Callable[[socket.socket], _T]) -> _T:
        """What a call gives; after a failure the next one has a new connection."""
        line = getattr(self._of_thread, "line", None)
        if line is None:
            line = socket.create_connection(self._place, CONNECT_S)
            line.settimeout(ANSWER_S)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open.add(line)
            self._of_thread.line = line
        try:
            return call(line)
        except BaseException:
            self._of_thread.line = None
            with self._lock:
                self._open.discard(line)
            line.close()
            raise


def _message(command: int, name: str, length: int = 0) -> bytes:
    parts = name.split(":")  # a stem, a digest, a group
    key = f"{'-'.join(parts[:-2])}@1@{parts[-1]}@{parts[-2]}@uint8"
    return _ASKED.pack(command, length, _BYTES, _UINT8, 0, length, 0, 0, 0, key.encode().ljust(150))


def _status(line: socket.socket) -> tuple[bool, int]:
    """Whether an answer is yes, and the bytes of its value. Raises OSError for what is no answer."""
    status, length, *_ = _ANSWER.unpack(_read(line, _ANSWER.size))
    if status not in (_THERE, 400) or not 0 <= length <= _MOST_BYTES:
        raise OSError("what answers is no LMCache server")
    return status == _THERE, length


def _value(line: socket.socket, name: str) -> Bytes:
    """A value; b"" where there is none."""
    line.sendall(_message(_GET, name))
    there, length = _status(line)
    return _read(line, length) if there else b""


def _read(line: socket.socket, count: int) -> bytearray:
    found = bytearray(count)
    view, done = memoryview(found), 0
    while done < count:
        got = line.recv_into(view[done:])
        if not got:
            raise OSError("the server has ended the connection")
        done += got
    return found
