"""The reference decode of canonical matrices, against plain loops."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from penstock.kernels.canonical import Affine, Blocks, Canonical, Codebook, Plain
from penstock.quant import canonical_decode
from penstock.quant.canonical_decode import decode_canonical
from penstock.quant.decode import canonical_tensor
from penstock.quant.formats import decode_to_float32

N, K, GROUP = 7, 12, 4
RNG = np.random.default_rng(0)
CODES = RNG.integers(0, 16, (N, K), dtype=np.uint8)
SCALES = RNG.random((N, K // GROUP), dtype=np.float32)
ZEROS = RNG.integers(0, 16, (N, K // GROUP), dtype=np.uint8)
MINIMUMS = RNG.random((N, K // GROUP), dtype=np.float32)
ORDER = RNG.permutation(K).astype(np.int32)
TABLE = RNG.random(16, dtype=np.float32)
BYTES = RNG.integers(0, 120, N * K, dtype=np.uint8)
TILES = RNG.random((3, 3), dtype=np.float32)

Entry = Callable[[int, int], float]
CASES: dict[str, tuple[Canonical, Entry]] = {
    "zero": (
        Affine(CODES, 4, GROUP, SCALES, zero=8),
        lambda n, k: np.float32(int(CODES[n, k]) - 8) * SCALES[n, k // GROUP],
    ),
    "zeros": (
        Affine(CODES, 4, GROUP, SCALES, zeros=ZEROS),
        lambda n, k: np.float32(int(CODES[n, k]) - int(ZEROS[n, k // GROUP])) * SCALES[n, k // GROUP],
    ),
    "minimums": (
        Affine(CODES, 4, GROUP, SCALES, minimums=MINIMUMS),
        lambda n, k: np.float32(np.float32(CODES[n, k]) * SCALES[n, k // GROUP]) + MINIMUMS[n, k // GROUP],
    ),
    "order": (
        Affine(CODES, 4, GROUP, SCALES, order=ORDER),
        lambda n, k: np.float32(CODES[n, at := list(ORDER).index(k)]) * SCALES[n, at // GROUP],
    ),
    "codebook": (
        Codebook(CODES, TABLE, GROUP, SCALES),
        lambda n, k: TABLE[CODES[n, k]] * SCALES[n, k // GROUP],
    ),
    "plain": (
        Plain("f8_e4m3", (N, K), BYTES),
        lambda n, k: decode_to_float32("f8_e4m3", BYTES)[n * K + k],
    ),
    "tiles": (
        Plain("f8_e4m3", (N, K), BYTES, TILES, (3, 5)),
        lambda n, k: decode_to_float32("f8_e4m3", BYTES)[n * K + k] * TILES[n // 3, k // 5],
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chunk", [1, 2 * K, 2**20])
def test_every_entry(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canonical_decode, "_CHUNK", chunk)
    matrix, entry = CASES[name]
    expected = np.array([[entry(n, k) for k in range(K)] for n in range(N)], dtype=np.float32)
    assert np.array_equal(decode_canonical(matrix), expected)
    assert torch.equal(canonical_tensor(matrix, torch.bfloat16), torch.from_numpy(expected).bfloat16())


def test_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canonical_decode, "_CHUNK", 200)
    data = RNG.integers(0, 120, 5 * 3 * 17, dtype=np.uint8)
    matrix = Blocks("mxfp4", (5, 96), data)
    assert np.array_equal(decode_canonical(matrix), decode_to_float32("mxfp4", data).reshape(5, 96))
