"""Latent attention in Triton."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton.compare_latent import compare_latent


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("latent", "rotated", "heads"), [(16, 8, 6), (512, 64, 16), (24, 16, 3), (12, 20, 1)])
def test_sizes(device, latent, rotated, heads, interleaved):
    compare_latent(device, torch.float32, latent, rotated, heads, interleaved)


@pytest.mark.parametrize("kv_type", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types(device, dtype, kv_type):
    compare_latent(device, dtype, 64, 16, 5, True, kv_type)
