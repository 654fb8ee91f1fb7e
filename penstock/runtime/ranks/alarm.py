"""Tells whoever waits for work that a rank has ended: an engine without any would notice only at its next step."""

from __future__ import annotations

import socket
from contextlib import suppress

from penstock.config.errors import EngineDeadError


class Alarm:
    """Rung once, from any thread; readable from then on.

    Attributes:
        error: what it was rung for; None as long as it was not.
    """

    def __init__(self) -> None:
        self.error: EngineDeadError | None = None
        self._heard, self._rung = socket.socketpair()
        self._rung.setblocking(False)

    def fileno(self) -> int:
        """The descriptor that is readable once it was rung."""
        return self._heard.fileno()

    def ring(self, error: EngineDeadError) -> None:
        """There is an error that ends the engine."""
        self.error = error
        with suppress(OSError):  # it was rung before, or nobody listens any more
            self._rung.send(b"!")

    def close(self) -> None:
        """Nobody listens any more."""
        self._heard.close()
        self._rung.close()
