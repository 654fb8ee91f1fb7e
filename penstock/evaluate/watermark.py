"""Whether a text carries a watermark: the test of Kirchenbauer et al. 2023 (arXiv:2301.10226, section 3)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.kernels.reference.chain import is_green


@dataclass(frozen=True, slots=True)
class Detection:
    """What a test says.

    Attributes:
        scored: pairs of neighbouring tokens, each different pair once.
        green: those of them whose second token is of the list that the first one gives.
        z: by how many standard deviations that is more than chance would give.
        p: how likely chance alone gives as many.
    """

    scored: int
    green: int
    z: float
    p: float


def detect(tokens: Sequence[int], gamma: float, key: int) -> Detection:
    """Tests tokens [n]; linear in n. Repeated pairs count once, since a list that is met again says nothing new.

    Args:
        gamma: the share of tokens that are of a list, in (0, 1).
        key: the number the text may have been marked with.
    """
    pairs = dict.fromkeys(itertools.pairwise(tokens))
    followers: dict[int, list[int]] = {}
    for before, token in pairs:
        followers.setdefault(before, []).append(token)
    green = sum(int(is_green(np.array(ids), before, gamma, key).sum()) for before, ids in followers.items())
    count = len(pairs)
    z = (green - gamma * count) / math.sqrt(count * gamma * (1.0 - gamma)) if count else 0.0
    return Detection(count, green, z, math.erfc(z / math.sqrt(2.0)) / 2.0)
