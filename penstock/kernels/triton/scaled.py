"""Products of FP8 by torch where there are many rows: its library multiplies those faster, in an order of its own."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from penstock.kernels import devices
from penstock.kernels.registry import KernelContext
from penstock.kernels.triton.packing import Eights, Part
from penstock.kernels.triton.products import quantized

MANY = 256  # rows from which on torch multiplies
_MULTIPLE = 16  # of which its library wants inputs and outputs
_TRIAL = 4096  # inputs of the product that is tried


def refuse(context: KernelContext) -> str | None:
    """Why torch does not multiply eight bits with a scale a row for a context."""
    if context.device != "cuda":
        return f"torch's scaled products are for cuda, not {context.device}"
    if context.batch_invariant:
        return "results must not depend on the number of rows"
    if context.dtype != "bfloat16":
        return f"torch's scaled products give bfloat16, not {context.dtype}"
    return devices.lacks_fp8(context.device) or _failure()


@functools.cache
def _failure() -> str | None:
    """What becomes of a product whose result is known: None if it is right."""
    return trial("cuda") if torch.cuda.is_available() else "torch sees no GPU"


def trial(device: str) -> str | None:
    """Why torch does not multiply FP8 right on a device, or None.

    Sums of many numbers above zero: in the few bits that matrix units keep of them these would fall behind.
    """
    dice = torch.Generator().manual_seed(1)
    x, w = (torch.rand(rows, _TRIAL, generator=dice).to(torch.float8_e4m3fn).to(device) for rows in (MANY, 32))
    part = Eights(32, _TRIAL, w, torch.full((1, 32), 2.0, device=device))
    values, scales = quantized(x.to(torch.bfloat16), part)
    try:
        product = _product(values, scales, part)
    except (RuntimeError, ValueError) as error:  # what is not implemented is a RuntimeError too
        return f"torch cannot multiply FP8 here ({str(error).splitlines()[0]})"
    off = product.double() / (values.double() @ w.double().t() * scales * 2.0) - 1.0
    right = off.abs().max() < 2**-8 and off.mean().abs() < 2**-11  # it is rounded to bfloat16, which evens out
    return None if right else f"torch's product of FP8 is off by {float(off.abs().max()):.2%} here"


def serves(x: Tensor, part: Part) -> bool:
    """Whether torch multiplies x by the part."""
    if not isinstance(part, Eights) or part.tiled or part.values.dtype != torch.float8_e4m3fn:
        return False
    return len(x) >= MANY and part.inputs % _MULTIPLE == part.rows % _MULTIPLE == 0


def multiply(x: Tensor, part: Eights) -> Tensor:
    """x [T, K] bfloat16, quantised a row at a time, times the part [N, K] transposed: [T, N] bfloat16."""
    values, scales = quantized(x if x.stride(1) == 1 else x.contiguous(), part)
    return _product(values, scales, part)


def _product(values: Tensor, scales: Tensor, part: Eights) -> Tensor:
    return torch._scaled_mm(  # fast accumulation would leave sums in the 14 bits that Hopper's matrix units keep
        values, part.values.t(), scale_a=scales, scale_b=part.scales, out_dtype=torch.bfloat16, use_fast_accum=False
    )
