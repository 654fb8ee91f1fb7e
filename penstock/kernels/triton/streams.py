"""Ops on whole rows and on several versions of them (Gemma 3n): one program a row, or a row and block of columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.registry import KernelContext
from penstock.kernels.triton.norms import warps
from penstock.kernels.triton.numbers import narrow, wide

MAX_TERMS = 8  # of a weighted sum
_BLOCK = 1024
_POSITIONS = 128  # that a program takes


def refuse(_: KernelContext) -> str | None:
    return None


def split(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """As kernels.api.Split: views, without a kernel."""
    return torch.split(x, list(sizes), dim=-1)


@triton.jit
def _weighted_sum(
    base, a, b, c, d, e, f, g, h, weights, out, stride, size, TERMS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = place < size, row * size + place
    total = wide(tl.load(base + at, mask=inside, other=0.0))
    terms = a, b, c, d, e, f, g, h
    for index in tl.static_range(TERMS):
        weight = wide(tl.load(weights + row * stride + index))
        total += weight * wide(tl.load(terms[index] + at, mask=inside, other=0.0))
    tl.store(out + at, narrow(total, out.dtype.element_ty), mask=inside)


def weighted_sum(base: Tensor, terms: Sequence[Tensor], weights: Tensor) -> Tensor:
    """As kernels.api.WeightedSum.

    Raises:
        ValueError: there are no terms, or more than MAX_TERMS.
    """
    if not 1 <= len(terms) <= MAX_TERMS:
        raise ValueError(f"a weighted sum has {len(terms)} terms; allowed: 1 to {MAX_TERMS}.")
    rows, size = base.shape
    base, given = base.contiguous(), [term.contiguous() for term in terms]
    weights = weights if weights.stride(1) == 1 else weights.contiguous()
    out = torch.empty_like(base)
    if rows:
        given += given[:1] * (MAX_TERMS - len(given))
        grid = rows, triton.cdiv(size, _BLOCK)
        _weighted_sum[grid](base, *given, weights, out, weights.stride(0), size, len(terms), _BLOCK)
    return out


@triton.jit
def _match_rms(x, like, out, x_stride, like_stride, size, least, BLOCK: tl.constexpr):
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = place < size
    value = wide(tl.load(x + row * x_stride + place, mask=inside, other=0.0))
    other = wide(tl.load(like + row * like_stride + place, mask=inside, other=0.0))
    own, wanted = tl.sum(value * value, axis=0) / size, tl.sum(other * other, axis=0) / size
    own = tl.where(own < least, least, own)  # what is no number stays none
    factor = tl.sqrt(wanted) / tl.sqrt(own)
    tl.store(out + row * size + place, narrow(value * factor, out.dtype.element_ty), mask=inside)


def match_rms(x: Tensor, like: Tensor, least: float) -> Tensor:
    """As kernels.api.MatchRms."""
    rows, size = x.shape
    x, like = (part if part.stride(1) == 1 else part.contiguous() for part in (x, like))
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(size)
        _match_rms[(rows,)](x, like, out, x.stride(0), like.stride(0), size, least, block, num_warps=warps(block))
    return out


@triton.jit
def _statistical_topk(x, out, stride, size, deviations, BLOCK: tl.constexpr):
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = place < size
    value = wide(tl.load(x + row * stride + place, mask=inside, other=0.0))
    mean = tl.sum(value, axis=0) / size
    apart = tl.where(inside, value - mean, 0.0)
    bound = mean + deviations * tl.sqrt(tl.sum(apart * apart, axis=0) / size)
    above = value - bound
    above = tl.where(above < 0.0, 0.0, above)
    tl.store(out + row * size + place, narrow(above, out.dtype.element_ty), mask=inside)


def statistical_topk(x: Tensor, deviations: float) -> Tensor:
    """As kernels.api.StatisticalTopk."""
    rows, size = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(size)
        _statistical_topk[(rows,)](x, out, x.stride(0), size, deviations, block, num_warps=warps(block))
    return out


@triton.jit(do_not_specialize=["tokens", "offset"], do_not_specialize_on_alignment=["positions"])
def _position_scales(positions, out, tokens, length, weight, offset, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < tokens
    position = tl.load(positions + place, mask=inside, other=0) + offset
    steps = tl.floor(position.to(tl.float32) / length)
    tl.store(out + place, 1.0 + weight * tl.log(1.0 + steps), mask=inside)


def position_scales(positions: Tensor, length: float, weight: float, offset: int = 0) -> Tensor:
    """As kernels.api.PositionScales."""
    tokens = len(positions)
    out = torch.empty(tokens, 1, device=positions.device)
    if tokens:
        grid = (triton.cdiv(tokens, _POSITIONS),)
        _position_scales[grid](positions, out, tokens, length, weight, offset, _POSITIONS, num_warps=1)
    return out
