"""The sockets along which steps pass from process to process: one from each stage to the next, and one back.

Where several ranks compute each stage, there is such a row of sockets for each of them: the states that a stage gives
are the same in all of its ranks, and each hands its own on. What the last stage gives comes back from its first rank.
No torch here.
"""

from __future__ import annotations

import socket
from itertools import pairwise


class StageSockets:
    """Ends of sockets. Those of a stage are handed to its process, and closed here; the lead keeps its own.

    Attributes:
        columns: to the stage that the lead's is followed by, and then to the other ranks of the lead's own.
        results: from the last stage; None where layers are not dealt.
    """

    def __init__(self, stages: int, columns: int = 1) -> None:
        """For one stage there are none."""
        self._ends: dict[tuple[int, int], tuple[socket.socket, ...]] = {}
        self.columns: list[socket.socket] = []
        self.results: socket.socket | None = None
        for column in range(columns if stages > 1 else 0):
            self._pair(column, stages)

    def _pair(self, column: int, stages: int) -> None:
        first = 1 if column == 0 else 0  # the first of these stages that a process of its own computes
        back = column == 0
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(stages - first + back)]
        self.columns.append(pairs[0][0])
        if back:
            self.results = pairs[-1][1]
        ends: list[tuple[socket.socket, ...]] = [(source[1], target[0]) for source, target in pairwise(pairs)]
        if not back:
            ends.append((pairs[-1][1],))
        for place, own in enumerate(ends):
            self._ends[first + place, column] = own

    def of(self, stage: int, column: int) -> tuple[socket.socket, ...]:
        """What a rank of a stage takes from and gives to, if there is anybody; () where there are no stages."""
        return self._ends.get((stage, column), ())

    def handed_over(self) -> None:
        """All processes have been started: their ends are theirs alone, so that a stage's end is seen at the others."""
        for ends in self._ends.values():
            for end in ends:
                end.close()
