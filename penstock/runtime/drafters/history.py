"""A sequence's tokens, kept so that earlier places like its end are found by comparing arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Places = npt.NDArray[np.int64]
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no token is lost
_SEARCHED: Final = 4096  # places like the end that are looked at further: the last ones
_LATEST: Final = 64  # of those with the most in common, that are told


class Like(NamedTuple):
    """Places like the end of a sequence.

    Attributes:
        ids: all tokens of where they are.
        places: positions behind them, rising, at most 64.
        common: how many tokens they have in common with the end.
    """

    ids: Ids
    places: Places
    common: int


class History:
    """Tokens that only grow. A lookup compares one array of 8 bytes a token; 100,000 tokens take 0.03 to 0.3 ms."""

    def __init__(self, tokens: Sequence[int], least: int) -> None:
        """`least`: tokens that a place must have in common with the end, at least 1."""
        self._least = least
        self._pending: list[Sequence[int]] = [tokens]
        self._size = 0
        self._ids: Ids = np.empty(0, np.int32)
        self._keys: npt.NDArray[np.uint64] = np.empty(0, np.uint64)  # of the `least` tokens that end there

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens that follow; they are entered when somebody looks."""
        self._pending.append(tokens)

    def like_the_end(self, most: int) -> Like:
        """Earlier places whose tokens before are those at the end, as many as possible, `least` to `most`."""
        return self.like(self.ids, most)

    def like(self, end: Ids, most: int) -> Like:
        """As `like_the_end`, for the end of other tokens."""
        self._enter()
        size, ids = self._size, self._ids
        if len(end) < self._least or size <= self._least:
            return Like(ids[:size], np.empty(0, np.int64), 0)
        key = _keys(end[-self._least :], self._least)[-1]
        places = np.flatnonzero(self._keys[self._least - 1 : size - 1] == key)[-_SEARCHED:]
        places += self._least
        common = self._least
        while common < min(most, len(end)) and len(places):
            longer = places[places > common]
            longer = longer[ids[longer - common - 1] == end[len(end) - common - 1]]
            if not len(longer):
                break
            places = longer
            common += 1
        return Like(ids[:size], places[-_LATEST:], common)

    @property
    def size(self) -> int:
        """How many tokens there are."""
        return self._size + sum(map(len, self._pending))

    @property
    def ids(self) -> Ids:
        """All tokens; not to be changed."""
        self._enter()
        return self._ids[: self._size]

    def _enter(self) -> None:
        added = sum(map(len, self._pending))
        if not added:
            return
        if self._size + added > len(self._ids):
            room = max(64, 2 * (self._size + added))
            self._ids, self._keys = np.resize(self._ids, room), np.resize(self._keys, room)
        begin = self._size
        for tokens in self._pending:
            self._ids[self._size : self._size + len(tokens)] = tokens
            self._size += len(tokens)
        self._pending.clear()
        first = max(0, begin - self._least + 1)
        self._keys[begin : self._size] = _keys(self._ids[first : self._size], self._least)[begin - first :]


def in_common(ids: Ids, place: int, most: int) -> int:
    """How many tokens before a place are those at the end, at most so many."""
    count = min(place, most)
    apart = np.flatnonzero(ids[place - count : place][::-1] != ids[len(ids) - count :][::-1])
    return int(apart[0]) if len(apart) else count


def _keys(ids: Ids, least: int) -> npt.NDArray[np.uint64]:
    """Of each token, a number that is the same wherever it and those before it, `least` in all, are the same."""
    keys = np.zeros(len(ids), np.uint64)
    for back in range(min(least, len(ids))):
        before = ids[: len(ids) - back].astype(np.uint64)
        keys[back:] = keys[back:] * _MIX + before
    return keys
