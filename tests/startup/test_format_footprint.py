"""The table of what weight formats become in memory is what packing does."""

from __future__ import annotations

import pytest

from penstock.kernels.cpu import native
from penstock.quant.formats import FORMATS
from penstock.quant.methods import METHODS
from penstock.startup.format_footprint import LARGEST_RATIO, FormatFootprint, format_footprints

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
CONVERTED = ("aqlm 1x16", "exl3 4 bits")  # decoded


@pytest.fixture(scope="module")
def table() -> dict[str, FormatFootprint]:
    return {row.format: row for row in format_footprints()}


def test_every_format_that_loads_is_in_it(table: dict[str, FormatFootprint]) -> None:
    blocks = {name for name, stored in FORMATS.items() if stored.block_size > 1}
    assert blocks | {"f32", "f16", "bf16", "f8_e4m3", "f8_e5m2"} <= set(table)
    alike = {"auto-round": "gptq, auto-round", "fbgemm_fp8": "fp8", "metal": "mlx"}
    for method in METHODS:
        assert any(name.startswith(alike.get(method, method)) for name in table), method


def test_what_takes_more_than_a_tenth_more_is_converted(table: dict[str, FormatFootprint]) -> None:
    """Formats may leave this list as kernels come, and none may enter it unseen."""
    assert {name for name, row in table.items() if not row.runs} <= set(CONVERTED)
    for row in table.values():
        assert row.runs == (row.ratio <= LARGEST_RATIO)
        assert 0.85 < row.ratio < 10
        assert row.packed


def test_plain_floats_take_exactly_what_they_take_in_the_file(table: dict[str, FormatFootprint]) -> None:
    assert [table[name].ratio for name in ("f32", "f16", "bf16", "f8_e4m3", "f8_e5m2")] == [1.0] * 5
