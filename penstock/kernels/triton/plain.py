"""Products of plain weights, by torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """x [T, K] · wᵀ + bias + residual: [T, N]."""
    if residual is None:
        return functional.linear(x, weight, bias)
    if bias is None:
        return torch.addmm(residual, x, weight.t())
    return functional.linear(x, weight, bias).add_(residual)
