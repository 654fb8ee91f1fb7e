"""Reference ops over the ranks of a group, whatever gathers their tensors: equal to one process up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.reference import dense, experts
from penstock.kernels.shared_ops import ExpertPlaces, TensorGroup


def shared_linear(
    x: Tensor,
    weight: Any,
    group: TensorGroup,
    place: tuple[int, int],
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    width: int = 0,
    *,
    linear: Callable[[Tensor, Any], Tensor] = dense.linear,
) -> Tensor:
    """As kernels.api.SharedLinear; `linear` is the product to use."""
    if weight is None and not width:
        raise ValueError("a rank without a weight has to be told the width of the output")
    own = x.new_zeros(len(x), width) if weight is None else linear(x, weight)
    total = reduce(torch.add, (part.float() for part in group.all_gather(own)))
    for more in (bias, residual):
        total = total if more is None else total + more
    return total.to(x.dtype)


def gather_columns(x: Tensor, widths: Sequence[int], group: TensorGroup) -> Tensor:
    if x.shape[1] != widths[group.rank]:
        raise ValueError(f"rank {group.rank} has {x.shape[1]} columns, not {widths[group.rank]} as it says")
    widest = x.new_zeros(len(x), max(widths))
    widest[:, : x.shape[1]] = x
    return torch.cat([part[:, :width] for part, width in zip(group.all_gather(widest), widths, strict=True)], dim=1)


def shared_embedding(
    numbers: Tensor, table: Tensor | None, scale: float, first: int, group: TensorGroup, width: int = 0
) -> Tensor:
    if table is None:
        if not width:
            raise ValueError("a rank without a table has to be told the width of the output")
        table = torch.zeros(0, width, device=numbers.device)
    own = (numbers >= first) & (numbers < first + len(table))
    rows = torch.zeros(len(numbers), table.shape[1], dtype=table.dtype, device=table.device)
    rows[own] = dense.embedding(numbers[own] - first, table, scale)
    return reduce(torch.add, group.all_gather(rows))


def shared_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Sequence[Tensor] | Tensor,
    down: Sequence[Tensor] | Tensor,
    activation: str,
    group: TensorGroup,
    first: int,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    residual: Tensor | None = None,
    gated: bool = True,
    places: ExpertPlaces | None = None,
    *,
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = dense.linear,
) -> Tensor:
    """As kernels.api.SharedExperts; `linear` is the product to use."""
    of = ids - first if places is None else _placed(ids, places)
    tokens, slots = torch.nonzero((of >= 0) & (of < len(gate_up)), as_tuple=True)
    own = experts.grouped_experts(
        x[tokens],
        weights[tokens, slots].unsqueeze(1),
        of[tokens, slots].unsqueeze(1),
        gate_up,
        down,
        activation,
        gate_up_bias,
        down_bias,
        alpha,
        limit,
        gated=gated,
        linear=linear,
    )
    mixed = torch.zeros(len(x), x.shape[1], device=x.device).index_add_(0, tokens, own.float())
    total = reduce(torch.add, group.all_gather(mixed))
    return (total if residual is None else total + residual).to(x.dtype)


def _placed(ids: Tensor, places: ExpertPlaces) -> Tensor:
    """The places of chosen experts [T, top_k] among this rank's own; -1 where another computes that token's."""
    places.counts += np.bincount(ids.cpu().numpy().reshape(-1), minlength=len(places.counts))
    rows = torch.from_numpy(places.table[:-1].reshape(-1, 3).astype(np.int64)).to(ids.device)[ids]
    own, holders, which = rows.unbind(-1)
    token = torch.arange(len(ids), device=ids.device).unsqueeze(1)
    return torch.where(token % holders == which, own, -1)
