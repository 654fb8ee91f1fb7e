"""Ops on rows and streams of rows in Triton."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton.compare import sides
from tests.kernels.triton.compare_streams import (
    compare_gated_norm,
    compare_position_scales,
    compare_rows,
    compare_weighted_sum,
)

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("terms", "size"), [(1, 5), (4, 1100), (8, 64)])
def test_weighted_sum(device, dtype, terms, size):
    compare_weighted_sum(device, dtype, terms, size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 67, 2048])
def test_rows(device, dtype, size):
    compare_rows(device, dtype, size)


def test_position_scales(device):
    compare_position_scales(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "group"), [(64, None), (96, 24), (33, 11)])
@pytest.mark.parametrize(("gated", "first"), [(False, False), (True, False), (True, True)])
def test_gated_norm(device, dtype, size, group, gated, first):
    compare_gated_norm(device, dtype, size, group, gated, first)


def test_no_rows_and_too_many_terms(device):
    ops = sides(device, torch.float32, "weighted_sum", "match_rms", "statistical_topk", "gated_rms_norm").ours
    x = torch.zeros(0, 5)
    for none in (ops.weighted_sum(x, [x], x), ops.match_rms(x, x, 1.0), ops.statistical_topk(x, 1.0)):
        assert none.shape == (0, 5)
    assert ops.gated_rms_norm(x, None, torch.ones(5), 1e-6).shape == (0, 5)
    assert ops.position_scales(torch.zeros(0, dtype=torch.int64), 1.0, 1.0).shape == (0, 1)
    with pytest.raises(ValueError, match="9 terms; allowed: 1 to 8"):
        ops.weighted_sum(torch.zeros(1, 5), [torch.zeros(1, 5)] * 9, torch.zeros(1, 9))
