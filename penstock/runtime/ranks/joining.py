"""How a worker of another machine joins: both ends show that they know one token, which never crosses.

The worker opens four connections: the wire, one from the stage before it and one to the stage behind it, and a lifeline
on which nothing is ever said. Linux answers on that for a process that is stopped, and no longer for a machine that is
gone, of which it tells within KEEP_S (TCP keepalive).
Frames themselves are not encrypted: they are for a network that is one's own.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from penstock.config.errors import ConfigError

_MAGIC: Final = b"PNSTWRK1"
_NONCE: Final = 32
_HELLO: Final = struct.Struct(f"!8s{_NONCE}s")
_ANSWER: Final = struct.Struct(f"!{_NONCE}s32s")
_PROOF: Final = struct.Struct("!1s16s32s")
WIRE: Final = b"W"
LIFE: Final = b"L"
FROM: Final = b"F"  # the stage before
TO: Final = b"T"  # the stage behind
KINDS: Final = (WIRE, LIFE, FROM, TO)
GREETING_S: Final = 2.0  # that a stranger may take
KEEP_S: Final = 4  # until a machine that is gone is noticed: one second of silence, then three questions
LEAST_TOKEN: Final = 16  # characters


@dataclass(frozen=True, slots=True)
class Caller:
    """Who has shown that they know the token.

    Attributes:
        kind: one of KINDS.
        worker: 16 bytes that all connections of a worker have in common.
        connection: to them.
    """

    kind: bytes
    worker: bytes
    connection: socket.socket


def address_of(text: str, flag: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, or [ADDRESS]:PORT.

    Raises:
        ConfigError: it is none.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit() and int(port) < 65_536):
        raise ConfigError(f"{flag} is {text!r}; allowed: HOST:PORT, such as 10.0.0.1:7000.")
    return host, int(port)


def check_token(token: str) -> str:
    """Raises ConfigError for a token that can be guessed; it is not shown."""
    if len(token) < LEAST_TOKEN:
        raise ConfigError(
            f"workers of other machines join with a token of {LEAST_TOKEN} characters or more, PENSTOCK_WORKER_TOKEN "
            "on each of them; `openssl rand -hex 32` makes one."
        )
    return token


def listen(host: str, port: int) -> socket.socket:
    """Where workers call.

    Raises:
        ConfigError: nobody can be listened for there.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        door = socket.socket(family, kind, protocol)
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind(address)
        door.listen(32)
    except OSError as error:
        raise ConfigError(f"workers cannot be listened for at {host}:{port}: {error}.") from None
    return door


def admit(door: socket.socket, token: str, wait: float) -> Caller | None:
    """The next caller who knows the token; None where nobody has come within so many seconds, or a stranger has."""
    door.settimeout(wait)
    try:
        connection, _ = door.accept()
    except OSError:
        return None
    try:
        until = time.monotonic() + GREETING_S
        magic, theirs = _HELLO.unpack(_exactly(connection, _HELLO.size, until))
        ours = secrets.token_bytes(_NONCE)
        connection.sendall(_ANSWER.pack(ours, _proof(token, b"lead", theirs, ours)))
        kind, worker, proof = _PROOF.unpack(_exactly(connection, _PROOF.size, until))
        if magic == _MAGIC and kind in KINDS and hmac.compare_digest(proof, _proof(token, kind + worker, theirs, ours)):
            return Caller(kind, worker, _kept(connection))
    except OSError:
        pass
    connection.close()
    return None


def call(address: tuple[str, int], token: str) -> dict[bytes, socket.socket]:
    """Joins: a connection of each of KINDS.

    Raises:
        OSError: nobody listens there.
        ConfigError: who listens does not know the token.
    """
    worker = secrets.token_bytes(16)
    found: dict[bytes, socket.socket] = {}
    try:
        for kind in KINDS:
            found[kind] = _called(address, token, kind, worker)
    except BaseException:
        for connection in found.values():
            connection.close()
        raise
    return found


def _called(address: tuple[str, int], token: str, kind: bytes, worker: bytes) -> socket.socket:
    connection = socket.create_connection(address, timeout=10 * GREETING_S)
    try:
        ours = secrets.token_bytes(_NONCE)
        connection.sendall(_HELLO.pack(_MAGIC, ours))
        theirs, proof = _ANSWER.unpack(_exactly(connection, _ANSWER.size, time.monotonic() + 10 * GREETING_S))
        if not hmac.compare_digest(proof, _proof(token, b"lead", ours, theirs)):
            raise ConfigError(
                f"who listens at {address[0]}:{address[1]} does not know the token; give the same on both."
            )
        connection.sendall(_PROOF.pack(kind, worker, _proof(token, kind + worker, ours, theirs)))
    except BaseException:
        connection.close()
        raise
    return _kept(connection)


def _proof(token: str, role: bytes, worker: bytes, lead: bytes) -> bytes:
    return hmac.digest(token.encode(), role + worker + lead, "sha256")


def _kept(connection: socket.socket) -> socket.socket:
    """A connection for frames: it waits as long as it takes, but not for a machine that is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", KEEP_S - 1)):
        with suppress(AttributeError, OSError):  # where the system has none
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def _exactly(connection: socket.socket, count: int, until: float) -> bytes:
    """So many bytes; raises OSError where they have not come by then, however they come."""
    data = bytearray()
    while len(data) < count:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other end is too slow")
        connection.settimeout(left)
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionError("the other end has gone")
        data += more
    return bytes(data)
