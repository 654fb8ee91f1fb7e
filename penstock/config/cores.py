"""Cores that several engines of one machine share: each uses an even part of them while others are at work.

Threads of two engines that want the same core wait for each other within every step. So engines note in a shared file
whether they have work, and one that begins a step takes as many threads as its part of the cores has.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from typing import Final

PLACES: Final = 256  # engines that can be told apart; further ones take all their threads
_WORKS = b"\x01"


def part_of(cores: int, working: int, rank: int) -> int:
    """How many of so many cores the one of this rank uses, of so many that work: even parts, at least one each."""
    return max(1, (cores + working - 1 - rank) // working)


class CoreShare:
    """One engine's place in the file, and what it takes of the cores. Belongs to the thread that steps."""

    def __init__(self, file: int, place: int, threads: int, set_threads: Callable[[int], None]) -> None:
        """`file` is the descriptor of a board's file, which is closed here; `threads` are what it uses alone;
        `set_threads` is told what it uses from now on.

        Raises:
            OSError, ValueError: there is no such file.
        """
        self._map = mmap.mmap(file, PLACES)
        os.close(file)
        self._place = place
        self._alone = self._now = threads
        self._set_threads = set_threads

    def work(self) -> None:
        """A step begins."""
        self._map[self._place] = 1
        noted = self._map[:]
        rank, working = noted[: self._place].count(_WORKS), noted.count(_WORKS)
        self._use(min(self._alone, part_of(self._alone, working, rank)))

    def rest(self) -> None:
        """There is nothing to do; the others may have its cores."""
        self._map[self._place] = 0

    def close(self) -> None:
        """It works no more."""
        self.rest()
        self._map.close()

    def _use(self, threads: int) -> None:
        if threads != self._now:
            self._now = threads
            self._set_threads(threads)


class AllCores:
    """Of an engine that shares its cores with none that it is told of."""

    def work(self) -> None:
        """A step begins."""

    def rest(self) -> None:
        """There is nothing to do."""

    def close(self) -> None:
        """It works no more."""


class CoreBoard:
    """The file of all engines that a host starts, and who has which place in it. It has no name: nothing is left of it.

    Attributes:
        file: its descriptor, which engines inherit.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (`close` closes it)
        self._file.truncate(PLACES)
        self.file = self._file.fileno()
        self._taken: set[int] = set()

    def take(self) -> int | None:
        """A free place; None where there is none."""
        place = next((place for place in range(PLACES) if place not in self._taken), None)
        if place is not None:
            self._taken.add(place)
        return place

    def clear(self, place: int) -> None:
        """The engine there has ended, however it did: it has no work any more."""
        os.pwrite(self.file, b"\x00", place)

    def give_back(self, place: int) -> None:
        """The place is whoever's who takes it next."""
        self.clear(place)
        self._taken.discard(place)

    def close(self) -> None:
        """There are no engines any more."""
        self._file.close()
