"""Answers that go round in circles."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from penstock.config.lengths import Repetition

REPEATED: Final = "repetition_detected"
"""Why such an answer has stopped, in vLLM's word."""


class Loop:
    """Watches a sequence's tokens for a pattern that stands at their end several times, one after the other.

    For each size of a pattern it counts how many tokens in a row are those of so many places before: a token costs as
    many comparisons as there are sizes.
    """

    def __init__(self, asked: Repetition) -> None:
        self._sizes = range(asked.shortest, asked.longest + 1)
        self._repeats = asked.count - 1
        self._last: deque[int] = deque(maxlen=asked.longest)
        self._equal = [0] * len(self._sizes)

    def end(self, tokens: Sequence[int]) -> int:
        """How many of these tokens there are when a pattern is there once too often; 0 while it is not."""
        for place, token in enumerate(tokens, 1):
            if self._take(token):
                return place
        return 0

    def _take(self, token: int) -> bool:
        found = False
        for index, size in enumerate(self._sizes):
            same = size <= len(self._last) and self._last[-size] == token
            self._equal[index] = self._equal[index] + 1 if same else 0
            found = found or self._equal[index] >= size * self._repeats
        self._last.append(token)
        return found
