"""Kernels of Triton run on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _needs_triton() -> None:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")


@pytest.fixture(scope="session")
def device() -> str:
    """As in KernelContext."""
    return "cuda" if torch.cuda.is_available() else "interpreter"
