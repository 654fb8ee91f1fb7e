"""Launches of tiled products: which tiles, how many segments, what is quantised before."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from penstock.kernels.devices import shared_memory
from penstock.kernels.triton import tiles
from penstock.kernels.triton.activations import gate
from penstock.kernels.triton.numbers import INTERPRETED
from penstock.kernels.triton.operands import Owners, Rows, Tile, codes_of, matrix_of, offsets_of, result_of
from penstock.kernels.triton.packing import PLANES, TILE, Eights, Part, Planes, rows_of

PROGRAMS = 264  # that a launch should have at least: two a multiprocessor of a large card
_LEAST_SEGMENT = 512  # inputs, below which a segment costs more than it brings
_STEP = 256  # of which segments are multiples, as it is one of every block of inputs
_FINISH = 1024
_NEAR = 8  # tiles of rows that take turns over a weight
_MANY = 1024  # rows from which on tiles of plain weights are as large as registers allow


@dataclass(frozen=True, slots=True)
class Gating:
    """What is made of gates and ups, as in kernels.api.GatedLinear."""

    activation: str
    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """Rows sorted by expert, in tiles that each belong to one.

    Attributes:
        rows: [tiles · size] int32, which row of the result each place computes; `count` or more where none.
        experts: [tiles] int32, of each tile; -1 where none.
        size: places of a tile.
        count: rows of the result.
        share: rows of the result that share a row of x: row r reads r // share.
    """

    rows: Tensor
    experts: Tensor
    size: int
    count: int
    share: int


@dataclass(frozen=True, slots=True)
class ProductTile:
    """How a launch is cut: tiles [outputs, rows], inputs a block, warps, pipeline stages."""

    outputs: int
    rows: int
    inputs: int
    warps: int
    stages: int


def row_tile(count: int) -> int:
    """Rows of a tile where there are so many."""
    return next((size for size in (16, 32, 64) if count <= size), 128)


def _shape(part: Part, rows: int) -> ProductTile:
    """Wide tiles for many rows, many small ones for few."""
    if INTERPRETED.value:  # fewer, larger steps; sums are the same
        return ProductTile(256, rows, PLANES * part.span if isinstance(part, Planes) else TILE, 4, 1)
    warps = 8 if rows >= 64 else 4
    if isinstance(part, Planes):  # beside the sum there is one that has no scales yet
        tall = rows == 64 or (rows == 128 and _is_tall(part))
        return ProductTile(128 if tall else 64, rows, PLANES * part.span, warps, 2 if rows == 128 else 3)
    if isinstance(part, Eights):
        return ProductTile(128 if rows >= 64 and not part.tiled else 64, rows, TILE, warps, 4)
    return ProductTile(128 if rows >= 64 else 64, rows, 64, warps, 3 if rows == 256 else 4)


def _is_tall(part: Planes) -> bool:
    """Whether tiles of 128 rows hold 128 outputs too: with 64 these codes would go through shared memory, with 128 they

    leave registers enough; others do not.
    """
    if part.kind != "affine" or offsets_of(part) == "minimums":
        return False
    return part.widths == (4, 4) or (part.widths == (4, 0) and part.group >= 128)


def _tiles_of(part: Part, count: int, grouped: GroupedRows | None, segments: int, size: int) -> ProductTile:
    """For `count` rows of elements of `size` bytes; where segments are added there is no room for a second sum of the

    largest tiles.
    """
    if grouped is not None:
        return _fitting(_shape(part, grouped.size), part, size)
    large = count >= _MANY and segments == 1 and isinstance(part, Tensor) and part.itemsize == 2
    return _fitting(_shape(part, 256 if large else row_tile(count)), part, size)


def _fitting(shape: ProductTile, part: Part, size: int) -> ProductTile:
    """With no more stages than the GPU's shared memory holds; how many there are changes no sum."""
    wide = part.itemsize if isinstance(part, Tensor) else 1
    stage = shape.inputs * (shape.rows * size + shape.outputs * wide)
    limit = shared_memory("cuda") or shape.stages * stage
    return shape if shape.stages * stage <= limit else replace(shape, stages=max(1, limit // stage))


def _segments(outputs: int, inputs: int) -> tuple[int, int]:
    """Inputs of a segment, and how many segments: by the weight alone."""
    steps = triton.cdiv(inputs, _STEP)
    wanted = min(triton.cdiv(PROGRAMS, triton.cdiv(outputs, 64)), max(1, inputs // _LEAST_SEGMENT), 16)
    size = triton.cdiv(steps, wanted)
    return size * _STEP, triton.cdiv(steps, size)


def quantized(x: Tensor, part: Eights) -> tuple[Tensor, Tensor]:
    """x [T, K] in the type of a part's values, and its scales [T, ⌈K / TILE⌉] or [T, 1]."""
    rows, inputs = x.shape
    group = TILE if part.tiled else inputs
    groups = triton.cdiv(inputs, group)
    values = torch.empty(rows, inputs, dtype=part.values.dtype, device=x.device)
    scales = torch.empty(rows, groups, device=x.device)
    largest = 127 if values.dtype == torch.int8 else 448
    block = triton.next_power_of_2(group)
    tiles._quantize[(rows, groups)](
        x, values, scales, inputs, x.stride(0), groups, largest, group, block, num_warps=min(16, max(1, block // 512))
    )
    return values, scales


def multiply(
    x: Tensor,
    part: Part,
    out: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    grouped: GroupedRows | None = None,
    experts: int = 1,
    split: bool = False,
    gating: Gating | None = None,
) -> None:
    """out = x · wᵀ + bias + residual.

    Args:
        x: [T, K], rows contiguous.
        part: w [N, K], or [experts · N, K].
        out: [T, N], or [grouped.count, N]; may be columns of a wider one.
        bias: [N], or [experts, N].
        residual: as out.
        grouped: which rows go to which expert; None for one matrix.
        experts: matrices in the part.
        split: segments may have programs though rows are grouped: no bias, no residual, rows of no tile written too.
        gating: brings the result [T, N] to the [T, N / 2] of out; there is no residual then.
    """
    outputs, inputs = rows_of(part) // experts, x.shape[1]
    if isinstance(part, Planes) and part.order is not None:
        x = x.index_select(1, part.order)
    segment, segments = _segments(outputs, inputs)
    count = len(x) if grouped is None else grouped.count
    rows = _rows(x, part)
    shape = _tiles_of(part, count, grouped, segments, rows.elements.element_size())
    programs = triton.cdiv(count, shape.rows) if grouped is None else len(grouped.experts)
    programs *= triton.cdiv(outputs, shape.outputs)
    if not programs:
        return
    splits = segments > 1 and programs < PROGRAMS and (split or grouped is None)
    partial, halved = torch.empty(segments, count, outputs, device=x.device) if splits else None, out
    out = out if gating is None or splits else torch.empty(count, outputs, dtype=out.dtype, device=out.device)
    result = result_of(out, bias, residual)
    tile = Tile(
        outputs=shape.outputs, rows=shape.rows, inputs=shape.inputs, even=inputs % shape.inputs == 0, near=_NEAR,
        alone=splits or segments == 1, share=1 if grouped is None else grouped.share,
    )  # fmt: skip
    tiles._multiply[programs, segments if splits else 1](
        rows, matrix_of(part), None if grouped is None else Owners(grouped.rows, grouped.experts), result, partial,
        outputs, inputs, count, segment // shape.inputs, segments, codes_of(part), tile,
        num_warps=shape.warps, num_stages=shape.stages,
        enable_fp_fusion=not isinstance(part, Eights),  # a scaled segment is rounded before it is added, split or not
    )  # fmt: skip
    if partial is not None:
        how = gating or Gating("none", 0.0, 0.0)
        tiles._finish[count, triton.cdiv(halved.shape[1], _FINISH)](
            partial, result, count, outputs, how.alpha, how.limit, segments, how.activation, _FINISH
        )
    elif gating is not None:
        gate(out, gating.activation, gating.alpha, gating.limit, out=halved)


def _rows(x: Tensor, part: Part) -> Rows:
    """x as a part multiplies it."""
    if not isinstance(part, Eights):
        return Rows(x, x.stride(0))
    values, scales = quantized(x, part)
    return Rows(values, values.stride(0), scales, scales.shape[1])
