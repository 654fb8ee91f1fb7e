"""Recurrent ops, ops on streams, and attention and products of one order, in real sizes."""

from __future__ import annotations

import pytest

from tests.gpu.sizes import Sizes
from tests.kernels.test_paged_attention import Case
from tests.kernels.triton.compare_attention import compare_chunks
from tests.kernels.triton.compare_linear import compare_by_torch, compare_row_counts
from tests.kernels.triton.compare_recurrent import CASES, channel_scan, compare_recurrent, conv, delta, scan
from tests.kernels.triton.compare_streams import (
    compare_gated_norm,
    compare_position_scales,
    compare_rows,
    compare_weighted_sum,
)

LARGE = {
    "conv": lambda: conv(8192, 4, True, "silu", False),
    "mamba 2": lambda: scan(80, 64, 128, 1, True),
    "mamba": lambda: channel_scan(5120, 16, True),
    "delta": lambda: delta(32, 16, 128, 128, False),
}


@pytest.mark.parametrize("name", [*CASES, *LARGE])
def test_recurrences(device: str, sizes: Sizes, name: str) -> None:
    if name in CASES or device == "cuda":
        compare_recurrent(device, sizes.dtype, (LARGE | CASES)[name])


def test_rows_and_streams(device: str, sizes: Sizes) -> None:
    width = 16384 if device == "cuda" else 100
    compare_weighted_sum(device, sizes.dtype, 4, width)
    compare_rows(device, sizes.dtype, width)
    compare_position_scales(device)
    compare_gated_norm(device, sizes.dtype, width, width // 4, True, False)


@pytest.mark.parametrize(("dim", "window", "sinks"), [(128, None, False), (64, 700, True), (256, None, False)])
def test_chunks_of_any_length_where_order_is_fixed(
    device: str, sizes: Sizes, dim: int, window: int | None, sinks: bool
) -> None:
    rows, heads = ((300, 1900),), (8, 2)
    cuts: tuple[int, ...] = (1, 3, 11, 12, 100, 292)
    if device != "cuda":
        rows, cuts, heads, dim = ((12, 300),), (1, 3), (2, 1), 16
    name = str(sizes.dtype).removeprefix("torch.")
    case = Case(rows, *heads, dim, dim, 16, window, sinks, dtype=sizes.dtype)
    compare_chunks(device, case, cuts, name, fixed=True)


def test_any_number_of_rows_gives_a_row_the_same_bits(device: str, sizes: Sizes) -> None:
    for inputs in (4096, 1024) if device == "cuda" else (1024,):
        counts = tuple(range(1, 65)) if device == "cuda" else (1, 17)
        compare_row_counts(device, sizes.dtype, "plain", inputs, counts, 2000 if device == "cuda" else 40)


def test_fp8_by_torch(device: str) -> None:
    compare_by_torch(device, 300)
