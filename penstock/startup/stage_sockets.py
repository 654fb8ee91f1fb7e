"""The sockets along which steps pass from process to process: one from each stage to the next, and one back.

No torch here.
"""

from __future__ import annotations

import socket
from itertools import pairwise


class StageSockets:
    """Ends of sockets. Those of a stage are handed to its process, and closed here; the lead keeps its own."""

    def __init__(self, stages: int) -> None:
        """For one stage there are none."""
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(stages)] if stages > 1 else []
        self._of_stages = [(source[1], target[0]) for source, target in pairwise(pairs)]
        self.lead = (pairs[0][0], pairs[-1][1]) if pairs else None

    def of(self, stage: int) -> tuple[socket.socket, ...]:
        """What stage 1 and those behind it take from and give to; () where there are no stages."""
        return self._of_stages[stage - 1] if self._of_stages else ()

    def handed_over(self) -> None:
        """All processes have been started: their ends are theirs alone, so that a stage's end is seen at the others."""
        for ends in self._of_stages:
            for end in ends:
                end.close()
