"""Rows of tables that may be coded: one program a row, or a few, and block of inputs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.numbers import narrow, wide
from penstock.kernels.triton.operands import codes_of, matrix_of
from penstock.kernels.triton.packing import PLANES, TILE, Packed, Planes
from penstock.kernels.triton.tiles import coded

_MANY = 1024  # rows from which on a program takes several


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["numbers"])
def _look_up(numbers, weight, out, factor, count, inputs, CODES: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr):
    SPAN: tl.constexpr = CODES.span
    GROUP: tl.constexpr = CODES.group
    token, block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    row = tl.load(numbers + token, mask=token < count, other=0)
    column = tl.arange(0, SPAN)
    place = row[:, None] * weight.words + block * SPAN + column[None, :]
    lower = tl.load(weight.low + place)
    upper = lower
    if weight.high is not None:
        upper = tl.load(weight.high + place)
    for plane in tl.static_range(COUNT):
        first = (block * COUNT + plane) * SPAN
        group = tl.minimum(first // GROUP, inputs // GROUP - 1).to(tl.int64)
        value = coded(lower, upper, weight, group * weight.rows + row, plane, CODES)
        value = narrow(wide(narrow(value, out.dtype.element_ty)) * factor, out.dtype.element_ty)
        k = first + column
        tl.store(
            out + token[:, None] * inputs + k[None, :], value, mask=(token < count)[:, None] & (k < inputs)[None, :]
        )


def embedding(numbers: Tensor, table: Packed, scale: float = 1.0, *, dtype: torch.dtype) -> Tensor:
    """As kernels.api.EmbeddingOp; rows of coded tables are of type `dtype`."""
    (part,) = table.parts
    factor = float(torch.tensor(scale, dtype=dtype))  # stays on the host
    if isinstance(part, Tensor):
        rows = part.index_select(0, numbers)
    elif isinstance(part, Planes) and part.order is None:
        return _coded_rows(numbers, part, factor, dtype)
    elif isinstance(part, Planes):
        raise ValueError(
            "a table whose inputs are sorted by importance cannot be looked up; use one in another format."
        )
    else:
        scales = part.scales[:, numbers].t().repeat_interleave(TILE if part.tiled else part.inputs, dim=1)
        rows = (part.values[numbers].float() * scales[:, : part.inputs]).to(dtype)
    return rows if scale == 1.0 else rows * factor


def unpacked(part: Planes, dtype: torch.dtype) -> Tensor:
    """All rows [N, K], in the order in which inputs are packed."""
    return _coded_rows(torch.arange(part.rows, device=part.low.device), part, 1.0, dtype)


def _coded_rows(numbers: Tensor, part: Planes, factor: float, dtype: torch.dtype) -> Tensor:
    out = torch.empty(len(numbers), part.inputs, dtype=dtype, device=numbers.device)
    if len(numbers):
        rows = 8 if len(numbers) >= _MANY else 1
        grid = triton.cdiv(len(numbers), rows), triton.cdiv(part.inputs, PLANES * part.span)
        _look_up[grid](
            numbers, matrix_of(part), out, factor, len(numbers), part.inputs, codes_of(part), PLANES, rows, num_warps=1
        )
    return out
