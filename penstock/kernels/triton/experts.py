"""Mixtures of experts: routing, tokens sorted into tiles of one expert each, products of tiles, an ordered sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.adapters import ExpertAdapters, RowAdapters, rows_of
from penstock.kernels.canonical import Canonical
from penstock.kernels.registry import KernelContext
from penstock.kernels.triton import adapters as low_rank
from penstock.kernels.triton import packing
from penstock.kernels.triton.activations import activate, gate
from penstock.kernels.triton.numbers import narrow, wide
from penstock.kernels.triton.packing import Packed
from penstock.kernels.triton.products import GroupedRows, multiply
from penstock.kernels.triton.sorting import sorted_rows

ROUTINGS = ("softmax_topk", "topk_softmax", "sigmoid_topk", "sparsemixer")
_COLUMNS = 1024


def refuse(_: KernelContext) -> str | None:
    return None


@triton.jit
def _largest(values, place, size):
    """The largest value and the first place that has it."""
    best = tl.max(values, axis=0)
    return best, tl.minimum(tl.min(tl.where(values == best, place, size), axis=0), size - 1)


@triton.jit
def _limited(choice, place, experts, GROUPS: tl.constexpr, KEPT: tl.constexpr, COUNTED: tl.constexpr):
    """-inf outside the KEPT groups whose COUNTED best experts have the largest sum."""
    group = place // (experts // GROUPS)
    number = tl.arange(0, triton.next_power_of_2(GROUPS))
    worth = tl.where(number < GROUPS, 0.0, float("-inf"))
    for each in range(GROUPS):
        best, at = _largest(tl.where(group == each, choice, float("-inf")), place, experts)
        if COUNTED == 2 and experts > GROUPS:
            best += tl.max(tl.where((group == each) & (place != at), choice, float("-inf")), axis=0)
        worth = tl.where(number == each, best, worth)
    kept = place < 0
    for _ in range(KEPT):
        _, at = _largest(worth, number, GROUPS)
        kept = kept | (group == at)
        worth = tl.where(number == at, float("-inf"), worth)
    return tl.where(kept, choice, float("-inf"))


@triton.jit
def _route(
    logits, bias, factors, weights, ids, experts, stride, scale, jitter,
    ROUTING: tl.constexpr, RENORMALIZE: tl.constexpr, BIASED: tl.constexpr, FACTORED: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place, slot = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    given = place < experts
    score = wide(tl.load(logits + token * stride + place, mask=given, other=float("-inf")))
    plain = score
    if ROUTING == "softmax_topk":
        score = tl.exp(score - tl.max(score, axis=0))
        score = score / tl.sum(score, axis=0)
    if ROUTING == "sigmoid_topk":
        score = 1.0 / (1.0 + tl.exp(-score))
    choice = score
    if BIASED:
        choice += tl.load(bias + place, mask=given, other=0.0)
    choice = tl.where(given, choice, float("-inf"))
    if GROUPS > 1:
        choice = _limited(choice, place, experts, GROUPS, KEPT, 2 if ROUTING == "sigmoid_topk" else 1)
    chosen = tl.zeros((SLOTS,), tl.int64)
    value = tl.where(slot < TOP_K, 0.0, float("-inf"))
    for each in range(TOP_K):
        best, at = _largest(choice, place, experts)
        if ROUTING == "sparsemixer":
            far = (best - plain) / tl.maximum(tl.abs(plain), best) > 2 * jitter
            near = tl.where(far | (choice == float("-inf")), 0.0, tl.exp(choice - best))
            found = 1.0 / tl.sum(near, axis=0)
        else:
            found = tl.sum(tl.where(place == at, score, 0.0), axis=0)
        chosen = tl.where(slot == each, at.to(tl.int64), chosen)
        value = tl.where(slot == each, found, value)
        choice = tl.where(place == at, float("-inf"), choice)
    if ROUTING == "topk_softmax":
        value = tl.exp(value - tl.max(value, axis=0))
        value = value / tl.sum(value, axis=0)
    value = tl.where(slot < TOP_K, value, 0.0)
    if RENORMALIZE:
        value = value / (tl.sum(value, axis=0) + 1e-20)
    value = value * scale
    if FACTORED:
        value = value * tl.load(factors + chosen)
    tl.store(weights + token * TOP_K + slot, value, mask=slot < TOP_K)
    tl.store(ids + token * TOP_K + slot, chosen, mask=slot < TOP_K)


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
    """As kernels.api.RouteExperts; of equal scores the first expert's counts as larger."""
    if routing not in ROUTINGS:
        raise ValueError(f"routing is {routing!r}; allowed: {', '.join(ROUTINGS)}")
    tokens, experts = router_logits.shape
    logits = router_logits if router_logits.stride(1) == 1 else router_logits.contiguous()
    weights = torch.empty(tokens, top_k, device=logits.device)
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    if tokens:
        chooses = routing in ("softmax_topk", "sigmoid_topk")
        biased = bias if chooses else None
        count, kept = groups if routing != "sparsemixer" else (1, 1)
        _route[(tokens,)](
            logits, logits if biased is None else biased, logits if factors is None else factors, weights, ids, experts,
            logits.stride(0), scale, jitter, routing, renormalize and chooses, biased is not None, factors is not None,
            count, kept, top_k, triton.next_power_of_2(top_k),
            triton.next_power_of_2(experts), num_warps=1 if experts <= 128 else 4,
        )  # fmt: skip
    return weights, ids


@triton.jit
def _mix(
    x, weights, ids, residual, out, size, TOP_K: tl.constexpr, SLOTS: tl.constexpr, ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Weighted sum of a token's rows, by rising experts; of equal ones in slot order."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    total = tl.zeros((BLOCK,), tl.float32)
    slots = tl.arange(0, SLOTS)
    expert = tl.load(ids + token * TOP_K + slots, mask=slots < TOP_K, other=1 << 30)
    before = (expert[None, :] < expert[:, None]) | (
        (expert[None, :] == expert[:, None]) & (slots[None, :] < slots[:, None])
    )
    place = tl.sum(before.to(tl.int32), axis=1)
    for at in range(TOP_K):
        row = token * TOP_K + tl.sum(tl.where(place == at, slots, 0), axis=0)
        total += wide(tl.load(x + row * size + column, mask=inside, other=0.0)) * tl.load(weights + row)
    if ADDS:
        total += wide(tl.load(residual + token * size + column, mask=inside, other=0.0))
    tl.store(out + token * size + column, narrow(total, out.dtype.element_ty), mask=inside)


def pack_experts(parts: Sequence[Canonical | Tensor], count: int, segment: int = 0) -> Packed:
    """As kernels.api.PackExperts."""
    return packing.pack(parts, count)


def _product(x: Tensor, weight: Packed, bias: Tensor | None, rows: GroupedRows) -> Tensor:
    """Every row with the matrix of its expert, [rows.count, weight.rows]."""
    out = torch.empty(rows.count, weight.rows, dtype=x.dtype, device=x.device)
    begin = 0
    for part, width in zip(weight.parts, weight.widths, strict=True):
        columns = slice(begin, begin + width)
        begin += width
        added = None if bias is None else bias[:, columns].contiguous()
        multiply(x, part, out[:, columns], added, None, rows, weight.experts)
    return out


def _each(bias: Tensor | None, rows: RowAdapters) -> Tensor | None:
    """The bias of each row's expert."""
    return None if bias is None or rows.expert is None else bias[rows.expert].float()


def grouped_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Packed,
    down: Packed,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    residual: Tensor | None = None,
    gated: bool = True,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """As kernels.api.GroupedExperts."""
    tokens, top_k = ids.shape
    out = torch.empty(tokens, down.rows, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    rows = sorted_rows(ids.contiguous(), down.experts)
    hidden = _product(x if x.stride(1) == 1 else x.contiguous(), gate_up, gate_up_bias, rows)
    has = None
    if adapters is not None:
        has = rows_of(adapters.tokens, x).repeated(top_k, ids.reshape(-1))
        low_rank.change(x, hidden, adapters.gate_up, has, _each(gate_up_bias, has), top_k)
    hidden = gate(hidden, activation, alpha, limit) if gated else activate(hidden, activation, limit)
    each = _product(hidden, down, down_bias, GroupedRows(rows.rows, rows.experts, rows.size, rows.count, 1))
    if adapters is not None and has is not None:
        low_rank.change(hidden, each, adapters.down, has, _each(down_bias, has))
    added = each if residual is None else residual.contiguous()
    _mix[(tokens, triton.cdiv(down.rows, _COLUMNS))](
        each, weights.contiguous(), ids.contiguous(), added, out, down.rows, top_k, triton.next_power_of_2(top_k),
        residual is not None, _COLUMNS,
    )  # fmt: skip
    return out
