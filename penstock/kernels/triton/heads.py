"""One matrix a head, as products of rows grouped by head; what a head rotates follows behind."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.adapters import Adapted, rows_of
from penstock.kernels.canonical import Canonical
from penstock.kernels.registry import KernelContext
from penstock.kernels.triton import adapters as low_rank
from penstock.kernels.triton import packing
from penstock.kernels.triton.latent import rotated
from penstock.kernels.triton.numbers import narrow
from penstock.kernels.triton.packing import Packed
from penstock.kernels.triton.products import GroupedRows, multiply, row_tile


def refuse(_: KernelContext) -> str | None:
    return None


def pack_heads(parts: Sequence[Canonical | Tensor], count: int) -> Packed:
    return packing.pack(parts, count)


@triton.jit(do_not_specialize=["tokens"])
def _deal(rows, owners, tokens, HEADS: tl.constexpr, SIZE: tl.constexpr):
    """Programs (head, tile): row t · HEADS + head of token t, of each token in turn; beyond the last, no row."""
    head, tile = tl.program_id(0), tl.program_id(1)
    token = tile * SIZE + tl.arange(0, SIZE)
    number = head * tl.num_programs(1) + tile
    row = tl.where(token < tokens, token * HEADS + head, tokens * HEADS)
    tl.store(rows + number * SIZE + tl.arange(0, SIZE), row)
    tl.store(owners + number, head)


@triton.jit
def _turn(
    x, out, cos, sin, x_stride, out_stride, HEADS: tl.constexpr, SIZE: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs (token, head): the SIZE elements that begin at a row of x, rotated."""
    token = tl.program_id(0).to(tl.int64)
    row, place = token * HEADS + tl.program_id(1), tl.arange(0, BLOCK)
    inside = place < SIZE
    start = x + row * x_stride
    turned = rotated(start, place, cos + token * SIZE, sin + token * SIZE, inside, SIZE, INTERLEAVED)
    tl.store(out + row * out_stride + place, narrow(turned, out.dtype.element_ty), mask=inside)


def head_linear(
    x: Tensor,
    weight: Packed,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    adapters: Adapted | None = None,
) -> Tensor:
    heads, tokens = weight.experts, len(x)
    (part,) = weight.parts
    outputs, inputs = weight.rows, part.shape[1]
    turning = 0 if cos is None else cos.shape[2]
    rows = (x if x.stride(1) == 1 else x.contiguous()).reshape(tokens * heads, inputs + turning)
    out = torch.empty(tokens * heads, outputs + turning, dtype=x.dtype, device=x.device)
    if tokens:
        size = row_tile(tokens)
        tiles = triton.cdiv(tokens, size)
        places = torch.empty(heads * tiles * size, dtype=torch.int32, device=x.device)
        owners = torch.empty(heads * tiles, dtype=torch.int32, device=x.device)
        _deal[(heads, tiles)](places, owners, tokens, heads, size)
        grouped = GroupedRows(places, owners, size, tokens * heads, 1)
        multiply(rows[:, :inputs], part, out[:, :outputs], grouped=grouped, experts=heads)
        if adapters is not None:
            each = torch.arange(heads, device=x.device).repeat(tokens)
            has = rows_of(adapters.tokens, x).repeated(heads, each)
            low_rank.change(rows[:, :inputs], out[:, :outputs], adapters.parts, has)
        if turning:
            _turn[(tokens, heads)](
                rows[:, inputs:], out[:, outputs:], cos, sin, rows.stride(0), out.stride(0), heads, turning,
                interleaved, triton.next_power_of_2(turning), num_warps=1,
            )  # fmt: skip
    return out.view(tokens, heads * (outputs + turning))
