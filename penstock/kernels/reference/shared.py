"""Reference ops over the ranks of a group, whatever gathers their tensors: equal to one process up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.cache import KvTensors
from penstock.kernels.reference import dense, experts
from penstock.kernels.reference.attention import ReferenceAttentionPlan
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


def shared_attention(
    query: Tensor,
    cache: KvTensors,
    plan: ReferenceAttentionPlan,
    scale: float,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
    slopes: Tensor | None = None,
    *,
    group: TensorGroup,
    heads: Sequence[int],
) -> Tensor:
    ranks, own = cache.stripe.ranks, heads[group.rank]
    first = group.rank // ranks * ranks
    others = range(first, first + ranks)
    dtype = query.dtype
    query = query.reshape(len(query), own, cache.key.shape[3]).float()
    queries = [given[:, : heads[rank]] for rank, given in enumerate(group.all_gather(_padded(query, max(heads))))]
    together = torch.cat([queries[rank] for rank in others], dim=1)
    most = max(sum(heads[start : start + ranks]) for start in range(0, len(heads), ranks))
    found = group.all_gather(_padded(_states(together, cache, plan, scale, soft_cap, slopes), most))
    start = sum(heads[first : group.rank])
    states = torch.stack([found[rank][:, start : start + own] for rank in others])  # [ranks, T, H, Dv + 2]
    greatest = states[..., -2:-1]
    total = states[..., -1:]
    best = greatest.amax(dim=0)
    if sinks is not None:
        best = torch.maximum(best, sinks.view(1, -1, 1))
    factor = torch.where(total > 0, (greatest - best).exp(), 0.0)
    weight = (total * factor).sum(dim=0)
    if sinks is not None:
        weight = weight + (sinks.view(1, -1, 1) - best).exp()
    out = torch.where(weight > 0, (states[..., :-2] * factor).sum(dim=0) / weight, 0.0)
    return out.flatten(1).to(dtype)


def _padded(x: Tensor, count: int) -> Tensor:
    """x [T, n, D] with zeros behind its heads, [T, count, D]."""
    return torch.nn.functional.pad(x, (0, 0, 0, count - x.shape[1]))


def _states(
    query: Tensor,
    cache: KvTensors,
    plan: ReferenceAttentionPlan,
    scale: float,
    soft_cap: float | None,
    slopes: Tensor | None,
) -> Tensor:
    """Of queries [T, H, D] over the positions that are kept here: weighted sums of values, the greatest score and the
    sum of weights, [T, H, Dv + 2]; what is hidden from all of a query's keys has weights of 0."""
    _, size, kv_heads, dim = cache.key.shape
    reads = torch.arange(query.shape[1]) * kv_heads // query.shape[1]
    parts, start = [], 0
    for row, (count, context) in enumerate(zip(plan.rows.lens, plan.rows.contexts, strict=True)):
        seen = plan.rows.seen[start : start + count]
        positions = torch.arange(context)
        block = plan.rows.block_table[row].long()[positions // (size * cache.stripe.ranks)]
        slot = block * size * cache.stripe.ranks + positions % (size * cache.stripe.ranks)
        here, slot = dense.own_slots(cache, slot)
        place = positions[here]
        keys = cache.key.view(-1, kv_heads, dim)[slot].float()[:, reads]
        values = cache.value.reshape(-1, kv_heads, cache.value.shape[3])[slot].float()[:, reads]
        scores = torch.einsum("whd,nhd->whn", query[start : start + count], keys) * scale
        if soft_cap is not None:
            scores = (scores / soft_cap).tanh() * soft_cap
        if slopes is not None:
            distance = place - torch.arange(context - count, context).unsqueeze(1)
            scores = scores + slopes.view(1, -1, 1) * distance.unsqueeze(1)
        hidden = (place < seen[:, :1]) | (place >= seen[:, 1:])
        scores = scores.masked_fill(hidden.unsqueeze(1), float("-inf"))
        pad = scores.new_full((*scores.shape[:2], 1), float("-inf"))
        greatest = torch.cat((scores, pad), dim=2).amax(dim=2, keepdim=True)
        weights = torch.where(scores > float("-inf"), (scores - greatest).exp(), 0.0)
        sums = torch.einsum("whn,nhd->whd", weights, values)
        parts.append(torch.cat((sums, greatest, weights.sum(dim=2, keepdim=True)), dim=2))
        start += count
    return torch.cat(parts)


def _placed(ids: Tensor, places: ExpertPlaces) -> Tensor:
    """The places of chosen experts [T, top_k] among this rank's own; -1 where another computes that token's."""
    places.counts += np.bincount(ids.cpu().numpy().reshape(-1), minlength=len(places.counts))
    rows = torch.from_numpy(places.table[:-1].reshape(-1, 3).astype(np.int64)).to(ids.device)[ids]
    own, holders, which = rows.unbind(-1)
    token = torch.arange(len(ids), device=ids.device).unsqueeze(1)
    return torch.where(token % holders == which, own, -1)
