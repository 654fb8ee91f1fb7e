"""Products in matrix units, emulated: the documented arithmetic to the bit, for every packing and number of rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch

from penstock.kernels.canonical import Affine, Canonical, Plain
from penstock.kernels.cpu import native, ops
from penstock.quant.canonical_decode import decode_canonical
from tests.kernels.test_packing import ALL, ROWS, affine, plain, random_blocks

F32 = npt.NDArray[np.float32]
pytestmark = pytest.mark.skipif(
    "amx_emulated" not in native.usable_isas(), reason="the emulation of matrix units needs AVX-512"
)


@pytest.fixture(autouse=True)
def _tiles() -> Iterator[None]:
    native.select_isa("amx_emulated")
    yield
    native.select_isa("auto")


def flushed(values: npt.NDArray[np.float64] | F32) -> F32:
    """Rounded to float32; subnormal numbers become zero."""
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, 0, values).astype(np.float32)


def to_bf16(values: F32) -> F32:
    """Rounded to nearest, ties to even; subnormal numbers become zero."""
    return np.asarray(torch.from_numpy(flushed(values)).bfloat16().float().numpy(), np.float32)


def tile_product(x: F32, weights: F32) -> F32:
    """x [T, K] · weights [N, K]ᵀ as TDPBF16PS adds up: in units of 32 inputs, even and odd ones apart.

    Products of bfloat16 numbers and their sums with float32 ones are exact in float64 for the sizes used here, so that
    rounding to float32 afterwards is what a fused multiply-add does.
    """
    inputs = -(-x.shape[1] // 32) * 32
    a, b = (np.pad(to_bf16(m), ((0, 0), (0, inputs - m.shape[1]))).astype(np.float64) for m in (x, weights))
    total = np.zeros((len(x), len(weights)), np.float32)
    for unit in range(0, inputs, 32):
        halves = np.zeros((2, *total.shape), np.float32)
        for k in range(unit, unit + 32):
            halves[k % 2] = flushed(halves[k % 2] + np.multiply.outer(a[:, k], b[:, k]))
        total = flushed(total + flushed(halves[0] + halves[1]))
    return total


def stored_order(matrix: Canonical, columns: F32) -> F32:
    """Columns in the order in which a packing keeps them."""
    if isinstance(matrix, Affine) and matrix.order is not None:
        return np.ascontiguousarray(columns[:, matrix.order])
    return columns


def random_rows(rows: int, inputs: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("matrix", [m for _, m in ALL], ids=[name for name, _ in ALL])
def test_every_packing_to_the_bit(matrix: Canonical) -> None:
    exact = decode_canonical(matrix)
    x = random_rows(40, exact.shape[1])
    weight = ops.pack_linear([matrix])
    many = ops.linear(x, weight)
    if isinstance(matrix, Plain) and matrix.format == "f32":  # keeps float32 products
        native.select_isa("avx512")
        expected = ops.linear(x, weight).numpy()
        native.select_isa("amx_emulated")
    else:
        expected = tile_product(stored_order(matrix, x.numpy()), stored_order(matrix, exact))
    np.testing.assert_array_equal(many.numpy(), expected)
    for rows in (1, 2, 15, 16, 17, 31, 32, 33):
        assert torch.equal(ops.linear(x[:rows].contiguous(), weight), many[:rows]), rows


@pytest.mark.parametrize(
    "pair",
    [
        (random_blocks("q4_k", ROWS, 1), random_blocks("q6_k", ROWS, 2)),
        (random_blocks("q4_0", ROWS, 3), random_blocks("q8_0", ROWS, 4)),
        (plain("f16", None, 1), plain("f8_e4m3", (32, 48), 2)),
    ],
    ids=["q4_k", "q4_0", "f16"],
)
def test_gated_and_merged_weights(pair: tuple[Canonical, Canonical]) -> None:
    """Parts of different kinds side by side, gate and up in one pass, over several blocks of rows and threads."""
    x = random_rows(300, decode_canonical(pair[0]).shape[1])
    gate, up = (ops.linear(x, ops.pack_linear([part])) for part in pair)
    merged, bias = ops.pack_linear(pair), torch.randn(2 * ROWS, generator=torch.Generator().manual_seed(1))
    gated = ops.gated_linear(x, merged, "silu", bias)
    expected = torch.nn.functional.silu(gate + bias[:ROWS]) * (up + bias[ROWS:])
    torch.testing.assert_close(gated, expected, rtol=1e-5, atol=1e-5)
    try:
        for threads in (1, 3):
            native.set_num_threads(threads)
            assert torch.equal(ops.linear(x, merged), torch.cat([gate, up], dim=1))
            assert torch.equal(ops.gated_linear(x, merged, "silu", bias), gated)
            for rows in (1, 40, 257):
                assert torch.equal(ops.gated_linear(x[:rows].contiguous(), merged, "silu", bias), gated[:rows])
    finally:
        native.set_num_threads(1)


def test_not_a_number_reaches_the_outputs() -> None:
    x = random_rows(3, 512)
    x[1, 7] = float("nan")
    out = ops.linear(x, ops.pack_linear([affine(4, 32, "zero", 1)]))
    assert torch.isnan(out).any(dim=1).tolist() == [False, True, False]
    assert torch.isnan(out[1]).all()
