"""Ranks: the processes that compute one model together, and what each of them owns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ranks:
    """One process among those that share a model's weights.

    Attributes:
        rank: its number, from 0 on; 0 leads.
        count: how many there are.
    """

    rank: int
    count: int

    @property
    def alone(self) -> bool:
        """Whether there is no other."""
        return self.count == 1

    @property
    def name(self) -> str:
        """Names what this rank owns, in names of files; "" where that is all."""
        return "" if self.alone else f"rank{self.rank}of{self.count}"


ALONE = Ranks(0, 1)


def runs(segments: int, ranks: Ranks) -> tuple[int, int]:
    """The run of so many segments that a rank owns: (first, end). Runs differ by one segment at most."""
    return segments * ranks.rank // ranks.count, segments * (ranks.rank + 1) // ranks.count
