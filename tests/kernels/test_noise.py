"""The noise of draws: as exact as it says, and what draws by it are worth to a drafter."""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

from penstock.kernels.reference.noise import NOISE_BITS, NOISE_RANGE, gumbel, noise, random_bits, scores
from penstock.kernels.reference.sampling import candidates
from penstock.kernels.sampling import RowSettings

UNIT = 2.0**NOISE_BITS


def some_bits() -> np.ndarray:
    """Both ends, where the formula is steepest, and everything between."""
    rng = np.random.default_rng(0)
    ends = np.arange(20_000, dtype=np.uint64)
    near = (2.0 ** rng.uniform(0, 32, 50_000)).astype(np.uint64)
    every = rng.integers(0, 2**32, 100_000).astype(np.uint64)
    return np.unique(np.concatenate([ends, 2**32 - 1 - ends, near, 2**32 - 1 - near, every]))


def test_noise_is_the_formula_s() -> None:
    bits = some_bits()
    uniform = (2 * bits.astype(np.float64) + 1) * 2.0**-33
    exact = -np.log(-np.log1p(uniform - 1.0))
    assert np.abs(gumbel(bits) / UNIT - exact).max() < 2.0**-28


def test_noise_rises_with_its_bits_and_keeps_its_range() -> None:
    drawn = gumbel(some_bits())
    assert (np.diff(drawn) >= 0).all()
    assert NOISE_RANGE[0] * UNIT < drawn[0] < drawn[-1] < NOISE_RANGE[1] * UNIT


def test_noise_follows_gumbel_s_distribution() -> None:
    drawn = noise(5, 0, 9, np.arange(200_000)) / UNIT
    assert stats.kstest(drawn, "gumbel_r").pvalue > 1e-4


def test_tokens_have_a_lane_each() -> None:
    tokens = np.arange(4096)
    together = random_bits(1, 2, 3, tokens)
    assert len(np.unique(together)) > 4090
    apart = [int(random_bits(1, 2, 3, np.array([token]))[0]) for token in (0, 1, 2, 3, 4, 4095)]
    assert apart == together[[0, 1, 2, 3, 4, 4095]].tolist()


def test_far_tokens_and_the_whole_range_fit() -> None:
    """Distances beyond the noise's range count as its end, and no sum overflows."""
    distances = np.array([0.0, -1e-300, -63.9, -64.0, -1e30, -math.inf])
    found = scores(distances, np.zeros(6, np.int64))
    assert (np.diff(found) <= 0).all() and (found[3:] == -64 * 2**NOISE_BITS).all()


def test_two_distributions_agree_as_often_as_the_formula_says() -> None:
    """A drafter's draw equals its target's with probability Σ_j 1 / Σ_i max(p_i / p_j, q_i / q_j)."""
    rng = np.random.default_rng(3)
    one = rng.normal(size=300).astype(np.float32) * 2
    other = one + rng.normal(size=300).astype(np.float32) * np.float32(0.7)
    settings = RowSettings(300, top_p=0.95)
    p, q = np.zeros(300), np.zeros(300)
    sides = [candidates(logits, settings) for logits in (one, other)]
    for chances, left in zip((p, q), sides, strict=True):
        chances[left.ids] = left.probabilities()
    both = np.flatnonzero((p > 0) & (q > 0))
    expected = sum(1.0 / np.maximum(p / p[j], q / q[j]).sum() for j in both)
    agreed, count = 0, 3000
    for position in range(count):
        drawn = [left.ids[np.argmax(scores(left.x, noise(1, 0, position, left.ids)))] for left in sides]
        agreed += int(drawn[0] == drawn[1])
    assert abs(agreed / count - expected) < 4 * math.sqrt(expected * (1 - expected) / count)
    overlap = np.minimum(p, q).sum()
    assert overlap / (2 - overlap) <= expected <= overlap
