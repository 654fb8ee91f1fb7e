"""Time as its holder saw it pass: what the silence of others is judged by."""

from __future__ import annotations

import time


class WatchedTime:
    """Seconds in which its holder ran: between two looks at most `most` pass.

    Whoever was stopped (SIGSTOP, a paused container, a closed lid, a blocked event loop) and goes on finds the clock
    far ahead, and what others did meanwhile unread. By this clock they were silent only while somebody listened.
    """

    __slots__ = ("_last", "_most", "_seconds")

    def __init__(self, most: float) -> None:
        self._most = most
        self._seconds = 0.0
        self._last = time.monotonic()

    def seconds(self) -> float:
        """A look: seconds since the clock was made."""
        now = time.monotonic()
        self._seconds += min(now - self._last, self._most)
        self._last = now
        return self._seconds
