"""Connections of a socket on which several processes listen, taken so that each gets about as many."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Final

PAUSE_S: Final = 0.0001  # for each connection that a process has
LONGEST_S: Final = 0.001
_AFTER_ERROR_S = 1.0  # no descriptor, no memory: those that end give some back
_log = logging.getLogger(__name__)


def pause(connections: int) -> float:
    """Seconds to wait between two connections, of a process that has so many.

    Whoever wakes first would take all that come at once. One that has more waits longer, so that those that have fewer
    are first; nobody waits long, since the others may be busy or gone. A loop whose timers are whole milliseconds
    (uvloop's) rounds: with a few connections a process waits for a turn of the loop alone, with more for 1 ms.
    """
    return min(LONGEST_S, PAUSE_S * connections)


class Accepting:
    """Takes connections of a listening socket, which it closes at the end. Belongs to the running event loop."""

    def __init__(
        self, listener: socket.socket, protocol: Callable[[], asyncio.Protocol], connections: Callable[[], int]
    ) -> None:
        """`protocol` is made for each connection, `connections` tells how many there are now."""
        self._listener, self._protocol = listener, protocol
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        self._wait()

    def close(self) -> None:
        """Takes none any more; those that were taken stay."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()

    def _wait(self) -> None:
        self._timer = None
        self._loop.add_reader(self._listener.fileno(), self._take)

    def _take(self) -> None:
        """One connection waits, unless another process was quicker."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            _log.error("a connection cannot be taken: %s", error)
            self._rest(_AFTER_ERROR_S)
            return
        task = asyncio.create_task(self._open(connection))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        self._rest(pause(self._connections() + len(self._opening)))

    def _rest(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._timer = self._loop.call_later(seconds, self._wait)

    async def _open(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError:  # its client has gone already
            connection.close()
