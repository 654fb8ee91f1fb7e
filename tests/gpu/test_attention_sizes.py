"""Attention, rotation and norms of Triton in the sizes of published models."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_paged_attention import Case
from tests.kernels.triton.compare_attention import compare_attention, compare_chunks, compare_company
from tests.kernels.triton.compare_latent import compare_head_linear, compare_latent
from tests.kernels.triton.compare_norms import compare_rms_norm
from tests.kernels.triton.compare_rope import compare_rope

ROWS = ((1, 5000), (1, 300), (4, 2100), (100, 1500), (130, 130))
BRAIN = torch.bfloat16


@pytest.mark.parametrize("kv_type", ["bfloat16", "fp8"])
@pytest.mark.parametrize("block_size", [16, 64])
def test_llama_8b(kv_type: str, block_size: int) -> None:
    compare_attention("cuda", Case(ROWS, 32, 8, 128, 128, block_size, dtype=BRAIN), kv_type)


def test_windows_caps_and_sinks() -> None:
    compare_attention("cuda", Case(ROWS, 16, 8, 256, 256, 16, 1024, soft_cap=50.0, dtype=BRAIN), "bfloat16")
    compare_attention("cuda", Case(ROWS, 64, 8, 64, 64, 16, 128, True, dtype=BRAIN), "bfloat16")


def test_company_and_chunks_change_no_bit() -> None:
    compare_company("cuda", Case(ROWS, 32, 8, 128, 128, 16, dtype=BRAIN), "bfloat16")
    compare_chunks("cuda", Case(((300, 900),), 32, 8, 128, 128, 16, dtype=BRAIN), (9, 50, 61, 200))


def test_deepseek_v2_lite() -> None:
    compare_latent("cuda", BRAIN, 512, 64, 16, True, "bfloat16")
    compare_head_linear("cuda", BRAIN, 300, (16, 128, 512, 64), True)


def test_rows_and_heads() -> None:
    compare_rms_norm("cuda", BRAIN, 500, 4096, True)
    compare_rope("cuda", BRAIN, (32, 4), (128, 128), 128, "each", "bfloat16", tokens=90, block_size=16)
