"""Reference ops of mixture-of-experts layers: routing and grouped expert MLPs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from penstock.kernels.adapters import ExpertAdapters, rows_of
from penstock.kernels.reference import dense, low_rank


def route_experts(
    router_logits: Tensor,
    top_k: int,
    routing: str,
    renormalize: bool,
    bias: Tensor | None = None,
    groups: tuple[int, int] = (1, 1),
    scale: float = 1.0,
    jitter: float = 0.0,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if factors is not None:
        weights, ids = route_experts(router_logits, top_k, routing, renormalize, bias, groups, scale, jitter)
        return weights * factors[ids], ids
    logits = router_logits.float()
    if routing == "topk_softmax":
        values, ids = _limited(logits, groups, 1).topk(top_k, dim=-1)
        return values.softmax(dim=-1) * scale, ids
    if routing == "sparsemixer":
        return _mix_sparsely(logits, top_k, jitter, scale)
    if routing not in ("softmax_topk", "sigmoid_topk"):
        raise ValueError(f"routing is {routing!r}; allowed: softmax_topk, topk_softmax, sigmoid_topk, sparsemixer")
    counted, scores = (2, logits.sigmoid()) if routing == "sigmoid_topk" else (1, logits.softmax(dim=-1))
    ids = _limited(scores if bias is None else scores + bias, groups, counted).topk(top_k, dim=-1).indices
    values = scores.gather(1, ids)
    return (values / (values.sum(dim=-1, keepdim=True) + 1e-20) if renormalize else values) * scale, ids


def _mix_sparsely(logits: Tensor, top_k: int, jitter: float, scale: float) -> tuple[Tensor, Tensor]:
    """One expert after the other, each weighted among those left whose logits are near enough to its own."""
    left, taken = logits.clone(), []
    for _ in range(top_k):
        highest, expert = left.max(dim=-1, keepdim=True)
        far = (highest - logits) / logits.abs().maximum(highest) > 2 * jitter
        taken.append((left.masked_fill(far, float("-inf")).softmax(dim=-1).gather(1, expert) * scale, expert))
        left.scatter_(1, expert, float("-inf"))
    weights, ids = zip(*taken, strict=True)
    return torch.cat(weights, dim=1), torch.cat(ids, dim=1)


def _limited(scores: Tensor, groups: tuple[int, int], counted: int) -> Tensor:
    """Scores [T, E] with -inf outside the best groups: those whose `counted` best experts have the largest sum."""
    number, chosen = groups
    if number == 1:
        return scores
    members = scores.view(len(scores), number, -1)
    worth = members.topk(min(counted, members.shape[2]), dim=-1).values.sum(dim=-1)
    out = torch.full_like(members, float("-inf"))
    best = worth.topk(chosen, dim=-1).indices.unsqueeze(-1).expand(-1, -1, members.shape[2])
    return out.scatter_(1, best, members.gather(1, best)).flatten(1)


def pack_experts(parts: Sequence[Tensor], count: int, segment: int = 0) -> Tensor:
    stacks = [part.view(count, -1, part.shape[1]) for part in parts]
    return stacks[0] if len(stacks) == 1 else torch.cat(stacks, dim=1)


def pack_heads(parts: Sequence[Tensor], count: int) -> Tensor:
    return pack_experts(parts, count)


def grouped_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Sequence[Tensor] | Tensor,
    down: Sequence[Tensor] | Tensor,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    residual: Tensor | None = None,
    gated: bool = True,
    adapters: ExpertAdapters | None = None,
    *,
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = dense.linear,
) -> Tensor:
    """Tokens are sorted by expert, every expert that was hit runs once, and the outputs are summed by rising experts.

    `linear` is the product to use; gate_up and down are indexed by expert to give its weights.
    """
    tokens, top_k = ids.shape
    flat = ids.reshape(-1)
    order = flat.argsort(stable=True)
    inputs = x.index_select(0, order // top_k)
    outputs = torch.empty_like(inputs)
    has = None
    if adapters is not None:
        every = rows_of(adapters.tokens, x).some(order // top_k)
        has = replace(every, expert=flat[order])
    begin = 0
    for expert, count in enumerate(torch.bincount(flat, minlength=len(gate_up)).tolist()):
        if count == 0:
            continue
        rows = slice(begin, begin + count)
        begin += count
        bias = None if gate_up_bias is None else gate_up_bias[expert]
        hidden = linear(inputs[rows], gate_up[expert], bias)
        if adapters is not None and has is not None:
            low_rank.change_parts(inputs[rows], hidden, adapters.gate_up, has.some(rows), bias)
        hidden = dense.gate_up(hidden, activation, alpha, limit) if gated else dense.activate(hidden, activation, limit)
        bias = None if down_bias is None else down_bias[expert]
        outputs[rows] = linear(hidden, down[expert], bias)
        if adapters is not None and has is not None:
            low_rank.change_parts(hidden, outputs[rows], adapters.down, has.some(rows), bias)
    by_slot = torch.empty_like(outputs)
    by_slot[order] = outputs
    weighted = by_slot.view(tokens, top_k, -1).float() * weights.unsqueeze(-1)
    by_expert = ids.argsort(dim=1, stable=True).unsqueeze(-1).expand_as(weighted)
    mixed = weighted.gather(1, by_expert).sum(dim=1).to(x.dtype)
    return mixed if residual is None else mixed.add_(residual)
