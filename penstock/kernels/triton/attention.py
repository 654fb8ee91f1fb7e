"""Paged attention over a ragged batch: FlashAttention (Dao 2023, arXiv:2307.08691) on a block table.

A program has a tile of queries of one row, with the query heads that share a KV head, and walks over their keys. Rows
with many queries are walked from the first key to the last. The context of rows with few (decode, drafts) is split at
fixed positions, multiples of PART; what each part gives is kept, then joined in the order of the parts (as in
Flash-Decoding). How parts are dealt out to programs changes nothing of what is computed. Where results must not depend
on the number of queries either, rows with many have the same parts, which their program merges in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.cache import KvTensors
from penstock.kernels.key_scores import Scoring, SeenRows, summed_weights
from penstock.kernels.reference.attention import visible
from penstock.kernels.registry import Implementation, KernelContext
from penstock.kernels.triton import FIXED_ORDER
from penstock.kernels.triton.attention_plan import FixedPlan, Tiles, TritonAttentionPlan, make_plan
from penstock.kernels.triton.attention_shapes import AttentionShape, ScoreChanges, shape_of
from penstock.kernels.triton.cache import Layout, refuse
from penstock.kernels.triton.numbers import dot, inlined, narrow, operand

__all__ = ["key_scores", "paged_attention", "plan_attention", "refuse", "variants"]

LOG2_E = tl.constexpr(1.4426950408889634)
NOWHERE = tl.constexpr(1 << 30)
JOINED = 32  # parts of a context that the joining program reads at a time
AHEAD = 8  # the same where it merges them one after the other


@inlined
def _load(
    start, inside, FIRST: tl.constexpr, BLOCK: tl.constexpr, END: tl.constexpr, ALL: tl.constexpr, TYPE: tl.constexpr
):
    """Elements FIRST … FIRST + BLOCK - 1 of vectors that begin at `start` [n, 1]; 0 from END on, or not `inside`."""
    column = FIRST + tl.arange(0, BLOCK)[None, :]
    if FIRST + BLOCK > END:
        x = tl.load(start + column, mask=inside[:, None] & (column < END), other=0.0)
    elif ALL:
        x = tl.load(start + column)
    else:
        x = tl.load(start + column, mask=inside[:, None], other=0.0)
    return operand(x, TYPE)


@inlined
def _block(n, keys, inside, table, page, C: tl.constexpr, ALL: tl.constexpr):
    """Where the blocks of positions `keys` [n, …] begin: [n], or one number if they lie in one block."""
    if C.BLOCK_SIZE % C.BLOCK_N == 0:
        block = tl.load(table + n // C.BLOCK_SIZE)
    elif ALL:
        block = tl.load(table + keys // C.BLOCK_SIZE)
    else:
        block = tl.load(table + keys // C.BLOCK_SIZE, mask=inside, other=0)
    return block.to(tl.int64)


@inlined
def _scores(s, keys, low, end, place, scale, cap, slope, C: tl.constexpr, ALL: tl.constexpr):
    """Products [m, n] as they enter the softmax, where `scale` is left for later if nothing but it changes them.

    Keys that a query does not see have -inf.
    """
    if C.CAPS:
        s = cap - 2.0 * cap / (1.0 + tl.exp2(s * (2.0 * LOG2_E * scale / cap)))  # cap · tanh(s · scale / cap)
    if C.SLOPES:
        if not C.CAPS:
            s = s * scale
        s += slope[:, None] * (keys[None, :] - place[:, None]).to(tl.float32)
    if not ALL:
        s = tl.where((keys[None, :] >= low[:, None]) & (keys[None, :] < end[:, None]), s, float("-inf"))
    return s


@inlined
def _walk(
    total, rest, top, mass, begin, stop, first, last, q, q_rest, low, end, place, slope, table, key, key_scale,
    key_page, value, value_scale, value_page, scale, cap, C: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Takes keys [begin, stop), a tile at a time; with ALL every query sees all of them, else those in [first, last)

    may be seen and no others are read. `top` is the largest score in units of log 2, `mass` the weights' sum.
    """
    M: tl.constexpr = C.BLOCK_M
    N: tl.constexpr = C.BLOCK_N
    factor = LOG2_E if C.CAPS or C.SLOPES else scale * LOG2_E
    for n in range(begin, stop, C.BLOCK_N):
        keys = n + tl.arange(0, C.BLOCK_N)
        inside = (keys >= first) & (keys < last)
        block = _block(n, keys, inside, table, key_page, C, ALL)
        token = keys % C.BLOCK_SIZE
        start = key + (block * key_page + token * C.DIM)[:, None]
        k = _load(start, inside, 0, C.K0, C.K_CUT, ALL, C.TYPE)
        s = dot(q, tl.trans(k), tl.zeros([M, N], tl.float32))
        if C.K1 > 0:
            s = dot(q_rest, tl.trans(_load(start, inside, C.K_CUT, C.K1, C.DIM, ALL, C.TYPE)), s)
        if C.SCALED:
            s = s * tl.load(key_scale + block * (key_page // 4) + token, mask=inside, other=0.0)[None, :]
        s = _scores(s, keys, low, end, place, scale, cap, slope, C, ALL)
        higher = tl.maximum(top, tl.max(s, axis=1) * factor)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s * factor - base[:, None])
        shrink = tl.exp2(top - base)
        mass = mass * shrink + tl.sum(p, axis=1)
        top = higher
        start = value + (block * value_page + token * C.VALUE_DIM)[:, None]
        if C.SCALED:
            p = p * tl.load(value_scale + block * (value_page // 4) + token, mask=inside, other=0.0)[None, :]
        p = operand(p, C.TYPE)
        if C.LATENT:
            total = dot(p, k, total * shrink[:, None])
        else:
            total = dot(p, _load(start, inside, 0, C.V0, C.V_CUT, ALL, C.TYPE), total * shrink[:, None])
        if C.V1 > 0:
            v = _load(start, inside, C.V_CUT, C.V1, C.VALUE_DIM, ALL, C.TYPE)
            rest = dot(p, v, rest * shrink[:, None])
    return total, rest, top, mass


@inlined
def _bounds(seen, token, place, valid, window, C: tl.constexpr):
    """First position and end of what each query [m] sees; of rows that are no queries, nothing."""
    if C.SEEN:
        low = tl.load(seen + 2 * token, mask=valid, other=0)
        end = tl.load(seen + 2 * token + 1, mask=valid, other=0)
    else:
        end = place + 1
        low = tl.zeros_like(place)
        if C.WINDOW == 1:
            low = tl.maximum(end - window, 0)
        if C.WINDOW == 2:
            low = place - place % window
    return tl.where(valid, low, NOWHERE), tl.where(valid, end, 0)


@inlined
def _sections(low, end, valid, part_begin, part_end, C: tl.constexpr):
    """What of a part of the context the tile sees, [first, last), and where all its queries see all keys, [a, b).

    a and b are multiples of BLOCK_N; where there is no such section both are the multiple at or below `first`.
    """
    first = tl.maximum(tl.min(low, axis=0), part_begin)
    last = tl.minimum(tl.max(end, axis=0), part_end)
    all_from = tl.maximum(tl.max(tl.where(valid, low, 0), axis=0), part_begin)
    all_to = tl.minimum(tl.min(tl.where(valid, end, NOWHERE), axis=0), part_end)
    a = (all_from + C.BLOCK_N - 1) // C.BLOCK_N * C.BLOCK_N
    b = all_to // C.BLOCK_N * C.BLOCK_N
    start = first // C.BLOCK_N * C.BLOCK_N
    return first, last, start, tl.where(a < b, a, start), tl.where(a < b, b, start)


@inlined
def _merged(top, mass, more_top, more_mass):
    """Two parts as one: its (top, mass), and what sums of the first and of the second are multiplied with."""
    higher = tl.maximum(top, more_top)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    own, other = tl.exp2(top - base), tl.exp2(more_top - base)
    return higher, tl.fma(mass, own, more_mass * other), own, other


@inlined
def _finish(total, rest, top, mass, sink, out, valid, C: tl.constexpr):
    """Writes attended values [m, Dv] of heads that begin at `out` [m]."""
    if C.SINKS:
        top, mass, shrink, _ = _merged(top, mass, sink * LOG2_E, tl.full(mass.shape, 1.0, tl.float32))
        total, rest = total * shrink[:, None], rest * shrink[:, None]
    mass = tl.where(mass == 0.0, 1.0, mass)[:, None]
    column = tl.arange(0, C.V0)[None, :]
    value = narrow(total / mass, out.dtype.element_ty)
    tl.store(out[:, None] + column, value, mask=valid[:, None] & (column < C.V_CUT))
    if C.V1 > 0:
        column = C.V_CUT + tl.arange(0, C.V1)[None, :]
        value = narrow(rest / mass, out.dtype.element_ty)
        tl.store(out[:, None] + column, value, mask=valid[:, None] & (column < C.VALUE_DIM))


@inlined
def _finish_whole(total, top, mass, sink, out, C: tl.constexpr, WIDTH: tl.constexpr):
    """As `_finish`, of values [m, WIDTH] in one piece."""
    if C.SINKS:
        top, mass, shrink, _ = _merged(top, mass, sink * LOG2_E, tl.full(mass.shape, 1.0, tl.float32))
        total = total * shrink[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    value = narrow(total / tl.where(mass == 0.0, 1.0, mass)[:, None], out.dtype.element_ty)
    tl.store(out[:, None] + column, value, mask=column < C.VALUE_DIM)


@inlined
def _keep(total, rest, top, mass, sums, stats, member, valid, C: tl.constexpr):
    """Keeps a part's sums [m, Dv] and its (top, mass), for `_join`."""
    column = tl.arange(0, C.V0)[None, :]
    at = sums + member[:, None] * C.VALUE_DIM
    tl.store(at + column, total, mask=valid[:, None] & (column < C.V_CUT))
    if C.V1 > 0:
        column = C.V_CUT + tl.arange(0, C.V1)[None, :]
        tl.store(at + column, rest, mask=valid[:, None] & (column < C.VALUE_DIM))
    tl.store(stats + 2 * member, top, mask=valid)
    tl.store(stats + 2 * member + 1, mass, mask=valid)


@inlined
def _add_kept(total, rest, top, mass, sums, stats, member, valid, C: tl.constexpr):
    """A part's sums, merged into those that `_keep` has kept."""
    kept_top = tl.load(stats + 2 * member, mask=valid, other=float("-inf"))
    kept_mass = tl.load(stats + 2 * member + 1, mask=valid, other=0.0)
    top, mass, own, other = _merged(kept_top, kept_mass, top, mass)
    own, other = own[:, None], other[:, None]
    column = tl.arange(0, C.V0)[None, :]
    at = sums + member[:, None] * C.VALUE_DIM
    kept = tl.load(at + column, mask=valid[:, None] & (column < C.V_CUT), other=0.0)
    total = tl.fma(kept, tl.broadcast_to(own, kept.shape), total * other)
    if C.V1 > 0:
        column = C.V_CUT + tl.arange(0, C.V1)[None, :]
        kept = tl.load(at + column, mask=valid[:, None] & (column < C.VALUE_DIM), other=0.0)
        rest = tl.fma(kept, tl.broadcast_to(own, kept.shape), rest * other)
    return total, rest, top, mass


@inlined
def _merge(
    total, rest, top, mass, sink, out, sums, stats, heads, member, valid, part, first, last, C: tl.constexpr
):  # fmt: skip
    """A part's sums, merged with those of the parts from `first` on; behind the last they go to `out`."""
    at = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + heads) * C.QUERIES * C.TILE_HEADS
    sums, stats = sums + at * C.VALUE_DIM, stats + 2 * at
    if part > first:
        total, rest, top, mass = _add_kept(total, rest, top, mass, sums, stats, member, valid, C)
        tl.debug_barrier()  # threads that share a row have all read what one of them will write
    if part < last - 1:
        _keep(total, rest, top, mass, sums, stats, member, valid, C)
        tl.debug_barrier()  # other threads may read what these have kept
    else:
        _finish(total, rest, top, mass, sink, out, valid, C)


@triton.jit(
    do_not_specialize=["table_width"],
    do_not_specialize_on_alignment=["units", "query_start", "context_len", "tables", "seen"],
)
def _attend(
    query, stride, out, units, query_start, context_len, tables, table_width, seen, window, key, key_scale, key_page,
    key_head, value, value_scale, value_page, value_head, scale, cap, sinks, slopes, sums, stats, C: tl.constexpr,
):  # fmt: skip
    """Programs (unit, heads): a unit is (row, its first query, first part, parts, where its sums are kept or -1)."""
    M: tl.constexpr = C.BLOCK_M
    V0: tl.constexpr = C.V0
    V1: tl.constexpr = C.V1
    unit = units + 5 * tl.program_id(0)
    row, first_query = tl.load(unit).to(tl.int64), tl.load(unit + 1)
    heads = tl.program_id(1)
    kv = heads // C.HEAD_TILES
    begin = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - begin
    member = tl.arange(0, C.BLOCK_M)
    local = first_query + member // C.TILE_HEADS
    of_group = member % C.TILE_HEADS + heads % C.HEAD_TILES * C.TILE_HEADS
    valid = (local < count) & (member < C.QUERIES * C.TILE_HEADS) & (of_group < C.GROUP)
    token = (begin + local).to(tl.int64)
    head = kv * C.GROUP + of_group
    place = tl.load(context_len + row) - count + local
    low, end = _bounds(seen, token, place, valid, window, C)
    start = query + (token * stride + head * C.DIM)[:, None]
    q = _load(start, valid, 0, C.K0, C.K_CUT, False, C.TYPE)
    q_rest = _load(start, valid, C.K_CUT, C.K1, C.DIM, False, C.TYPE) if C.K1 > 0 else q
    slope = tl.load(slopes + head, mask=valid, other=0.0) if C.SLOPES else place
    sink = tl.load(sinks + head, mask=valid, other=0.0) if C.SINKS else place
    table = tables + row * table_width
    key = key + kv * key_head
    value = value + kv * value_head
    key_scale, value_scale = key_scale + kv * (key_head // 4), value_scale + kv * (value_head // 4)
    first_part, slot = tl.load(unit + 2), tl.load(unit + 4)
    last_part = first_part + tl.load(unit + 3)
    if C.WHOLE:
        first_part = tl.minimum(tl.min(low, axis=0), tl.max(end, axis=0)) // C.PART
        last_part = tl.maximum((tl.max(end, axis=0) + C.PART - 1) // C.PART, first_part + 1)
    for part in range(first_part, last_part):
        top, mass = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
        total = tl.zeros([M, V0], tl.float32)
        rest = tl.zeros([M, V1], tl.float32) if C.V1 > 0 else total
        first, last, here, a, b = _sections(low, end, valid, part * C.PART, (part + 1) * C.PART, C)
        facts = q, q_rest, low, end, place, slope, table, key, key_scale, key_page, value, value_scale, value_page
        if C.SEEN or C.WINDOW > 0:
            total, rest, top, mass = _walk(
                total, rest, top, mass, here, a, first, last, *facts, scale, cap, C, False
            )  # fmt: skip
        total, rest, top, mass = _walk(total, rest, top, mass, a, b, first, last, *facts, scale, cap, C, True)
        total, rest, top, mass = _walk(total, rest, top, mass, b, last, first, last, *facts, scale, cap, C, False)
        target = out + (token * C.HEADS + head) * C.VALUE_DIM
        if C.WHOLE:
            _merge(
                total, rest, top, mass, sink, target, sums, stats, heads, member, valid, part, first_part, last_part, C
            )
        elif slot < 0:
            _finish(total, rest, top, mass, sink, target, valid, C)
        elif C.PART < NOWHERE:
            at = ((slot + part - first_part).to(tl.int64) * tl.num_programs(1) + heads) * C.QUERIES * C.TILE_HEADS
            _keep(total, rest, top, mass, sums + at * C.VALUE_DIM, stats + 2 * at, member, valid, C)


@triton.jit(do_not_specialize_on_alignment=["tiles", "query_start"])
def _join(out, tiles, query_start, sums, stats, sinks, C: tl.constexpr, JOINED: tl.constexpr, WIDTH: tl.constexpr):
    """Programs (tile's query, head): sums the parts of a context, weighted by what each holds of the softmax."""
    tile = tiles + 5 * (tl.program_id(0) // C.QUERIES)
    row, local = tl.load(tile).to(tl.int64), tl.load(tile + 1) + tl.program_id(0) % C.QUERIES
    begin, head = tl.load(query_start + row), tl.program_id(1)
    of_group = head % C.GROUP
    if local < tl.load(query_start + row + 1) - begin:
        heads = head // C.GROUP * C.HEAD_TILES + of_group // C.TILE_HEADS
        member = tl.program_id(0) % C.QUERIES * C.TILE_HEADS + of_group % C.TILE_HEADS
        first, slot = tl.load(tile + 2), tl.load(tile + 4).to(tl.int64)
        last = first + tl.load(tile + 3)
        here = first // JOINED * JOINED
        column = tl.arange(0, WIDTH)[None, :]
        top = tl.load(sinks + head) * LOG2_E if C.SINKS else float("-inf")
        for n in range(here, last, JOINED):
            part = n + tl.arange(0, JOINED)
            at = ((slot + part - first) * C.KV_HEADS * C.HEAD_TILES + heads) * C.QUERIES * C.TILE_HEADS + member
            inside = (part >= first) & (part < last)
            top = tl.maximum(top, tl.max(tl.load(stats + 2 * at, mask=inside, other=float("-inf")), axis=0))
        base = tl.where(top == float("-inf"), 0.0, top)
        mass = tl.exp2(tl.load(sinks + head) * LOG2_E - base) if C.SINKS else 0.0
        total = tl.zeros([WIDTH], tl.float32)
        for n in range(here, last, JOINED):
            part = n + tl.arange(0, JOINED)
            at = ((slot + part - first) * C.KV_HEADS * C.HEAD_TILES + heads) * C.QUERIES * C.TILE_HEADS + member
            inside = (part >= first) & (part < last)
            weight = tl.exp2(tl.load(stats + 2 * at, mask=inside, other=float("-inf")) - base)
            mass += tl.sum(weight * tl.load(stats + 2 * at + 1, mask=inside, other=0.0), axis=0)
            where = inside[:, None] & (column < C.VALUE_DIM)
            kept = tl.load(sums + at[:, None] * C.VALUE_DIM + column, mask=where, other=0.0)
            total += tl.sum(kept * weight[:, None], axis=0)
        value = narrow(total / tl.where(mass == 0.0, 1.0, mass), out.dtype.element_ty)
        column = tl.arange(0, WIDTH)
        at = ((begin + local).to(tl.int64) * C.HEADS + head) * C.VALUE_DIM
        tl.store(out + at + column, value, mask=column < C.VALUE_DIM)


@triton.jit(do_not_specialize_on_alignment=["tiles", "query_start"])
def _join_in_order(
    out, tiles, query_start, sums, stats, sinks, C: tl.constexpr, AHEAD: tl.constexpr, WIDTH: tl.constexpr
):
    """As `_join`, but parts are merged one after the other; AHEAD of them are read at once."""
    tile = tiles + 5 * (tl.program_id(0) // C.QUERIES)
    row, local = tl.load(tile).to(tl.int64), tl.load(tile + 1) + tl.program_id(0) % C.QUERIES
    begin, head = tl.load(query_start + row), tl.program_id(1)
    of_group = head % C.GROUP
    if local < tl.load(query_start + row + 1) - begin:
        heads = head // C.GROUP * C.HEAD_TILES + of_group // C.TILE_HEADS
        member = tl.program_id(0) % C.QUERIES * C.TILE_HEADS + of_group % C.TILE_HEADS
        first = tl.load(tile + 2)
        slot = tl.load(tile + 4).to(tl.int64)
        one = tl.arange(0, 1)
        last, column = first + tl.load(tile + 3), tl.arange(0, WIDTH)[None, :]
        top, mass = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
        total = tl.zeros([1, WIDTH], tl.float32)
        for n in range(first, last, AHEAD):
            for each in tl.static_range(AHEAD):
                part = n + each + one
                at = ((slot + part - first) * C.KV_HEADS * C.HEAD_TILES + heads) * C.QUERIES * C.TILE_HEADS + member
                more_top = tl.load(stats + 2 * at, mask=part < last, other=float("-inf"))
                more_mass = tl.load(stats + 2 * at + 1, mask=part < last, other=0.0)
                inside = (part < last)[:, None] & (column < C.VALUE_DIM)
                more = tl.load(sums + at[:, None] * C.VALUE_DIM + column, mask=inside, other=0.0)
                top, mass, own, other = _merged(top, mass, more_top, more_mass)
                total = tl.fma(total, tl.broadcast_to(own[:, None], total.shape), more * other[:, None])
        sink = tl.load(sinks + head + one) if C.SINKS else top
        place = out + ((begin + local).to(tl.int64) * C.HEADS + head) * C.VALUE_DIM + one
        _finish_whole(total, top, mass, sink, place, C, WIDTH)


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
) -> TritonAttentionPlan:
    return make_plan(query_start, context_len, block_table, query_lens, context_lens, window, masks, spans, chunked)


def paged_attention(
    query: Tensor,
    cache: KvTensors,
    plan: TritonAttentionPlan | FixedPlan,
    scale: float,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
    slopes: Tensor | None = None,
    *,
    fixed: bool = False,
) -> Tensor:
    """As kernels.api.PagedAttention; `fixed`: nor do results depend on how many queries a row has."""
    query = query.flatten(1)
    query = query if query.stride(1) == 1 else query.contiguous()
    layout: Layout = cache.layout
    heads = query.shape[1] // layout.key_dim
    out = torch.empty(len(query), heads * layout.value_dim, dtype=query.dtype, device=query.device)
    changes = ScoreChanges(sinks is not None, soft_cap is not None, slopes is not None)
    for queries in plan.classes:
        shape = shape_of(queries, heads, layout, query.dtype, cache.latent, plan.kind, changes, fixed)
        programs = shape.KV_HEADS * shape.HEAD_TILES
        tiles = plan.tiles(queries, shape.QUERIES, shape.PART, programs, shape.waves)
        _run(query, out, layout, plan, tiles, shape, programs, scale, soft_cap or 1.0, sinks, slopes)
    return out


def _run(
    query: Tensor, out: Tensor, layout: Layout, plan: TritonAttentionPlan | FixedPlan, tiles: Tiles,
    shape: AttentionShape, programs: int, scale: float, soft_cap: float, sinks: Tensor | None, slopes: Tensor | None,
) -> None:  # fmt: skip
    """Attends with the tiles of one class of rows."""
    key, value = layout.key, layout.value
    slots = len(tiles.units) if shape.WHOLE else tiles.slots
    held = slots * programs * shape.QUERIES * shape.TILE_HEADS
    sums = torch.empty(held * layout.value_dim, dtype=torch.float32, device=query.device)
    stats = torch.empty(2 * held, dtype=torch.float32, device=query.device)
    sinks, slopes = stats if sinks is None else sinks, stats if slopes is None else slopes
    seen = plan.context_len if plan.seen is None else plan.seen
    _attend[(len(tiles.units), programs)](
        query, query.stride(0), out, tiles.units, plan.query_start, plan.context_len, plan.block_table,
        plan.block_table.stride(0), seen, plan.window or 0, key.data, key.scale, key.page, key.head, value.data,
        value.scale, value.page, value.head, scale, soft_cap, sinks, slopes, sums, stats, shape,
        num_warps=shape.WARPS, num_stages=shape.STAGES, enable_fp_fusion=True,
    )  # fmt: skip
    if tiles.split is not None:
        width = triton.next_power_of_2(layout.value_dim)
        join, at_once = (_join_in_order, AHEAD) if shape.FIXED else (_join, max(1, JOINED * 128 // width))
        join[(len(tiles.split) * shape.QUERIES, shape.HEADS)](
            out, tiles.split, plan.query_start, sums, stats, sinks, shape, at_once, width
        )


def key_scores(
    query: Tensor,
    cache: KvTensors,
    plan: TritonAttentionPlan,
    queries: int,
    scale: float,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """As kernels.api.KeyScores, by torch: it is asked for once a prompt, not in every step."""
    layout: Layout = cache.layout
    part, size = layout.key, layout.block_size
    lens, contexts = plan.lens.tolist(), plan.contexts.tolist()
    seen = plan.seen
    if seen is None:
        seen = visible(lens, contexts, plan.window or None, (), None, plan.kind[0] == 2)
    places = (len(cache.key), layout.heads, size)
    stored = part.data.as_strided((*places, part.dim), (part.page, part.head, part.dim, 1))
    scales = part.scale.as_strided(places, (part.page // 4, part.head // 4, 1)) if layout.scaled else None

    def keys(blocks: Tensor, count: int) -> Tensor:
        chosen = blocks[: -(-count // size)]
        found = stored[chosen].float()
        if scales is not None:
            found = found * scales[chosen].unsqueeze(-1)
        return found.transpose(1, 2).flatten(0, 1)[:count]

    given = query.reshape(len(query), -1, layout.key_dim)
    rows = SeenRows(lens, contexts, plan.block_table, seen.long())
    return summed_weights(given, rows, keys, queries, Scoring(scale, sinks, soft_cap, slopes))


def variants(name: str) -> tuple[Implementation, ...]:
    """The one for which a token is the same in any chunk."""
    run = partial(paged_attention, fixed=True)
    return (Implementation("paged_attention", f"{name}, {FIXED_ORDER}", run, _unless_fixed),)


def _unless_fixed(context: KernelContext) -> str | None:
    return refuse(context) if context.batch_invariant else "chunks of other lengths may round differently"
