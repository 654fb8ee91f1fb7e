"""Mixtures of experts: routing, tokens sorted into tiles of one expert each, products of tiles, an ordered sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.canonical import Canonical
from penstock.kernels.registry import KernelContext
from penstock.kernels.triton import packing
from penstock.kernels.triton.activations import activate, gate
from penstock.kernels.triton.numbers import narrow, wide
from penstock.kernels.triton.packing import Packed
from penstock.kernels.triton.products import GroupedRows, multiply, row_tile

ROUTINGS = ("softmax_topk", "topk_softmax", "sigmoid_topk", "sparsemixer")
_IDS = 1024  # expert ids read at once
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


@triton.jit(do_not_specialize=["pairs"])
def _count(ids, counts, pairs, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, pairs, BLOCK):
        total += (tl.load(ids + begin + place, mask=begin + place < pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _sort(
    ids, counts, rows, tile_experts, pairs, tiles, experts, SIZE: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Puts the rows of an expert, in order, into tiles behind those of the experts before it."""
    expert, number = tl.program_id(0), tl.arange(0, EXPERTS)
    whole = (tl.load(counts + number, mask=number < experts, other=0) + SIZE - 1) // SIZE
    first = tl.sum(tl.where(number < expert, whole, 0), axis=0)
    own = tl.sum(tl.where(number == expert, whole, 0), axis=0)
    place = tl.arange(0, BLOCK)
    done = 0
    for begin in range(0, pairs, BLOCK):
        hit = tl.load(ids + begin + place, mask=begin + place < pairs, other=-1) == expert
        rank = done + tl.cumsum(hit.to(tl.int32), axis=0) - 1
        tl.store(rows + first * SIZE + rank, (begin + place).to(tl.int32), mask=hit)
        done += tl.sum(hit.to(tl.int32), axis=0)
    for begin in range(0, SIZE, BLOCK):
        free = done + begin + place
        tl.store(rows + first * SIZE + free, tl.zeros((BLOCK,), tl.int32) + pairs, mask=free < own * SIZE)
    for begin in range(0, own, BLOCK):
        mark = tl.zeros((BLOCK,), tl.int32) + expert
        tl.store(tile_experts + first + begin + place, mark, mask=begin + place < own)
    if expert == experts - 1:
        for begin in range(first + own, tiles, BLOCK):
            tl.store(tile_experts + begin + place, tl.zeros((BLOCK,), tl.int32) - 1, mask=begin + place < tiles)


def sorted_rows(ids: Tensor, experts: int) -> GroupedRows:
    """Rows token · top_k + slot of ids [T, top_k], by expert."""
    pairs = ids.numel()
    size = row_tile(2 * pairs // experts)
    tiles = min(pairs, pairs // size + experts)
    counts = torch.empty(experts, dtype=torch.int32, device=ids.device)
    rows = torch.empty(tiles * size, dtype=torch.int32, device=ids.device)
    tile_experts = torch.empty(tiles, dtype=torch.int32, device=ids.device)
    _count[(experts,)](ids, counts, pairs, _IDS)
    _sort[(experts,)](
        ids, counts, rows, tile_experts, pairs, tiles, experts, size, triton.next_power_of_2(experts), _IDS
    )
    return GroupedRows(rows, tile_experts, size, pairs, ids.shape[1])


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
) -> Tensor:
    """As kernels.api.GroupedExperts."""
    tokens, top_k = ids.shape
    out = torch.empty(tokens, down.rows, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    rows = sorted_rows(ids.contiguous(), down.experts)
    hidden = _product(x if x.stride(1) == 1 else x.contiguous(), gate_up, gate_up_bias, rows)
    hidden = gate(hidden, activation, alpha, limit) if gated else activate(hidden, activation, limit)
    each = _product(hidden, down, down_bias, GroupedRows(rows.rows, rows.experts, rows.size, rows.count, 1))
    added = each if residual is None else residual.contiguous()
    _mix[(tokens, triton.cdiv(down.rows, _COLUMNS))](
        each, weights.contiguous(), ids.contiguous(), added, out, down.rows, top_k, triton.next_power_of_2(top_k),
        residual is not None, _COLUMNS,
    )  # fmt: skip
    return out
