"""Checks on a real GPU, in real sizes; the same comparisons as of tests/kernels/triton, which serve a GPU too."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
