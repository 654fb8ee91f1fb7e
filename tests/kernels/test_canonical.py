"""Taking matrices apart and joining them keeps every value, also where rows share scales."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.kernels.canonical import Plain, concatenate, take_rows
from penstock.quant.canonical_decode import decode_canonical

TILES = [(1, 32), (128, 32), (100, 64), (300, 64)]


def tiled(tile: tuple[int, int], seed: int) -> Plain:
    """300 rows of 64 float8 values, whose scales are all different."""
    rng = np.random.default_rng(seed)
    shape = -(-300 // tile[0]), 64 // tile[1]
    scales = rng.uniform(0.5, 2.0, shape).astype(np.float32)
    return Plain("f8_e4m3", (300, 64), rng.integers(0, 0x7E, 300 * 64, dtype=np.uint8), scales, tile)


@pytest.mark.parametrize("tile", TILES)
def test_rows_are_taken_with_their_scales(tile: tuple[int, int]) -> None:
    matrix = tiled(tile, 1)
    rows = np.random.default_rng(2).permutation(300)[:77]
    assert np.array_equal(decode_canonical(take_rows(matrix, rows)), decode_canonical(matrix)[rows])


@pytest.mark.parametrize("tile", TILES)
def test_matrices_are_joined_with_their_scales(tile: tuple[int, int]) -> None:
    parts = [tiled(tile, seed) for seed in range(3)]
    assert np.array_equal(decode_canonical(concatenate(parts)), np.concatenate([decode_canonical(p) for p in parts]))


def test_what_differs_is_not_joined() -> None:
    with pytest.raises(ValueError, match="matrices of different tile"):
        concatenate([tiled((1, 32), 0), tiled((1, 64), 0)])
