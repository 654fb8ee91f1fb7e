"""Threads for work on the library, which lasts for as long as some other server likes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from penstock.server.errors import not_ready
from penstock.server.siblings import Siblings

AT_ONCE = 4  # of a whole server
THREAD_NAME = "penstock-library"
_RETRY_S = 10


def dealt(at_once: int, siblings: Siblings | None) -> int:
    """How much of what a whole server may do at once is this process's, of several HTTP processes; at least 1."""
    return at_once if siblings is None else max(1, at_once // siblings.count)


class LibraryThreads:
    """A few threads, apart from those with which the server answers requests. They do not keep the process alive.

    Belongs to one event loop.
    """

    def __init__(self, at_once: int = AT_ONCE) -> None:
        """`at_once` is how much work may be under way."""
        self._at_once = at_once
        self._running = 0

    def start(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        """Begins work; what it gives. Its place is taken until it ends, whether or not anybody waits for it.

        Raises:
            HttpError: 503, as much work as may be is under way.
        """
        if self._running >= self._at_once:
            message = f"The library is busy with {self._running} pulls or other changes; try again later."
            raise not_ready(message, "library_busy", _RETRY_S)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def ended(result: Any, error: BaseException | None) -> None:
            self._running -= 1
            if future.done():  # nobody waits any more
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def run() -> None:
            result, error = None, None
            try:
                result = work()
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(ended, result, error)

        self._running += 1
        threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()
        return future
