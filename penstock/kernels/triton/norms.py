"""Norms of rows: one program a row, the whole row in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.registry import KernelContext
from penstock.kernels.triton.numbers import narrow, wide

MAX_SIZE = 65536  # elements of a row


def refuse(_: KernelContext) -> str | None:
    return None


def warps(block: int) -> int:
    """Warps for a row of a power of two elements: 16 elements a thread, within 1 to 16."""
    return min(16, max(1, block // 512))


@triton.jit
def _rms_norm(x, residual, weight, out, total, stride, size, eps, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < size
    value = wide(tl.load(x + row * stride + place, mask=inside, other=0.0))
    if ADDS:
        value += wide(tl.load(residual + row * size + place, mask=inside, other=0.0))
        kept = narrow(value, total.dtype.element_ty)
        tl.store(total + row * size + place, kept, mask=inside)
        value = wide(kept)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / size + eps)
    value = value * scale * tl.load(weight + place, mask=inside, other=0.0)
    tl.store(out + row * size + place, narrow(value, out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    rows, size = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    if rows:
        block = triton.next_power_of_2(size)
        added = x if residual is None else residual.contiguous()
        _rms_norm[(rows,)](
            x, added, weight, out, total, x.stride(0), size, eps, residual is not None, block, num_warps=warps(block)
        )
    return out, total


@triton.jit
def _layer_norm(x, weight, bias, out, stride, size, eps, SHIFTS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < size
    value = wide(tl.load(x + row * stride + place, mask=inside, other=0.0))
    value = tl.where(inside, value - tl.sum(value, axis=0) / size, 0.0)
    value = value * tl.rsqrt(tl.sum(value * value, axis=0) / size + eps)
    value = value * tl.load(weight + place, mask=inside, other=0.0)
    if SHIFTS:
        value += tl.load(bias + place, mask=inside, other=0.0)
    tl.store(out + row * size + place, narrow(value, out.dtype.element_ty), mask=inside)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    rows, size = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(size)
        shift = weight if bias is None else bias
        _layer_norm[(rows,)](
            x, weight, shift, out, x.stride(0), size, eps, bias is not None, block, num_warps=warps(block)
        )
    return out


@triton.jit
def _gated_rms_norm(
    x, gate, weight, out, x_stride, gate_stride, size, eps, GROUP: tl.constexpr, GATED: tl.constexpr,
    FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs (row, group)."""
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = place < GROUP
    column = tl.program_id(1) * GROUP + place
    value = wide(tl.load(x + row * x_stride + column, mask=inside, other=0.0))
    if GATED:
        weighing = wide(tl.load(gate + row * gate_stride + column, mask=inside, other=0.0))
        weighing = weighing / (1.0 + tl.exp(-weighing))
        if FIRST:
            value *= weighing
    value = value * tl.rsqrt(tl.sum(value * value, axis=0) / GROUP + eps)
    value *= tl.load(weight + column, mask=inside, other=0.0)
    if GATED and not FIRST:
        value *= weighing
    tl.store(out + row * size + column, narrow(value, out.dtype.element_ty), mask=inside)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    eps: float,
    group_size: int | None = None,
    gate_first: bool = False,
    segment: int = 0,
) -> Tensor:
    """As kernels.api.GatedRmsNorm; sums have one order of their own."""
    rows, size = x.shape
    group = group_size or size
    x = x if x.stride(1) == 1 else x.contiguous()
    given = x if gate is None else gate if gate.stride(1) == 1 else gate.contiguous()
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(group)
        _gated_rms_norm[(rows, size // group)](
            x, given, weight, out, x.stride(0), given.stride(0), size, eps, group, gate is not None, gate_first, block,
            num_warps=warps(block),
        )  # fmt: skip
    return out
