"""Reference paged attention, in plain torch yet fit to serve: no loop over tokens, no work beyond the rows' contexts.

Rows are cut into tasks of a bounded size. A task gathers the keys and values its queries may see through the block
table into a scratch buffer small enough to stay in the processor's cache, and attends in one batched call. Rows with
few queries (decode, draft verification) share tasks; a row with many (a prompt chunk) is cut into query tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.cache import KvTensors
from penstock.kernels.key_scores import Scoring, SeenRows, summed_weights

SHARED_QUERIES = 8  # rows with at most this many queries are batched with rows of as many
SCRATCH_ELEMENTS = 2**19  # key elements gathered by one task: 2 MiB in float32
MASK_ELEMENTS = 2**21  # mask elements of one task
SCORE_ELEMENTS = 2**22  # scores written out at a time, where torch's fused attention does not apply
KEY_MULTIPLE = 16  # keys of a task are padded to a multiple, so that a row's sums split alike whatever its mates


@dataclass(frozen=True, slots=True)
class Task:
    """A rectangle of attention: `rows` rows × `queries` queries × `keys` keys.

    Attributes:
        begin: first query of the task in plan order.
        rows, queries, keys: its extent; queries [begin, begin + rows · queries).
        slots: [rows · keys] int64 cache slots; a key no query may see repeats the row's newest slot.
        mask: [rows, 1, queries, keys] float32, 0 or -inf; None where causality alone decides.
    """

    begin: int
    rows: int
    queries: int
    keys: int
    slots: Tensor
    mask: Tensor | None

    @property
    def span(self) -> slice:
        return slice(self.begin, self.begin + self.rows * self.queries)


@dataclass(frozen=True, slots=True)
class ReferenceAttentionPlan:
    """Tasks of one step and cache group.

    Attributes:
        tasks: in plan order.
        order: [T] int64, the token at each place of the plan order; None if they are the same.
        restore: [T] int64, the inverse; None with `order`.
        blind: [n] int64, tokens that see nothing; None if there are none.
        rows: of the step.
    """

    tasks: tuple[Task, ...]
    order: Tensor | None
    restore: Tensor | None
    blind: Tensor | None
    rows: SeenRows


class _Piece(NamedTuple):
    """Queries [token, token + queries) of the step, of one row; they see positions [low, end), or some of them.

    `causal` tells that each sees its own position and all before it, and the first one its own alone.
    """

    row: int
    low: int
    end: int
    token: int
    queries: int
    causal: bool

    @property
    def keys(self) -> int:
        return self.end - self.low


def plan_attention(
    cache: KvTensors,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    window: int | None,
    masks: Sequence[str] = (),
    spans: Tensor | None = None,
    chunked: bool = False,
) -> ReferenceAttentionPlan:
    key_cache = cache.key
    block_size = key_cache.shape[1] * cache.stripe.ranks  # as of layers that keep every position
    max_keys = max(1, SCRATCH_ELEMENTS // (key_cache.shape[2] * key_cache.shape[3]))
    seen = visible(query_lens, context_lens, window, masks, spans, chunked)
    pieces = _pieces(query_lens, context_lens, seen)
    blind = (seen[:, 0] >= seen[:, 1]).nonzero().squeeze(1)
    facts = torch.tensor(pieces, device=key_cache.device).view(-1, len(_Piece._fields))
    seen = seen.to(key_cache.device)
    tasks: list[Task] = []
    done = begin = 0
    for group in _groups(pieces, max_keys):
        rows_of = facts[done : done + len(group)]
        tasks.append(_task(group, rows_of, begin, block_size, block_table, seen))
        done += len(group)
        begin += len(group) * group[0].queries
    order, restore = _order(pieces, key_cache.device)
    rows = SeenRows(query_lens, context_lens, block_table, seen)
    sees_nothing = blind.to(key_cache.device) if len(blind) else None
    return ReferenceAttentionPlan(tuple(tasks), order, restore, sees_nothing, rows)


def visible(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    window: int | None,
    masks: Sequence[str],
    spans: Tensor | None,
    chunked: bool,
) -> Tensor:
    """First position and end of what each query sees, [T, 2] int64."""
    lens, contexts = torch.tensor(query_lens, dtype=torch.int64), torch.tensor(context_lens, dtype=torch.int64)
    context = contexts.repeat_interleave(lens)
    place = torch.arange(len(context)) + (contexts - lens.cumsum(0)).repeat_interleave(lens)
    low, end = torch.zeros_like(place), place + 1
    if window is not None:
        low = place - place % window if chunked else (end - window).clamp_min(0)

    def show(mask: str, first: Tensor, last: Tensor) -> None:
        chosen = torch.tensor([kind == mask for kind in masks]).repeat_interleave(lens)
        low[chosen], end[chosen] = first[chosen], last[chosen]

    if masks:
        side = context if window is None else torch.tensor(window // 2)
        show("bidirectional", (place - side).clamp_min(0), torch.minimum(end + side, context))
        show("cross", torch.zeros_like(low), context)
        if spans is not None:
            around = spans.cpu().long()
            show("spans", torch.minimum(low, around[:, 0]), torch.minimum(torch.maximum(end, around[:, 1]), context))
    return torch.stack((low, end), dim=1)


def _pieces(query_lens: Sequence[int], context_lens: Sequence[int], seen: Tensor) -> list[_Piece]:
    """Cuts every row into pieces whose mask stays small; few-query rows come first, by query count and context."""
    pieces: list[_Piece] = []
    bounds: list[list[int]] = seen.tolist()
    start = 0
    for row, (queries, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        causal = all(
            low == 0 and end == query for query, (low, end) in enumerate(bounds[start : start + queries], start=1)
        )
        step = queries
        if not causal and queries > SHARED_QUERIES:
            step = min(queries, max(SHARED_QUERIES, MASK_ELEMENTS // max(1, context)))
        for token in range(start, start + queries, step or 1):
            count = min(step, start + queries - token)
            pieces.append(_Piece(row, bounds[token][0], bounds[token + count - 1][1], token, count, causal))
        start += queries
    pieces.sort(key=lambda piece: (piece.queries, piece.keys if piece.queries <= SHARED_QUERIES else 0))
    return pieces


def _groups(pieces: Sequence[_Piece], max_keys: int) -> list[list[_Piece]]:
    """Joins neighbours with equally many queries into tasks of at most `max_keys` gathered keys."""
    groups: list[list[_Piece]] = []
    for piece in pieces:
        joins = (
            groups
            and piece.queries <= SHARED_QUERIES
            and groups[-1][0].queries == piece.queries
            and (len(groups[-1]) + 1) * piece.keys <= max_keys
        )
        if joins:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups


def _task(
    group: Sequence[_Piece], facts: Tensor, begin: int, block_size: int, block_table: Tensor, seen: Tensor
) -> Task:
    """`facts` holds the group's pieces, [rows, fields of a piece] int64."""
    device = seen.device
    rows, queries = len(group), group[0].queries
    keys = -(-max(1, *(piece.keys for piece in group)) // KEY_MULTIPLE) * KEY_MULTIPLE
    row, low, end, token, *_ = facts.unbind(1)
    place = torch.arange(keys, device=device) + low[:, None]  # [rows, keys], absolute position of each key
    readable = torch.minimum(place, end[:, None] - 1).clamp_min_(0)
    block = readable // block_size
    slots = readable + (block_table[row].gather(1, block).long() - block) * block_size
    mask = None
    if rows > 1 or not group[0].causal:
        bounds = seen[token[:, None] + torch.arange(queries, device=device)]  # [rows, queries, 2]
        hidden = (place[:, None, :] < bounds[..., :1]) | (place[:, None, :] >= bounds[..., 1:])
        mask = torch.zeros(rows, 1, queries, keys, device=device)
        mask.masked_fill_(hidden[:, None], float("-inf"))
    return Task(begin, rows, queries, keys, slots.reshape(-1), mask)


def _order(pieces: Sequence[_Piece], device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    if all(a.token <= b.token for a, b in pairwise(pieces)):
        return None, None
    tokens = [token for piece in pieces for token in range(piece.token, piece.token + piece.queries)]
    order = torch.tensor(tokens, device=device)
    return order, torch.argsort(order)


class PagedAttention:
    """`paged_attention` with its scratch buffers, which belong to one engine and are used by one thread at a time."""

    def __init__(self) -> None:
        self._scratch: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def __call__(
        self,
        query: Tensor,
        cache: KvTensors,
        plan: ReferenceAttentionPlan,
        scale: float,
        sinks: Tensor | None = None,
        soft_cap: float | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        query = query.reshape(query.shape[0], query.shape[1:].numel() // cache.key.shape[3], cache.key.shape[3])
        ordered = query if plan.order is None else query.index_select(0, plan.order)
        out = torch.empty(*query.shape[:2], cache.value.shape[3], dtype=query.dtype, device=query.device)
        for task in plan.tasks:
            key = self._gather("key", cache.key, task, query.dtype)
            value = key[..., : cache.value.shape[3]]
            if not cache.latent:
                value = self._gather("value", cache.value, task, query.dtype)
            changed = sinks is not None or soft_cap is not None or slopes is not None
            attend = _attend if changed else _attend_fused
            attend(ordered[task.span], key, value, task, scale, out[task.span], sinks, soft_cap, slopes)
        out = (out if plan.restore is None else out.index_select(0, plan.restore)).flatten(1)
        return out if plan.blind is None else out.index_fill_(0, plan.blind, 0.0)

    def _gather(self, name: str, cache: Tensor, task: Task, dtype: torch.dtype) -> Tensor:
        """The task's keys or values, [rows, heads, keys, dim], in scratch memory."""
        heads, dim = cache.shape[2:]
        width = heads * dim
        needed = task.slots.shape[0] * width
        place = (name, cache.dtype, cache.device)
        scratch = self._scratch.get(place)
        if scratch is None or scratch.numel() < needed:
            scratch = torch.empty(max(needed, SCRATCH_ELEMENTS), dtype=cache.dtype, device=cache.device)
            self._scratch[place] = scratch
        rows = scratch[:needed].view(-1, width)
        torch.index_select(cache.view(-1, width), 0, task.slots, out=rows)
        return rows.to(dtype).view(task.rows, task.keys, heads, dim).transpose(1, 2)


def _attend_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    task: Task,
    scale: float,
    out: Tensor,
    sinks: Tensor | None,
    soft_cap: float | None,
    slopes: Tensor | None,
) -> None:
    """Torch's fused attention. The queries of a group lie along its query axis (few) or its head axis (many)."""
    rows = task.rows
    queries = task.queries
    kv_heads = key.shape[1]
    grouped = query.view(rows, queries, kv_heads, -1, query.shape[-1])  # [rows, queries, K, group, D]
    target = out.view(rows, queries, kv_heads, -1, out.shape[-1])
    if queries <= SHARED_QUERIES and task.mask is not None:
        packed = grouped.permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, query.shape[-1])
        mask = task.mask.to(query.dtype)
        if queries > 1:
            mask = mask.expand(-1, grouped.shape[3], -1, -1).reshape(rows, 1, -1, task.keys)
        result = functional.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scale)
        target.copy_(result.view(rows, kv_heads, -1, queries, out.shape[-1]).permute(0, 3, 1, 2, 4))
        return
    shape = (kv_heads, grouped.shape[3], -1, -1)
    result = functional.scaled_dot_product_attention(
        grouped[0].permute(1, 2, 0, 3),
        key[0, :, None].expand(shape),
        value[0, :, None].expand(shape),
        attn_mask=None if task.mask is None else task.mask.to(query.dtype),
        is_causal=task.mask is None,
        scale=scale,
    )
    target[0].copy_(result.permute(2, 0, 1, 3))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    task: Task,
    scale: float,
    out: Tensor,
    sinks: Tensor | None,
    soft_cap: float | None,
    slopes: Tensor | None,
) -> None:
    """The formula written out, for scores with sinks, a soft cap or slopes; some queries of all rows at a time."""
    rows = task.rows
    queries = task.queries
    kv_heads = key.shape[1]
    grouped = query.view(rows, queries, kv_heads, -1, query.shape[-1]).permute(0, 2, 3, 1, 4)
    target = out.view(rows, queries, kv_heads, -1, out.shape[-1]).permute(0, 2, 3, 1, 4)
    turned = key[:, :, None].transpose(-1, -2)
    step = max(1, SCORE_ELEMENTS // (rows * query.shape[1] * task.keys))
    for begin in range(0, queries, step):
        part = slice(begin, begin + step)
        scores = torch.matmul(grouped[..., part, :], turned).float().mul_(scale)  # [rows, K, group, Q, C]
        if soft_cap is not None:
            scores.div_(soft_cap).tanh_().mul_(soft_cap)
        if slopes is not None:  # softmax does not see how far all keys of a query are moved
            distance = torch.arange(1 - task.keys, 1, dtype=torch.float32, device=query.device)
            scores += slopes.view(kv_heads, -1, 1, 1) * distance
        if task.mask is not None:
            scores += task.mask[:, :, part].unsqueeze(1)
        else:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu_(begin + 1)
            scores.masked_fill_(later, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.view(kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)), dim=-1)
        weights = scores.softmax(dim=-1)[..., : task.keys].to(value.dtype)
        target[..., part, :] = torch.matmul(weights, value[:, :, None])


def key_scores(
    query: Tensor,
    cache: KvTensors,
    plan: ReferenceAttentionPlan,
    queries: int,
    scale: float,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    _, size, kv_heads, dim = cache.key.shape

    def keys(blocks: Tensor, count: int) -> Tensor:
        return cache.key[blocks[: -(-count // size)]].view(-1, kv_heads, dim)[:count].float()

    given = query.reshape(len(query), -1, dim)
    return summed_weights(given, plan.rows, keys, queries, Scoring(scale, sinks, soft_cap, slopes))
