"""Norms of Triton against the reference."""

from __future__ import annotations

import torch

from tests.kernels.triton.compare import sides


def compare_rms_norm(device: str, dtype: torch.dtype, rows: int, size: int, adds: bool) -> None:
    both = sides(device, dtype, "rms_norm")
    torch.manual_seed(rows + size)
    x = (torch.randn(rows, size) * 3).to(dtype)
    residual = torch.randn(rows, size).to(dtype) if adds else None
    weight = torch.randn(size)
    added = None if residual is None else both.here(residual)
    ours, total = both.ours.rms_norm(both.here(x), both.here(weight), 1e-6, added)
    expected, expected_total = both.reference.rms_norm(x, weight, 1e-6, residual)
    both.close(ours, expected)
    assert torch.equal(total.cpu(), expected_total)


def compare_layer_norm(device: str, dtype: torch.dtype, rows: int, size: int, biased: bool) -> None:
    both = sides(device, dtype, "layer_norm")
    torch.manual_seed(rows + size)
    x = (torch.randn(rows, size) * 3 + 1).to(dtype)
    weight, bias = torch.randn(size), torch.randn(size) if biased else None
    shift = None if bias is None else both.here(bias)
    ours = both.ours.layer_norm(both.here(x), both.here(weight), shift, 1e-5)
    both.close(ours, both.reference.layer_norm(x, weight, bias, 1e-5))
