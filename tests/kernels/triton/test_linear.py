"""Products over packed weights, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from penstock.kernels.canonical import Blocks, Plain
from penstock.quant.formats import FORMATS
from tests.kernels.triton import matrices
from tests.kernels.triton.compare import sides
from tests.kernels.triton.compare_linear import (
    compare_activate,
    compare_by_torch,
    compare_gated,
    compare_gated_rows,
    compare_linear,
    compare_row_counts,
    compare_table,
    fixed_kernels,
)

NAMES = [*matrices.coded(), *matrices.eights()]
HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("name", NAMES)
def test_linear(device, name):
    compare_linear(device, torch.float32, name, 3, adds=False)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["q4_0", "4 bits, zeros", "fp4", "fp8, channel", "fp8, blocks", "int8"])
def test_linear_adds_bias_and_residual(device, dtype, name):
    compare_linear(device, dtype, name, 18, adds=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["q4_0", "q4_k", "4 bits, order", "fp4"])
def test_codes_are_unpacked_for_many_rows(device, dtype, name, monkeypatch):
    from penstock.kernels.triton import unpacked

    multiplied = Mock(wraps=unpacked.multiply)
    monkeypatch.setattr(unpacked, "multiply", multiplied)
    monkeypatch.setattr(unpacked, "MANY", 4)
    monkeypatch.setattr(unpacked, "MANY_COSTLY", 4)
    compare_linear(device, dtype, name, 3, adds=True)
    assert not multiplied.call_count
    compare_linear(device, dtype, name, 18, adds=True)
    compare_linear(device, dtype, name, 18, adds=False)
    assert multiplied.call_count == 2
    weight = fixed_kernels(device, dtype).pack_linear([matrices.coded()[name]])
    fixed_kernels(device, dtype).linear(
        sides(device, dtype).here(torch.zeros(18, matrices.INPUTS, dtype=dtype)), weight
    )
    assert multiplied.call_count == 2


@pytest.mark.parametrize("rows", [3, 260])
def test_many_rows_of_fp8_by_torch(device, rows):
    compare_by_torch(device, rows)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_gated_linear(device, activation, mixed):
    compare_gated(device, torch.float32, activation, mixed)


@pytest.mark.parametrize(("name", "inputs"), [("plain", 1100), ("4 bits", 1088)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_linear_in_segments(device, dtype, name, inputs):
    compare_gated_rows(device, dtype, name, inputs)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2", "clip"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activate(device, activation, dtype):
    compare_activate(device, dtype, activation)


@pytest.mark.parametrize("name", ["q4_k", "q6_k", "q8_0", "nf4", "fp8, blocks", "int8"])
def test_table(device, name):
    compare_table(device, torch.bfloat16 if name == "q4_k" else torch.float32, name)


@pytest.mark.parametrize("name", ["plain", "q4_k", "4 bits, zeros", "fp8, channel", "int8"])
def test_a_row_has_the_same_bits_among_others(device, name):
    compare_row_counts(device, torch.bfloat16, name, 1100, (1, 2, 17, 40))


def test_any_number_of_rows_gives_a_row_the_same_bits(device):
    most = 2000 if device == "cuda" else 130
    counts = range(1, 65) if device == "cuda" else (1, 3, 8, 16, 17, 33, 64)
    compare_row_counts(device, torch.bfloat16, "plain", 1024, tuple(counts), most)
    compare_row_counts(device, torch.bfloat16, "plain", 96, (1, 40), 1030)  # tiles of 256 rows


def test_no_rows(device):
    both = sides(device, torch.float32, "linear")
    for name in ("q4_0", "int8"):
        matrix = (matrices.coded() | matrices.eights())[name]
        x = both.here(torch.zeros(0, matrix.shape[1]))
        assert both.ours.linear(x, both.ours.pack_linear([matrix])).shape == (0, matrices.ROWS)


def test_what_has_no_packing_says_why(device):
    packable = sides(device, torch.float32, "packable").ours.packable
    assert "24" in str(packable(replace(matrices.affine(4, 32), group=24)))
    assert "iq2_xxs" in str(packable(Blocks("iq2_xxs", (1, 256), np.zeros(FORMATS["iq2_xxs"].block_bytes, np.uint8))))
    assert "tiles of 48" in str(packable(matrices.fp8((32, 48))))
    assert "compute type" in str(packable(Plain("bf16", (1, 2), np.zeros(4, np.uint8))))
