"""Torch's products of FP8 are taken only where sums of many inputs come out right."""

from __future__ import annotations

from importlib import import_module
from unittest.mock import patch

import pytest
import torch


def truncated(values, weight, *, scale_a, scale_b, **_):
    """A product whose sums are left in 14 bits, as Hopper's matrix units have them."""
    total = torch.zeros(len(values), weight.shape[1])
    for begin in range(0, values.shape[1], 32):
        total += values[:, begin : begin + 32].float() @ weight[begin : begin + 32].float()
        total = ((total.view(torch.int32) >> 10) << 10).view(torch.float32)
    return (total * scale_a * scale_b).bfloat16()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's own product is tried when kernels are chosen")
def test_the_trial_tells_sums_of_few_bits():
    scaled = import_module("penstock.kernels.triton.scaled")
    assert scaled.trial("cpu") is None
    with patch.object(torch, "_scaled_mm", truncated):
        assert "is off by" in str(scaled.trial("cpu"))


def test_sums_do_not_stay_in_matrix_units():
    scaled = import_module("penstock.kernels.triton.scaled")
    with patch.object(torch, "_scaled_mm", lambda *_, **given: torch.tensor(given["use_fast_accum"])):
        part = scaled.Eights(1, 16, torch.zeros(1, 16), torch.zeros(1, 1))
        assert not scaled._product(torch.zeros(1, 16), torch.zeros(1, 1), part)
