"""Attention, rotation and norms of Triton in the sizes of published models."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.sizes import Sizes
from tests.kernels.test_paged_attention import Case
from tests.kernels.triton.compare_attention import compare_attention, compare_chunks, compare_company
from tests.kernels.triton.compare_latent import compare_head_linear, compare_latent
from tests.kernels.triton.compare_norms import compare_layer_norm, compare_rms_norm
from tests.kernels.triton.compare_rope import compare_rope


def name_of(sizes: Sizes) -> str:
    return str(sizes.dtype).removeprefix("torch.")


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("block_size", [16, 64])
def test_heads_of_128(device: str, sizes: Sizes, scaled: bool, block_size: int) -> None:
    heads, kv_heads, dim = sizes.heads
    case = Case(sizes.attention, heads, kv_heads, dim, dim, block_size, dtype=sizes.dtype)
    compare_attention(device, case, "fp8" if scaled else name_of(sizes))


@pytest.mark.parametrize(("dim", "group"), [(64, 1), (80, 16), (96, 4), (192, 2), (256, 8)])
def test_other_heads(device: str, sizes: Sizes, dim: int, group: int) -> None:
    kv_heads, rows = (2, sizes.attention) if device == "cuda" else (1, ((1, 20), (9, 20)))
    compare_attention(
        device, Case(rows, group * kv_heads, kv_heads, dim, dim, 16, dtype=sizes.dtype), name_of(sizes)
    )  # fmt: skip


def test_windows_caps_and_sinks(device: str, sizes: Sizes) -> None:
    heads, kv_heads, dim = sizes.heads
    wide = Case(sizes.attention, heads // 2, kv_heads, 2 * dim, 2 * dim, 16, 1024, soft_cap=50.0, dtype=sizes.dtype)
    compare_attention(device, wide, name_of(sizes))
    narrow = Case(sizes.attention, heads * 2, kv_heads, dim // 2, dim // 2, 16, 128, True, dtype=sizes.dtype)
    compare_attention(device, narrow, name_of(sizes))


def test_company_and_chunks_change_no_bit(device: str, sizes: Sizes) -> None:
    heads = sizes.heads[0], sizes.heads[1], sizes.heads[2], sizes.heads[2], 16
    compare_company(device, Case(sizes.attention, *heads, dtype=sizes.dtype), name_of(sizes))
    whole, cuts = (((300, 900),), (9, 50, 61, 200)) if device == "cuda" else (((30, 40),), (9, 20))
    compare_chunks(device, Case(whole, *heads, dtype=sizes.dtype), cuts)


@pytest.mark.parametrize("scaled", [False, True])
def test_latents(device: str, sizes: Sizes, scaled: bool) -> None:
    latent, rotated, heads = (512, 64, 16) if device == "cuda" else (32, 16, 2)
    compare_latent(device, sizes.dtype, latent, rotated, heads, True, "fp8" if scaled else name_of(sizes))
    tokens, shape = (300, (16, 128, 512, 64)) if device == "cuda" else (3, (2, 16, 32, 16))
    compare_head_linear(device, sizes.dtype, tokens, shape, True)


def test_rows_and_heads(device: str, sizes: Sizes) -> None:
    rows, width = (500, 4096) if device == "cuda" else (3, 100)
    compare_rms_norm(device, sizes.dtype, rows, width, True)
    compare_layer_norm(device, sizes.dtype, rows, width, True)
    heads, kv_heads, dim = sizes.heads
    compare_rope(
        device, sizes.dtype, (heads, kv_heads), (dim, dim), dim, "each", name_of(sizes), tokens=90 if rows > 3 else 5,
        block_size=16,
    )  # fmt: skip


def test_prompts_in_float16(device: str, sizes: Sizes) -> None:
    heads, kv_heads, dim = sizes.heads
    compare_attention(device, Case(sizes.attention, heads, kv_heads, dim, dim, 16, dtype=torch.float16), "float16")
