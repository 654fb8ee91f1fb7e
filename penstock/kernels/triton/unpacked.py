"""Coded weights in products of many rows: unpacked once, then multiplied by torch.

Unpacking reads and writes a weight once, whatever the rows; a tile of the product would unpack it again for every 128
of them. The weight is rounded to the type of the activations, as in every engine that does so.
"""

from __future__ import annotations

from torch import Tensor

from penstock.kernels.triton import plain
from penstock.kernels.triton.operands import offsets_of
from penstock.kernels.triton.packing import Part, Planes
from penstock.kernels.triton.tables import unpacked

MANY = 768  # rows from which on that is faster, measured on an H200
MANY_COSTLY = 256  # the same where codes are not numbers of four bits with a scale


def serves(x: Tensor, part: Part) -> bool:
    """Whether x is multiplied so."""
    if not isinstance(part, Planes):
        return False
    cheap = part.kind == "affine" and part.widths == (4, 0) and offsets_of(part) == "none"
    return len(x) >= (MANY if cheap else MANY_COSTLY)


def multiply(x: Tensor, part: Planes, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """x [T, K] · wᵀ + bias + residual: [T, N]."""
    if part.order is not None:
        x = x.index_select(1, part.order)
    return plain.multiply(x, unpacked(part, x.dtype), bias, residual)
