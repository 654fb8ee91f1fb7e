"""Canonical matrices → the native library's packed ones, lossless: a kernel's matrix equals the reference decode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from penstock.kernels.canonical import Affine, Blocks, Canonical, Codebook
from penstock.kernels.cpu import native
from penstock.kernels.plain import plain_matrix
from penstock.kernels.segments import segment_ends

SMALLEST_GROUP = 16


def packable(matrix: Canonical) -> str | None:
    """Why the library has no packing for a matrix, or None if it has."""
    if isinstance(matrix, (Affine, Codebook)) and matrix.group % SMALLEST_GROUP:
        return f"groups of {matrix.group} inputs are no multiple of {SMALLEST_GROUP}"
    return None


def pack(matrix: Canonical | Tensor, experts: int = 1, segment: int = 0, ends: Sequence[int] = ()) -> Any:
    """A `PackedMatrix` of the native library; `experts` matrices lie one below the other.

    If `segment` is not 0, inputs are summed in segments of multiples of it, where the format can be cut; with `ends`,
    in those.

    Raises:
        ValueError: there is no packing for it; the message names the value and what is allowed.
    """
    packed = _packed(matrix, experts)
    if segment and packed.segment_unit:
        ends = segment_ends(packed.cols, math.lcm(segment, packed.segment_unit))
    if len(ends) > 1:
        packed.cut(list(ends))
    return packed


def segment_unit(matrix: Canonical | Tensor) -> int:
    """Segments of its inputs, packed, are multiples of it; 0 if it cannot be cut. A few of its rows are enough."""
    return int(_packed(matrix, 1).segment_unit)


def _packed(matrix: Canonical | Tensor, experts: int) -> Any:
    make = native.library().PackedMatrix
    if isinstance(matrix, Blocks):
        return make.pack_blocks(matrix.format, *matrix.shape, matrix.data, experts)
    if isinstance(matrix, Affine):
        zeros = "fractions" if matrix.zeros is not None and matrix.zeros.dtype == np.float32 else "zeros"
        extra = {"zero": matrix.zero, zeros: matrix.zeros, "minimums": matrix.minimums, "order": matrix.order}
        return make.pack_affine(matrix.codes, matrix.bits, matrix.group, matrix.scales, **extra, experts=experts)
    if isinstance(matrix, Codebook):
        return make.pack_codebook(matrix.codes, matrix.table, matrix.group, matrix.scales, experts)
    plain = plain_matrix(matrix) if isinstance(matrix, Tensor) else matrix
    return make.pack_plain(plain.format, *plain.shape, plain.data, plain.scales, *plain.tile, experts)
