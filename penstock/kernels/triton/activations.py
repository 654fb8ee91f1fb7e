"""Activations, alone and between the halves of a merged projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.registry import KernelContext
from penstock.kernels.triton.numbers import narrow, wide

KINDS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "clip", "swigluoai")
_BLOCK = 1024


def refuse(_: KernelContext) -> str | None:
    return None


@triton.jit
def activated(x, limit, KIND: tl.constexpr):
    """An activation of float32 values."""
    if KIND == "silu":
        return x / (1.0 + tl.exp(-x))
    if KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if KIND == "gelu_tanh":
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # twice the argument of tanh
        return x / (1.0 + tl.exp(-inner))
    if KIND == "relu":
        return tl.maximum(x, 0.0)
    if KIND == "relu2":
        return tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    return tl.minimum(tl.maximum(x, -limit), limit)


@triton.jit
def gated(gate, up, alpha, limit, KIND: tl.constexpr):
    """activation(gate) · up of float32 values; "swigluoai" as in `kernels.api.GatedLinear`."""
    if KIND == "swigluoai":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    return activated(gate, limit, KIND) * up


@triton.jit
def _activate(x, out, size, stride, alpha, limit, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    value = wide(tl.load(x + row * stride + place, mask=inside, other=0.0))
    if GATED:
        value = gated(value, wide(tl.load(x + row * stride + size + place, mask=inside, other=0.0)), alpha, limit, KIND)
    else:
        value = activated(value, limit, KIND)
    tl.store(out + row * size + place, narrow(value, out.dtype.element_ty), mask=inside)


def check(activation: str, is_gated: bool = True) -> None:
    """Raises ValueError where there is no such activation."""
    kinds = KINDS if is_gated else KINDS[:-1]
    if activation not in kinds:
        raise ValueError(f"activation is {activation!r}; allowed: {', '.join(kinds)}")


def _run(
    x: Tensor, size: int, activation: str, is_gated: bool, alpha: float, limit: float, out: Tensor | None = None
) -> Tensor:
    check(activation, is_gated)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(len(x), size, dtype=x.dtype, device=x.device) if out is None else out
    if len(x):
        grid = len(x), triton.cdiv(size, _BLOCK)
        _activate[grid](x, out, size, x.stride(0), alpha, limit, activation, is_gated, _BLOCK)
    return out


def activate(x: Tensor, activation: str, limit: float = 0.0) -> Tensor:
    """As kernels.api.Activate."""
    return _run(x, x.shape[1], activation, False, 0.0, limit)


def gate(x: Tensor, activation: str, alpha: float = 1.702, limit: float = 7.0, out: Tensor | None = None) -> Tensor:
    """x [T, 2 · N], gates first → activation(gate) · up, [T, N], in `out` if given, whose rows lie side by side."""
    return _run(x, x.shape[1] // 2, activation, True, alpha, limit, out)
