"""With which tokens an answer can begin that has to begin with some bytes."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from penstock.structured.grammar_compiler import Vocabulary


class FirstTokens:
    """A vocabulary in the order of its tokens' bytes, so that those with one beginning stand together."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        ordinary = (token for token in range(vocabulary.size) if token not in vocabulary.special_ids)
        spelt = sorted((data, token) for token in ordinary if (data := vocabulary.token_bytes(token)))
        self._spelt = [data for data, _ in spelt]
        self._ids = np.array([token for _, token in spelt], np.int64)
        self._words = (vocabulary.size + 31) // 32

    def mask(self, begins: bytes) -> npt.NDArray[np.uint32]:
        """[ceil(V / 32)] words that allow the tokens that begin with this text, which is not empty; none is special."""
        behind = begins[:-1] + bytes((begins[-1] + 1,))  # no byte of UTF-8 is the largest
        ids = self._ids[bisect_left(self._spelt, begins) : bisect_left(self._spelt, behind)]
        mask = np.zeros(self._words, np.uint32)
        np.bitwise_or.at(mask, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
        return mask
