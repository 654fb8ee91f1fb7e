"""Reference ops of mixture-of-experts layers: routing and grouped expert MLPs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.kernels.reference import dense


def route_experts(router_logits: Tensor, top_k: int, routing: str, renormalize: bool) -> tuple[Tensor, Tensor]:
    logits = router_logits.float()
    if routing == "topk_softmax":
        values, ids = logits.topk(top_k, dim=-1)
        return values.softmax(dim=-1), ids
    if routing == "softmax_topk":
        values, ids = logits.softmax(dim=-1).topk(top_k, dim=-1)
        return (values / values.sum(dim=-1, keepdim=True) if renormalize else values), ids
    raise ValueError(f"routing is {routing!r}; allowed: softmax_topk, topk_softmax")


def pack_experts(parts: Sequence[Tensor], count: int) -> Tensor:
    stacks = [part.view(count, -1, part.shape[1]) for part in parts]
    return stacks[0] if len(stacks) == 1 else torch.cat(stacks, dim=1)


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
    *,
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = dense.linear,
) -> Tensor:
    """Tokens are sorted by expert, every expert that was hit runs once, and the outputs are summed in slot order.

    `linear` is the product to use; gate_up and down are indexed by expert to give its weights.
    """
    tokens, top_k = ids.shape
    flat = ids.reshape(-1)
    order = flat.argsort(stable=True)
    inputs = x.index_select(0, order // top_k)
    outputs = torch.empty_like(inputs)
    begin = 0
    for expert, count in enumerate(torch.bincount(flat, minlength=len(gate_up)).tolist()):
        if count == 0:
            continue
        rows = slice(begin, begin + count)
        begin += count
        bias = None if gate_up_bias is None else gate_up_bias[expert]
        hidden = dense.gate_up(linear(inputs[rows], gate_up[expert], bias), activation, alpha, limit)
        bias = None if down_bias is None else down_bias[expert]
        outputs[rows] = linear(hidden, down[expert], bias)
    by_slot = torch.empty_like(outputs)
    by_slot[order] = outputs
    weighted = by_slot.view(tokens, top_k, -1).float() * weights.unsqueeze(-1)
    mixed = weighted.sum(dim=1).to(x.dtype)
    return mixed if residual is None else mixed.add_(residual)
