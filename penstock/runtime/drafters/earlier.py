"""Answers of sequences that have gone, which later ones of the same namespace may copy; their bytes are bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Final

import numpy as np

from penstock.runtime.drafters.history import History, Ids, Like

BETWEEN: Final = -1
"""Stands between two answers: no token has this number, so that nothing is found across."""
_NAMESPACE_TOKENS: Final = 1 << 16  # 0.8 MB; of more, the newer half is kept
_TOKENS: Final = 1 << 20  # of all namespaces, 12.6 MB; those that were not asked for the longest are forgotten
_NAMESPACES: Final = 1024


class Earlier:
    """Never tells of another namespace: what others were answered shows in nobody's speed.

    Attributes:
        tokens: kept ones, of all.
    """

    def __init__(self, least: int) -> None:
        """`least`: tokens that a place must have in common with the end of a sequence."""
        self._least = least
        self._answers: OrderedDict[Hashable, History] = OrderedDict()
        self.tokens = 0

    def add(self, namespace: Hashable, answer: Ids) -> None:
        """Keeps an answer."""
        if len(answer) <= self._least:
            return
        history = self._answers.pop(namespace, None) or History((), self._least)
        self.tokens -= history.size
        answer = answer[-_NAMESPACE_TOKENS // 2 :]
        if history.size + len(answer) >= _NAMESPACE_TOKENS:
            history = History(history.ids[-(_NAMESPACE_TOKENS // 2) + len(answer) :].tolist(), self._least)
        history.extend((*answer.tolist(), BETWEEN))
        self._answers[namespace] = history
        self.tokens += history.size
        while self.tokens > _TOKENS or len(self._answers) > _NAMESPACES:
            self.tokens -= self._answers.popitem(last=False)[1].size

    def like(self, namespace: Hashable, end: Ids, most: int) -> Like:
        """As History.like, in the answers of this namespace."""
        history = self._answers.get(namespace)
        if history is None:
            return Like(np.empty(0, np.int32), np.empty(0, np.int64), 0)
        self._answers.move_to_end(namespace)
        return history.like(end, most)


def one_answer(tokens: Sequence[int]) -> tuple[int, ...]:
    """What of these tokens is still the same answer."""
    found = tuple(tokens)
    return found[: found.index(BETWEEN)] if BETWEEN in found else found
