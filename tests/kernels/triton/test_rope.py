"""Rotation with head norms and cache writes in Triton."""

from __future__ import annotations

import pytest
import torch

from penstock.config.errors import ConfigError
from penstock.kernels.api import resolve_kernels
from penstock.kernels.registry import KernelContext
from tests.kernels.triton.compare_rope import compare_rope, compare_rope_tables, compare_rotate_heads

FLOAT, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("dim", [10, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (16, 1)])
def test_head_sizes(device, dim, heads):
    compare_rope(device, FLOAT, heads, (dim, dim), dim)


@pytest.mark.parametrize("norm", ["each", "all", "layer", "rotated"])
@pytest.mark.parametrize("dtype", [FLOAT, BRAIN])
def test_head_norms(device, norm, dtype):
    compare_rope(device, dtype, (6, 2), (80, 80), 80, norm)
    compare_rope(device, dtype, (5, 5), (12, 12), 8, norm)


@pytest.mark.parametrize(("rotated", "value_dim"), [(32, 64), (64, 48), (2, 16)])
def test_part_of_a_head_rotates_and_values_have_a_size_of_their_own(device, rotated, value_dim):
    compare_rope(device, FLOAT, (6, 3), (64, value_dim), rotated)


@pytest.mark.parametrize("kv_type", ["float32", "bfloat16", "float16", "fp8"])
@pytest.mark.parametrize("dtype", [FLOAT, BRAIN, HALF])
def test_cache_types(device, kv_type, dtype):
    compare_rope(device, dtype, (4, 2), (24, 10), 24, "each", kv_type, tokens=9, block_size=16)
    compare_rope(device, dtype, (40, 8), (128, 128), 128, None, kv_type, tokens=2, block_size=3)


def test_other_cache_types_are_refused(device):
    with pytest.raises(ConfigError, match="fp8, not int4"):
        resolve_kernels(KernelContext(device, "float32", kv_type="int4"))


def test_no_tokens(device):
    compare_rope(device, FLOAT, (4, 2), (8, 8), 8, tokens=0)


def test_tables_of_far_positions(device):
    positions = torch.tensor([0, 1, 2, 3, 1000, 131_071, 1_000_000, 3_000_000])
    compare_rope_tables(device, positions, 500_000.0 ** -(torch.arange(64) / 64), 1.0)
    compare_rope_tables(device, positions, torch.tensor([1.0, 0.7853981633974483, 1.5707963267948966]), 1.25)
    compare_rope_tables(device, positions[:0], torch.tensor([1.0]), 1.0)


def test_tables_of_positions_on_several_axes(device):
    positions = torch.tensor([[0, 1, 2, 70_000, 3], [0, 5, 9, 11, 3], [0, 2, 4, 8, 3]])
    axes = torch.tensor([0, 0, 1, 1, 1, 2], dtype=torch.int32)
    compare_rope_tables(device, positions, 10_000.0 ** -(torch.arange(6) / 6), 1.0, axes)


@pytest.mark.parametrize("dtype", [FLOAT, BRAIN])
def test_rotate_heads(device, dtype):
    compare_rotate_heads(device, dtype, 6, 80, 80)
    compare_rotate_heads(device, dtype, 3, 16, 8)
