"""Small ops on rows, element by element: one kernel, programs (row, block of columns)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.registry import KernelContext
from penstock.kernels.triton.numbers import narrow, wide

BLOCK = 1024


def refuse(_: KernelContext) -> str | None:
    return None


@triton.jit
def _pointwise(a, b, out, a_stride, b_stride, size, number, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    if KIND == "take_rows":
        taken = tl.load(a + tl.load(b + row) * a_stride + place, mask=inside, other=0.0)
        tl.store(out + row * size + place, taken, mask=inside)
    else:
        value = wide(tl.load(a + row * a_stride + place, mask=inside, other=0.0))
        if KIND == "soft_cap":  # number · tanh(value / number)
            value = number - 2.0 * number / (1.0 + tl.exp(value * (2.0 / number)))
        elif KIND == "scale_rows":
            value *= tl.load(b + row)
        else:
            other = wide(tl.load(b + row * b_stride + place, mask=inside, other=0.0))
            if KIND == "add":
                value += other
            if KIND == "multiply":
                value *= other
            if KIND == "sigmoid_gate":
                value /= 1.0 + tl.exp(-other)
        tl.store(out + row * size + place, narrow(value, out.dtype.element_ty), mask=inside)


def _run(kind: str, a: Tensor, b: Tensor, rows: int, number: float = 0.0) -> Tensor:
    size = a.shape[1]
    a = a if a.stride(1) == 1 else a.contiguous()
    b = b if b.stride(-1) == 1 else b.contiguous()
    out = torch.empty(rows, size, dtype=a.dtype, device=a.device)
    if rows:
        stride = b.stride(0) if b.dim() > 1 else 0
        _pointwise[(rows, triton.cdiv(size, BLOCK))](a, b, out, a.stride(0), stride, size, number, kind, BLOCK)
    return out


@triton.jit
def _inject(x, rows, values, x_stride, size, ADDED: tl.constexpr, BLOCK: tl.constexpr):
    one, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    target = x + tl.load(rows + one) * x_stride + place
    given = wide(tl.load(values + one * size + place, mask=inside, other=0.0))
    if ADDED:
        given += wide(tl.load(target, mask=inside, other=0.0))
    tl.store(target, narrow(given, x.dtype.element_ty), mask=inside)


def inject(x: Tensor, rows: Tensor, values: Tensor, level: int) -> Tensor:
    given = values[level].to(x.dtype).contiguous()
    if len(rows):
        grid = (len(rows), triton.cdiv(x.shape[1], BLOCK))
        _inject[grid](x, rows, given, x.stride(0), x.shape[1], level > 0, BLOCK)
    return x


def add(a: Tensor, b: Tensor) -> Tensor:
    return _run("add", a, b, len(a))


def multiply(x: Tensor, factors: Tensor) -> Tensor:
    return _run("multiply", x, factors, len(x))


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    return _run("sigmoid_gate", x, gate, len(x))


def soft_cap(x: Tensor, cap: float) -> Tensor:
    return _run("soft_cap", x, x, len(x), cap)


def scale_rows(x: Tensor, factors: Tensor) -> Tensor:
    return _run("scale_rows", x.flatten(1), factors, len(x)).view(x.shape)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    return _run("take_rows", x, rows, len(rows))
