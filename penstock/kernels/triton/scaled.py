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
    """What becomes of a small product whose result is known: None if it is right."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    one = torch.ones(32, 32, device="cuda")
    try:
        product = multiply(one.to(torch.bfloat16), Eights(32, 32, one.to(torch.float8_e4m3fn), one[:1] * 2.0))
        right = bool((product == 64.0).all())
    except (RuntimeError, ValueError) as error:  # what is not implemented is a RuntimeError too
        return f"torch cannot multiply FP8 here ({str(error).splitlines()[0]})"
    return None if right else "torch's product of FP8 is wrong here"


def serves(x: Tensor, part: Part) -> bool:
    """Whether torch multiplies x by the part."""
    if not isinstance(part, Eights) or part.tiled or part.values.dtype != torch.float8_e4m3fn:
        return False
    return len(x) >= MANY and part.inputs % _MULTIPLE == part.rows % _MULTIPLE == 0


def multiply(x: Tensor, part: Eights) -> Tensor:
    """x [T, K] bfloat16, quantised a row at a time, times the part [N, K] transposed: [T, N] bfloat16."""
    values, scales = quantized(x if x.stride(1) == 1 else x.contiguous(), part)
    weight = part.values.t()
    return torch._scaled_mm(
        values, weight, scale_a=scales, scale_b=part.scales, out_dtype=torch.bfloat16, use_fast_accum=True
    )
