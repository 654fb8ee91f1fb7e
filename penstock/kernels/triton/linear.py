"""Linear layers over packed weights. Plain weights are multiplied by torch, unless results must not depend on rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.adapters import Adapted
from penstock.kernels.canonical import Canonical
from penstock.kernels.registry import Implementation, KernelContext
from penstock.kernels.triton import FIXED_ORDER, packing, plain, scaled, unpacked
from penstock.kernels.triton.activations import check, gate
from penstock.kernels.triton.adapters import adapter
from penstock.kernels.triton.packing import Eights, Packed, Planes, packable
from penstock.kernels.triton.products import Gating, multiply
from penstock.kernels.triton.tables import embedding

__all__ = ["gated_linear", "linear", "pack_linear", "pack_table", "packable", "refuse", "variants"]


def refuse(_: KernelContext) -> str | None:
    return None


def pack_linear(parts: Sequence[Canonical | Tensor], segment: int = 0, ends: Sequence[int] = ()) -> Packed:
    """As kernels.api.PackLinear; products are cut where the device's tiles ask for it."""
    return packing.pack(parts)


def pack_table(parts: Sequence[Canonical | Tensor]) -> Packed:
    """As kernels.api.PackTable."""
    return packing.pack(parts)


def linear(
    x: Tensor,
    weight: Packed,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    fixed: bool = False,
    by_torch: bool = False,
) -> Tensor:
    """As kernels.api.LinearOp.

    Plain weights, and coded ones where there are many rows, are multiplied by torch, unless the order of sums is to be
    `fixed`; FP8 ones are `by_torch` where there are many rows.
    """
    if by_torch and len(weight.parts) == 1 and isinstance(part := weight.parts[0], Eights) and scaled.serves(x, part):
        out = scaled.multiply(x, part)
        out = out if bias is None else out.add_(bias)
        return out if residual is None else out.add_(residual)
    if not fixed and len(weight.parts) == 1 and unpacked.serves(x, coded := weight.parts[0]):
        assert isinstance(coded, Planes)
        return unpacked.multiply(x, coded, bias, residual)
    if not fixed and len(weight.parts) == 1 and isinstance(values := weight.parts[0], Tensor):
        return plain.multiply(x, values, bias, residual)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(len(x), weight.rows, dtype=x.dtype, device=x.device)
    begin = 0
    for part, width in zip(weight.parts, weight.widths, strict=True):
        columns = slice(begin, begin + width)
        begin += width
        added = None if residual is None else residual[:, columns]
        multiply(x, part, out[:, columns], None if bias is None else bias[columns], added)
    return out


def gated_linear(
    x: Tensor,
    weight: Packed,
    activation: str,
    bias: Tensor | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    adapters: Adapted | None = None,
    *,
    fixed: bool = False,
    by_torch: bool = False,
) -> Tensor:
    """As kernels.api.GatedLinear."""
    part = weight.parts[0]
    apart = scaled.serves(x, part) if by_torch else isinstance(part, Tensor) and not fixed
    apart = apart or (not fixed and unpacked.serves(x, part))
    if len(weight.parts) > 1 or apart or (by_torch and isinstance(part, Tensor)):
        products = linear(x, weight, bias, fixed=fixed, by_torch=by_torch)
        if adapters is not None:
            products = adapter(x, products, adapters, bias)
        return gate(products, activation, alpha, limit)
    check(activation)
    if adapters is not None:  # rounded, as products are where the activation is taken in the same pass
        products = torch.empty(len(x), weight.rows, dtype=x.dtype, device=x.device)
        multiply(x if x.stride(1) == 1 else x.contiguous(), part, products, bias)
        return gate(adapter(x, products, adapters, bias), activation, alpha, limit)
    out = torch.empty(len(x), weight.rows // 2, dtype=x.dtype, device=x.device)
    multiply(x if x.stride(1) == 1 else x.contiguous(), part, out, bias, gating=Gating(activation, alpha, limit))
    return out


def variants(name: str) -> tuple[Implementation, ...]:
    """Lookups for each compute type, and products of plain weights by kernels where results must not depend on rows."""
    lookups = (
        Implementation("embedding", name, partial(embedding, dtype=getattr(torch, dtype)), partial(_only, dtype))
        for dtype in ("float32", "bfloat16", "float16")
    )
    products: dict[str, Callable[..., Any]] = {"linear": linear, "gated_linear": gated_linear}
    many = f"{name}, FP8 of {scaled.MANY} rows and more by torch"
    return (
        *lookups,
        *(Implementation(op, many, partial(run, by_torch=True), scaled.refuse) for op, run in products.items()),
        *(
            Implementation(op, f"{name}, {FIXED_ORDER}", partial(run, fixed=True), _unless_fixed)
            for op, run in products.items()
        ),
    )


def _only(dtype: str, context: KernelContext) -> str | None:
    return None if context.dtype == dtype else f"makes {dtype}"


def _unless_fixed(context: KernelContext) -> str | None:
    return None if context.batch_invariant else "torch multiplies plain weights faster"
