"""Latent attention in Triton."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton import matrices
from tests.kernels.triton.compare_latent import compare_coded_heads, compare_head_linear, compare_latent
from tests.kernels.triton.compare_linear import decoded


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("latent", "rotated", "heads"), [(16, 8, 6), (512, 64, 16), (24, 16, 3), (12, 20, 1)])
def test_sizes(device, latent, rotated, heads, interleaved):
    compare_latent(device, torch.float32, latent, rotated, heads, interleaved)


@pytest.mark.parametrize("kv_type", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types(device, dtype, kv_type):
    compare_latent(device, dtype, 64, 16, 5, True, kv_type)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("sizes", [(6, 10, 16, 8), (3, 128, 64, 64), (4, 16, 24, 0)])
@pytest.mark.parametrize("tokens", [0, 1, 20])
def test_a_matrix_a_head(device, tokens, sizes, interleaved):
    compare_head_linear(device, torch.float32, tokens, sizes, interleaved)


def test_a_matrix_a_head_in_other_types(device):
    compare_head_linear(device, torch.bfloat16, 3, (2, 128, 64, 16))
    matrix = matrices.affine(4, 64, rows=4 * 32)
    compare_coded_heads(device, matrix, 4, decoded(matrix))
