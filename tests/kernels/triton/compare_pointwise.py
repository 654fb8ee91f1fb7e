"""Ops of Triton on single elements against the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.kernels.triton.compare import sides


def compare_pointwise(device: str, op: str, dtype: torch.dtype, rows: int, size: int) -> None:
    """With a second operand that is part of a wider one, where the op takes such."""
    both = sides(device, dtype, op)
    torch.manual_seed(rows + size)
    x = (torch.randn(rows, size) * 3).to(dtype)
    part = torch.randn(rows, size + 9).to(dtype)[:, 3 : 3 + size]
    cases: dict[str, list[tuple[Tensor | float, ...]]] = {
        "add": [(x, part)],
        "multiply": [(x, part), (x, torch.randn(size))],
        "sigmoid_gate": [(x, part)],
        "soft_cap": [(x, 2.5)],
        "scale_rows": [(x, torch.randn(rows, 1)), (x.view(rows, 2, -1), torch.randn(rows, 1))],
        "take_rows": [(part, torch.randint(0, rows, (5,)))],
    }
    for arguments in cases[op]:
        here = [both.here(a) if isinstance(a, Tensor) else a for a in arguments]
        if op == "add":
            here[1] = both.here(torch.nn.functional.pad(part, (2, 1)))[:, 2:-1]
        expected = getattr(both.reference, op)(*(a.clone() if isinstance(a, Tensor) else a for a in arguments))
        both.close(getattr(both.ours, op)(*here), expected)
