"""Attention of Triton has the same bits whatever a block's size is."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_paged_attention import Case, build
from tests.kernels.triton.compare import sides
from tests.kernels.triton.compare_attention import attend

ROWS = ((1, 290), (3, 17), (20, 40))


@pytest.mark.parametrize(("kv_type", "window"), [("float32", None), ("fp8", 20)])
def test_the_same_bits(device, kv_type, window):
    both = sides(device, torch.float32, "paged_attention", "plan_attention", kv_type=kv_type)
    results = []
    for size in (8, 16, 32, 64):
        case = Case(ROWS, 4, 2, 16, 16, size, window=window)
        results.append(attend(both, case, build(case), kv_type, 0.3))
    assert all(torch.equal(other, results[0]) for other in results[1:])
