"""Linear layers and experts over oneDNN's packed weights, as shipped inside torch.

On CPUs a few times faster than the plain product, and a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.adapters import Adapted
from penstock.kernels.reference import dense, experts, low_rank, shared
from penstock.kernels.registry import Implementation, KernelContext


def pack_linear(parts: Sequence[Tensor], segment: int = 0, ends: Sequence[int] = ()) -> Tensor:
    """Matrices [M, N] → an opaque tensor of all their values in blocks, which only `linear` here understands."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(dense.pack_linear(parts).contiguous())
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """As kernels.api.LinearOp."""
    if not weight.is_mkldnn:
        return dense.linear(x, weight, bias, residual)
    result: Tensor
    rows = x.shape[0]
    if rows == 1:  # one row alone would take a matrix-vector path, whose sums round differently
        x = x.expand(2, -1).contiguous()
        residual = None if residual is None else residual.expand(2, -1).contiguous()
    if residual is None:
        result = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    else:
        result = torch.ops.mkldnn._linear_pointwise(x, residual, weight, bias, "add")
    return result[:rows]


def gated_linear(
    x: Tensor,
    weight: Tensor,
    activation: str,
    bias: Tensor | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    adapters: Adapted | None = None,
) -> Tensor:
    """As kernels.api.GatedLinear."""
    products = linear(x, weight, bias)
    if adapters is not None:
        products = low_rank.adapter(x, products, adapters, bias)
    return dense.gate_up(products, activation, alpha, limit)


def pack_experts(parts: Sequence[Tensor], count: int, segment: int = 0) -> tuple[Tensor, ...]:
    """As kernels.api.PackExperts: each expert's matrix, packed."""
    return tuple(pack_linear((matrix,)) for matrix in experts.pack_experts(parts, count))


def _refuse(context: KernelContext) -> str | None:
    if context.prefer_reference:
        return "the reference is preferred"
    if context.batch_invariant:
        return "may round differently with the number of rows"
    if context.device != "cpu":
        return f"runs on cpu, not {context.device}"
    if context.dtype not in ("float32", "bfloat16"):
        return f"computes in float32 and bfloat16, not {context.dtype}"
    operations = ("_reorder_linear_weight", "_linear_pointwise")
    if not torch._C._has_mkldnn or not all(hasattr(torch.ops.mkldnn, name) for name in operations):
        return "this torch was built without oneDNN"
    if context.dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "computes in bfloat16 only where the processor does (AVX-512)"
    return None


def implementations() -> tuple[Implementation, ...]:
    """The products and their packing; all refuse in the same cases, so they are always chosen together."""
    functions: dict[str, Callable[..., Any]] = {
        "pack_linear": pack_linear,
        "linear": linear,
        "gated_linear": gated_linear,
        "pack_experts": pack_experts,
        "grouped_experts": partial(experts.grouped_experts, linear=linear),
        "shared_linear": partial(shared.shared_linear, linear=linear),
        "shared_experts": partial(shared.shared_experts, linear=linear),
    }
    return tuple(Implementation(op, "oneDNN packed (torch)", run, _refuse) for op, run in functions.items())
