"""Which of several processes of one model a process is, and what is its share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ranks:
    """One of `count` processes that compute the same layers, each a share of them.

    Attributes:
        rank: its number, from 0 on; 0 leads.
        count: how many there are; 1 is the null form.
    """

    rank: int = 0
    count: int = 1

    @property
    def alone(self) -> bool:
        """Whether there is no other."""
        return self.count == 1

    @property
    def name(self) -> str:
        """Names what this rank owns, in names of files; "" where that is all."""
        return "" if self.alone else f"rank{self.rank}of{self.count}"

    def run(self, parts: int) -> tuple[int, int]:
        """This rank's run of so many parts, which all ranks share as equally as can be: first, and last plus one."""
        return parts * self.rank // self.count, parts * (self.rank + 1) // self.count


ALONE = Ranks()
