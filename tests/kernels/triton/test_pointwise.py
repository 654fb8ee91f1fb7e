"""Small ops in Triton."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton.compare import sides
from tests.kernels.triton.compare_pointwise import compare_pointwise

OPS = ("add", "multiply", "sigmoid_gate", "soft_cap", "scale_rows", "take_rows")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "size"), [(1, 2), (4, 1500)])
def test_equals_the_reference(device, op, dtype, rows, size):
    compare_pointwise(device, op, torch.float32 if op == "soft_cap" else dtype, rows, size)


def test_no_rows(device):
    ops = sides(device, torch.float32, *OPS).ours
    x = torch.zeros(0, 5)
    assert ops.add(x, x).shape == ops.take_rows(x, torch.zeros(0, dtype=torch.int64)).shape == (0, 5)
    assert ops.scale_rows(x.view(0, 5, 1), torch.zeros(0, 1)).shape == (0, 5, 1)


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_from_outside(device, dtype, level):
    both = sides(device, dtype, "inject")
    torch.manual_seed(3)
    x, values = torch.randn(7, 1030).to(dtype), torch.randn(2, 3, 1030).to(dtype)
    rows = torch.tensor([6, 0, 3])
    found = both.ours.inject(both.here(x.clone()), both.here(rows), both.here(values), level)
    assert torch.equal(found.cpu(), both.reference.inject(x.clone(), rows, values, level))
    kept = both.ours.inject(both.here(x.clone()), both.here(rows[:0]), both.here(values[:, :0]), level)
    assert torch.equal(kept.cpu(), x)
