"""Prefixes that come up from the tier below while those who asked for them wait for a place in the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from penstock.core.kv.cache import KVCache
from penstock.core.kv.node import Match
from penstock.core.sequence import Sequence, SequenceState

_LOOKED_AT = 8  # sequences, the first of the queue


class Preloading:
    """Has a few prefixes loaded ahead, as many at a time as the tier says.

    What is loaded belongs to a sequence of its own, which holds no request slot and ends with the load: then the blocks
    lie in the prefix tree like those of anybody who has left. Whoever is admitted meanwhile waits for it.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._begun: list[Sequence] = []
        self._seen: list[Sequence] = []  # of the first in the queue, those that need not be looked at again
        self._lacking: tuple[Sequence, int] | None = None  # who found no room, and how many releases there had been

    def begin(self, waiting: Iterable[Sequence], fits: Callable[[Sequence, Match], bool]) -> None:
        """Begins what is worth it for the first of the queue; `fits` tells whether one fits beside those that run."""
        most = self._cache.transfers.tier.preloads
        if not most:
            return
        first = list(islice(waiting, _LOOKED_AT))
        self._begun = [ahead for ahead in self._begun if ahead.state is SequenceState.RUNNING]
        self._seen = [sequence for sequence in self._seen if sequence in first]
        for sequence in first:
            if len(self._begun) >= most or self._lacking == (sequence, self._cache.releases):
                return
            if sequence in self._seen:
                continue
            if not self._begin(sequence, fits):
                self._lacking = sequence, self._cache.releases
                return
            self._seen.append(sequence)

    def _begin(self, sequence: Sequence, fits: Callable[[Sequence, Match], bool]) -> bool:
        """Whether there was room, if there was anything to load."""
        if sequence.request.encoder is not None:
            return True
        match = self._cache.match(sequence, sequence.reusable)
        if not match.below:
            return True
        ahead = Sequence(sequence.request, -1, sequence.order, sequence.namespace, list(sequence.tokens))
        if not fits(sequence, match) or not self._load(ahead, match):
            return False
        self._begun.append(ahead)
        return True

    def _load(self, ahead: Sequence, match: Match) -> bool:
        """Has what a match has below loaded; False, and nothing is held, where there is no room."""
        cache = self._cache
        if not cache.attach(ahead, match) or cache.extend_for_loads(ahead, match) is None or ahead.allocation is None:
            cache.release(ahead, keep=False)
            return False
        ahead.state = SequenceState.RUNNING
        allocation = ahead.allocation
        allocation.state_marks = [match.reach]  # where whoever is admitted meanwhile goes on
        keys = ahead.keys[: match.reach]
        allocation.announced = cache.tree.announce(allocation.cursor, ahead.namespace, keys, ahead)
        cache.transfers.load(ahead, allocation, match.below)
        return True
