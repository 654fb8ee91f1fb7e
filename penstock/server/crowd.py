"""How many connections are open at once: fewer than the files this process may open, so that operators get in."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any

from penstock.server.auth import PUBLIC_PATHS
from penstock.server.connection import LimitedProtocol
from penstock.server.framing import Refused

_OWN_FILES = 32  # that are opened later: the engine's sockets and pipes, files of models and responses
_SPARE = 16  # connections beyond the limit, which get answers to operators' questions only
_MOST_FILES = 65_536
_OPERATORS = PUBLIC_PATHS | {"/metrics"}
_SOCKET_CALLS = (("busy", "busy"), ("rest", "rest"), ("closed", "leave"))
_log = logging.getLogger("penstock.server")


def raise_file_limit() -> None:
    """Lets this process open as many files as the system allows, within reason."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connection_limit() -> int:
    """Connections that the files leave room for which this process may still open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = _MOST_FILES
    try:
        taken = len(os.listdir("/proc/self/fd"))
    except OSError:
        taken = _OWN_FILES
    return max(1, soft - taken - _OWN_FILES - _SPARE)


class Crowd:
    """The connections of a server. Where there are too many, the one that has been idle longest goes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: set[CrowdedProtocol] = set()
        self._idle: OrderedDict[CrowdedProtocol, None] = OrderedDict()
        self._told = False

    def enter(self, connection: CrowdedProtocol) -> bool:
        """Takes a new connection, which is idle; whether it may ask for more than operators do."""
        self._open.add(connection)
        self._idle[connection] = None
        if len(self._open) <= self._most:
            return True
        self._tell()
        while len(self._open) > self._most and (oldest := next(iter(self._idle))) is not connection:
            self._send_away(oldest)
        if len(self._open) > self._most + _SPARE:
            self._send_away(connection)
        return len(self._open) <= self._most

    def busy(self, connection: CrowdedProtocol) -> None:
        """It has sent a request's head."""
        self._idle.pop(connection, None)

    def rest(self, connection: CrowdedProtocol) -> None:
        """Its last request is answered."""
        if connection in self._open:
            self._idle[connection] = None
            self._idle.move_to_end(connection)

    def leave(self, connection: CrowdedProtocol) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def _send_away(self, connection: CrowdedProtocol) -> None:
        self.leave(connection)
        connection.drop()

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            _log.warning(
                "%d connections are open, the most that this process's limit of open files leaves room for; those idle "
                "longest are closed for new ones. Raise the limit with `ulimit -n`, or put a proxy in front.",
                self._most,
            )


class CrowdedProtocol(LimitedProtocol):
    """A connection that makes room for others while it is idle."""

    def __init__(self, *args: Any, crowd: Crowd, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._crowd = crowd
        self._welcome = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._welcome = self._crowd.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.leave(self)
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        if not self._welcome and self.url.partition(b"?")[0].decode("latin-1") not in _OPERATORS:
            message = "The server has as many connections as it can hold; retry in a moment."
            self._raise(Refused(HTTPStatus.SERVICE_UNAVAILABLE, message))
        self._crowd.busy(self)
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle is None or self.cycle.response_complete:
            self._crowd.rest(self)

    def socket_calls(self) -> dict[str, Callable[[], None]]:
        self._crowd.rest(self)
        calls = {name: partial(getattr(self._crowd, told), self) for name, told in _SOCKET_CALLS}
        return {**super().socket_calls(), **calls}

    def drop(self) -> None:
        """Closes the connection at once, whether or not the client reads."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()
