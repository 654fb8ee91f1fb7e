"""Norms in Triton."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton.compare import sides
from tests.kernels.triton.compare_norms import compare_layer_norm, compare_rms_norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 36), (5, 64), (2, 1000), (2, 4096)])
@pytest.mark.parametrize("adds", [False, True])
def test_rms_norm(device, dtype, rows, size, adds):
    compare_rms_norm(device, dtype, rows, size, adds)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 36), (2, 1000)])
@pytest.mark.parametrize("biased", [False, True])
def test_layer_norm(device, dtype, rows, size, biased):
    compare_layer_norm(device, dtype, rows, size, biased)


def test_rows_that_lie_apart_and_none_at_all(device):
    both = sides(device, torch.float32, "rms_norm", "layer_norm")
    wide, weight = both.here(torch.randn(4, 50)), both.here(torch.randn(20))
    part = wide[:, 7:27]
    ours, total = both.ours.rms_norm(part, weight, 1e-6)
    both.close(ours, both.reference.rms_norm(part.cpu(), weight.cpu(), 1e-6)[0])
    assert torch.equal(total, part)
    both.close(
        both.ours.layer_norm(part, weight, None, 1e-6),
        both.reference.layer_norm(part.cpu(), weight.cpu(), None, 1e-6),
    )
    assert both.ours.rms_norm(part[:0], weight, 1e-6)[0].shape == (0, 20)
    assert both.ours.layer_norm(part[:0], weight, None, 1e-6).shape == (0, 20)
