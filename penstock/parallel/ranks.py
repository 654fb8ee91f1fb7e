"""Which of several processes of one model a process is, and what is its share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ranks:
    """One of `count` processes that compute the same layers, each a share of them.

    Attributes:
        rank: which, from 0.
        count: of all; 1 is the null form.
    """

    rank: int = 0
    count: int = 1

    def run(self, parts: int) -> tuple[int, int]:
        """This rank's run of so many parts, which all ranks share as equally as can be: first, and last plus one."""
        return parts * self.rank // self.count, parts * (self.rank + 1) // self.count

    def sizes(self, parts: int) -> tuple[int, ...]:
        """How many parts each rank has."""
        runs = (Ranks(rank, self.count).run(parts) for rank in range(self.count))
        return tuple(end - first for first, end in runs)


ALONE = Ranks()
