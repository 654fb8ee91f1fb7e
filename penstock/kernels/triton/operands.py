"""What kernels of products are launched with, grouped by what it means.

Triton's kernels take no other records than tuples with names, of values or of constants; none may be called `values` or
`type`, which its own tuples have. What may be absent is None, for which a kernel is compiled that never asks. Numbers
that change from step to step stay outside: what lies in a tuple makes another kernel where it is 1 or a multiple of 16.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.triton.packing import PLANES, Eights, Part, Planes, rows_of


class Rows(NamedTuple):
    """What is multiplied.

    Attributes:
        elements: [T, K].
        stride: between rows.
        scales: [T, groups] of eight-bit values, or None.
        groups: scales a row.
    """

    elements: Tensor
    stride: int
    scales: Tensor | None = None
    groups: int = 0


class Matrix(NamedTuple):
    """The memory of a part, as `packing` lays it.

    Attributes:
        low: words of the codes' lower bits; where nothing is coded, values [N, K].
        high, scales, offsets, table: as in Planes and Eights, or None.
        words: of `low` a row.
        rows: N, of all experts.
    """

    low: Tensor
    high: Tensor | None
    scales: Tensor | None
    offsets: Tensor | None
    table: Tensor | None
    words: int
    rows: int


class Codes(NamedTuple):
    """Constants: what the numbers of a matrix stand for.

    Attributes:
        kind: as in Planes; "fp8", "int8" or "plain" where values are multiplied as they lie.
        offsets: what a group's second number is: "none", "zeros" or "minimums".
        low, high: bits of a code in words of both kinds; 0 where there are none.
        zero: zero point of all codes.
        span, group: as in Planes.
        run: planes that share their scales.
        tiled: whether a scale belongs to a tile of eight-bit values, not to a row.
    """

    kind: str
    offsets: str = "none"
    low: int = 0
    high: int = 0
    zero: int = 0
    span: int = 0
    group: int = 1
    run: int = 1
    tiled: bool = False


class Owners(NamedTuple):
    """Which expert computes what, as in products.GroupedRows."""

    rows: Tensor
    experts: Tensor


class Result(NamedTuple):
    """Where products go, and what is added to them.

    Attributes:
        elements: [T, N].
        stride: between rows.
        bias: [N], [experts, N] or None.
        residual: [T, N] or None.
        residual_stride: between its rows.
    """

    elements: Tensor
    stride: int
    bias: Tensor | None
    residual: Tensor | None
    residual_stride: int


class Tile(NamedTuple):
    """Constants: how a launch is cut.

    Attributes:
        outputs, rows: of a tile.
        inputs: of a block.
        even: whether blocks divide the inputs.
        near: tiles of rows that take turns over a weight.
        alone: whether a program has one segment, not all.
        share: rows of the result that share a row of x.
    """

    outputs: int
    rows: int
    inputs: int
    even: bool
    near: int
    alone: bool
    share: int


def matrix_of(part: Part) -> Matrix:
    match part:
        case Planes():
            words = part.low.shape[1]
            return Matrix(part.low, part.high, part.scales, part.offsets, part.table, words, part.rows)
        case Eights():
            return Matrix(part.values, None, part.scales, None, None, part.inputs, part.rows)
    return Matrix(part, None, None, None, None, part.shape[1], rows_of(part))


def codes_of(part: Part) -> Codes:
    match part:
        case Planes():
            low, high = part.widths
            run = math.gcd(part.group // part.span, PLANES)
            return Codes(part.kind, offsets_of(part), low, high, part.zero, part.span, part.group, run)
        case Eights():
            return Codes("int8" if part.values.dtype == torch.int8 else "fp8", tiled=part.tiled)
    return Codes("plain")


def offsets_of(planes: Planes) -> str:
    """As in Codes."""
    if planes.offsets is None:
        return "none"
    return "minimums" if planes.offsets.is_floating_point() else "zeros"


def result_of(out: Tensor, bias: Tensor | None, residual: Tensor | None) -> Result:
    return Result(out, out.stride(0), bias, residual, 0 if residual is None else residual.stride(0))
