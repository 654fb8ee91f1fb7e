"""Recurrent ops: one token after the other, heads and channels side by side, so that any cut of a row gives its bits.

A chunked form (Dao & Gu 2024, arXiv:2405.21060, section 6; Yang et al. 2024, arXiv:2412.06464) would sum in another
order where a step ends inside a chunk, of which only the state is kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.cache import StateRows
from penstock.kernels.registry import KernelContext
from penstock.kernels.triton.numbers import inlined, narrow, wide

_TOKENS, _CHANNELS = 16, 128  # of a tile of a convolution
_ELEMENTS = 1024  # of a state that a warp holds
_ROWS = ["query_start", "context_len", "slots", "places"]


def refuse(_: KernelContext) -> str | None:
    return None


@inlined
def _softplus(x):
    """ln(1 + eˣ), exact in proportion however small: log(u) · y / (u - 1) with u = 1 + y (Goldberg 1991, theorem 4)."""
    y = tl.exp(-tl.abs(x))
    u = 1.0 + y
    small = tl.where(u == 1.0, y, tl.log(u) * (y / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 0.0, x, 0.0) + small


@inlined
def _row_of(token, query_start, rows, levels):
    """The row of each token: the last that begins at or before it; 2^levels > rows."""
    row = tl.zeros_like(token)
    for level in range(levels):
        further = row + (1 << (levels - 1 - level))
        begin = tl.load(query_start + further, mask=further < rows, other=0)
        row = tl.where((further < rows) & (begin <= token), further, row)
    return row


@inlined
def _seen(x, before, token, channel, inside, x_stride, before_stride, BEFORE: tl.constexpr):
    """What a convolution reads of a step's tokens, float32."""
    value = wide(tl.load(x + token * x_stride + channel, mask=inside, other=0.0))
    if BEFORE:
        value *= wide(tl.load(before + token * before_stride + channel, mask=inside, other=0.0))
    return value


@triton.jit(do_not_specialize=["tokens", "rows", "levels"], do_not_specialize_on_alignment=_ROWS)
def _convolve(
    x, before, after, weight, bias, state, out, query_start, context_len, slots, tokens, rows, levels, x_stride,
    before_stride, after_stride, channels, TAPS: tl.constexpr, BIASED: tl.constexpr, SILU: tl.constexpr,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    here, there = token < tokens, channel < channels
    row = _row_of(token, query_start, rows, levels)
    begin = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - begin
    old = here & (tl.load(context_len + row) > count)
    place = token - begin
    first = tl.load(slots + row).to(tl.int64) * (TAPS - 1) + place
    at = token.to(tl.int64)[:, None]
    total = tl.zeros((BT, BC), tl.float32)
    if BIASED:
        total += tl.load(bias + channel, mask=there, other=0.0)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        own = here & (place >= back)
        value = _seen(x, before, at - back, channel, own[:, None] & there, x_stride, before_stride, BEFORE)
        kept = (old & (place < back))[:, None] & there
        value += tl.load(state + (first + tap)[:, None] * channels + channel, mask=kept, other=0.0)  # one of both is 0
        total += tl.load(weight + tap * channels + channel, mask=there, other=0.0) * value
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    inside = here[:, None] & there
    if AFTER:
        total *= wide(tl.load(after + at * after_stride + channel, mask=inside, other=0.0))
    tl.store(out + at * channels + channel, narrow(total, out.dtype.element_ty), mask=inside)


@inlined
def _stays(places, token, end):
    """Whether the state behind a token stays in the slot where it goes: the row's next token has another."""
    following = tl.minimum(token + 1, end - 1)
    return (following == token) | (tl.load(places + following) != tl.load(places + token))


@triton.jit(do_not_specialize=["rows", "levels"], do_not_specialize_on_alignment=_ROWS)
def _keep_last(
    x, before, state, query_start, context_len, slots, places, rows, levels, x_stride, before_stride, channels,
    TAPS: tl.constexpr, BEFORE: tl.constexpr, PLACED: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Programs (row, channels): the row's last inputs, some of them perhaps older than the step.

    PLACED: programs (token, channels), of which those behind which a state stays keep the last inputs up to there.
    """
    row = tl.program_id(0)
    if PLACED:
        row = _row_of(row, query_start, rows, levels)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    there = channel < channels
    begin = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - begin
    old = tl.where(tl.load(context_len + row) > count, channels, 0)  # channels that held something
    slot = state + tl.load(slots + row).to(tl.int64) * (TAPS - 1) * channels
    target = slot
    if PLACED:
        target = state + tl.load(places + tl.program_id(0)).to(tl.int64) * (TAPS - 1) * channels
        stays = _stays(places, tl.program_id(0), begin + count)
        count = tl.where(stays, tl.program_id(0) + 1 - begin, 0)
    if count > 0:
        for entry in tl.static_range(TAPS - 1):
            own = channel < tl.where(count + entry < TAPS - 1, 0, channels)
            token = (begin + count + entry - (TAPS - 1)).to(tl.int64)
            value = _seen(x, before, token, channel, own, x_stride, before_stride, BEFORE)
            kept = channel < tl.where(count + entry < TAPS - 1, old, 0)
            value += tl.load(slot + (count + entry) * channels + channel, mask=kept, other=0.0)
            tl.store(target + entry * channels + channel, value, mask=there)


def _places(rows: StateRows) -> Tensor:
    """Where states go after each token; where that is not told any tensor."""
    return rows.slot if rows.after is None else rows.after


def _side_by_side(part: Tensor | None, instead: Tensor) -> Tensor:
    """A part whose rows lie in one piece each; where there is none any tensor."""
    if part is None:
        return instead
    return part if part.stride(1) == 1 else part.contiguous()


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    rows: StateRows,
    activation: str | None = None,
    before: Tensor | None = None,
    after: Tensor | None = None,
) -> Tensor:
    """As kernels.api.ShortConv."""
    (tokens, channels) = x.shape
    taps = len(weight)
    count = len(rows.slot)
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    x = _side_by_side(x, x)
    first, last = _side_by_side(before, x), _side_by_side(after, x)
    blocks = triton.cdiv(channels, _CHANNELS)
    _convolve[triton.cdiv(tokens, _TOKENS), blocks](
        x, first, last, weight, x if bias is None else bias, state, out, rows.query_start, rows.context_len, rows.slot,
        tokens, count, count.bit_length(),
        x.stride(0), first.stride(0), last.stride(0), channels, taps, bias is not None, activation == "silu",
        before is not None, after is not None, _TOKENS, _CHANNELS,
    )  # fmt: skip
    placed = rows.after is not None
    _keep_last[tokens if placed else count, blocks](
        x, first, state, rows.query_start, rows.context_len, rows.slot, _places(rows), count, count.bit_length(),
        x.stride(0), first.stride(0), channels, taps, before is not None, placed, _CHANNELS, num_warps=1,
    )  # fmt: skip
    return out


@inlined
def _step_inputs(
    token, head, n, p, x, dt, b, c, bias, x_stride, dt_stride, b_stride, c_stride, low, high, SIZE: tl.constexpr,
    STATES: tl.constexpr, SHARE: tl.constexpr, CHANNELS: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """x [BP], its step [BP] or one number, b and c [BN] of a token."""
    token = tl.cast(token, tl.int64)
    of_group = head // SHARE * STATES + n
    value = wide(tl.load(x + token * x_stride + head * SIZE + p, mask=p < SIZE, other=0.0))
    if CHANNELS:
        step = wide(tl.load(dt + token * dt_stride + p, mask=p < SIZE, other=0.0))
        if BIASED:
            step += tl.load(bias + p, mask=p < SIZE, other=0.0)
    else:
        step = wide(tl.load(dt + token * dt_stride + head))
        if BIASED:
            step += tl.load(bias + head)
    step = _softplus(step)
    step = tl.where(step < low, low, tl.where(step > high, high, step))  # what is no number stays none
    write = wide(tl.load(b + token * b_stride + of_group, mask=n < STATES, other=0.0))
    read = wide(tl.load(c + token * c_stride + of_group, mask=n < STATES, other=0.0))
    return value, step, write, read


@triton.jit(do_not_specialize_on_alignment=_ROWS)
def _scan(
    x, dt, a, b, c, skip, gate, bias, state, out, query_start, context_len, slots, places, x_stride, dt_stride,
    b_stride, c_stride, gate_stride, low, high, HEADS: tl.constexpr, SIZE: tl.constexpr, STATES: tl.constexpr,
    SHARE: tl.constexpr, CHANNELS: tl.constexpr, BIASED: tl.constexpr, SKIPS: tl.constexpr, GATED: tl.constexpr,
    PLACED: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Programs (row, head, elements of it): all tokens of a row; the next one's inputs are read ahead."""
    row, head = tl.program_id(0), tl.program_id(1)
    n, p = tl.arange(0, BN), tl.program_id(2) * BP + tl.arange(0, BP)
    begin, end = tl.load(query_start + row), tl.load(query_start + row + 1)
    inside = (n < STATES)[:, None] & (p < SIZE)[None, :]
    place = n[:, None] * SIZE + p[None, :]
    pool = state + head * (STATES * SIZE) + place
    at = pool + tl.load(slots + row).to(tl.int64) * (HEADS * STATES * SIZE)
    held = tl.where(tl.load(context_len + row) > end - begin, STATES, 0)
    hidden = tl.load(at, mask=inside & (n < held)[:, None], other=0.0)
    rate = tl.load(a + place, mask=inside, other=0.0) if CHANNELS else tl.load(a + head)
    if SKIPS:
        through = tl.load(skip + p, mask=p < SIZE, other=0.0) if CHANNELS else tl.load(skip + head)
    if begin < end:
        facts = x, dt, b, c, bias, x_stride, dt_stride, b_stride, c_stride, low, high
        value, step, write, read = _step_inputs(begin, head, n, p, *facts, SIZE, STATES, SHARE, CHANNELS, BIASED)
        for token in range(begin, end):
            following = tl.minimum(token + 1, end - 1)
            further = _step_inputs(following, head, n, p, *facts, SIZE, STATES, SHARE, CHANNELS, BIASED)
            decay = tl.exp(step[None, :] * rate) if CHANNELS else tl.exp(step * rate)
            hidden = hidden * decay + write[:, None] * (step * value)[None, :]
            mixed = tl.sum(hidden * read[:, None], axis=0)
            if SKIPS:
                mixed += value * through
            where = tl.cast(token, tl.int64)
            if GATED:
                weighing = wide(tl.load(gate + where * gate_stride + head * SIZE + p, mask=p < SIZE, other=0.0))
                mixed *= weighing / (1.0 + tl.exp(-weighing))
            mixed = narrow(mixed, out.dtype.element_ty)
            tl.store(out + where * (HEADS * SIZE) + head * SIZE + p, mixed, mask=p < SIZE)
            if PLACED:
                target = pool + tl.load(places + token).to(tl.int64) * (HEADS * STATES * SIZE)
                lines = tl.where(_stays(places, token, end), STATES, 0)
                tl.store(target, hidden, mask=inside & (n < lines)[:, None])
            value, step, write, read = further
        if not PLACED:
            tl.store(at, hidden, mask=inside)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    rows: StateRows,
    dt_bias: Tensor | None = None,
    skip: Tensor | None = None,
    gate: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """As kernels.api.SelectiveScan."""
    _, heads, states, size = state.shape
    out = torch.empty(len(x), heads * size, dtype=x.dtype, device=x.device)
    if not len(x):
        return out
    x, dt = _side_by_side(x, x), _side_by_side(dt, x)
    b, c = _side_by_side(b, x), _side_by_side(c, x)
    weighing, bn = _side_by_side(gate, x), max(2, triton.next_power_of_2(states))
    bp = min(triton.next_power_of_2(size), max(8, _ELEMENTS // bn))
    _scan[len(rows.slot), heads, triton.cdiv(size, bp)](
        x, dt, a, b, c, a if skip is None else skip, weighing, a if dt_bias is None else dt_bias, state, out,
        rows.query_start, rows.context_len, rows.slot, _places(rows), x.stride(0), dt.stride(0), b.stride(0),
        c.stride(0), weighing.stride(0), dt_limit[0], dt_limit[1], heads, size, states,
        heads * states // b.shape[1], a.dim() == 2, dt_bias is not None, skip is not None, gate is not None,
        rows.after is not None, bn, bp, num_warps=max(1, bn * bp // 2048),
    )  # fmt: skip
    return out


@inlined
def _delta_inputs(
    token, head, d, p, q, k, v, step, beta, rate, shift, q_stride, k_stride, v_stride, step_stride, beta_stride, eps,
    KEYS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """Query and key [BD] of unit length, value [BV], what is left of the state and the weight of the change."""
    token = tl.cast(token, tl.int64)
    at = (head % KEYS if TILED else head // SHARE) * DIM + d
    query = wide(tl.load(q + token * q_stride + at, mask=d < DIM, other=0.0))
    key = wide(tl.load(k + token * k_stride + at, mask=d < DIM, other=0.0))
    value = wide(tl.load(v + token * v_stride + head * WIDTH + p, mask=p < WIDTH, other=0.0))
    query = query * tl.rsqrt(tl.sum(query * query, axis=0) + eps) * (DIM**-0.5)
    key = key * tl.rsqrt(tl.sum(key * key, axis=0) + eps)
    decay = tl.exp(rate * _softplus(wide(tl.load(step + token * step_stride + head)) + shift))
    weight = 1.0 / (1.0 + tl.exp(-wide(tl.load(beta + token * beta_stride + head))))
    return query, key, value, decay, weight


@triton.jit(do_not_specialize_on_alignment=_ROWS)
def _delta(
    q, k, v, step, beta, a, bias, state, out, query_start, context_len, slots, places, q_stride, k_stride, v_stride,
    step_stride, beta_stride, eps, HEADS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    TILED: tl.constexpr, BIASED: tl.constexpr, PLACED: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Programs (row, head, elements of its values): all tokens of a row; the next one's inputs are read ahead."""
    row, head = tl.program_id(0), tl.program_id(1)
    d, p = tl.arange(0, BD), tl.program_id(2) * BV + tl.arange(0, BV)
    begin, end = tl.load(query_start + row), tl.load(query_start + row + 1)
    inside = (d < DIM)[:, None] & (p < WIDTH)[None, :]
    pool = state + head * (DIM * WIDTH) + d[:, None] * WIDTH + p[None, :]
    at = pool + tl.load(slots + row).to(tl.int64) * (HEADS * DIM * WIDTH)
    held = tl.where(tl.load(context_len + row) > end - begin, DIM, 0)
    kept = tl.load(at, mask=inside & (d < held)[:, None], other=0.0)
    rate = tl.load(a + head)
    shift = tl.load(bias + head) if BIASED else 0.0
    if begin < end:
        facts = q, k, v, step, beta, rate, shift, q_stride, k_stride, v_stride, step_stride, beta_stride, eps
        query, key, value, decay, weight = _delta_inputs(
            begin, head, d, p, *facts, KEYS, HEADS // KEYS, DIM, WIDTH, TILED
        )
        for token in range(begin, end):
            following = tl.minimum(token + 1, end - 1)
            further = _delta_inputs(following, head, d, p, *facts, KEYS, HEADS // KEYS, DIM, WIDTH, TILED)
            kept = kept * decay
            change = (value - tl.sum(kept * key[:, None], axis=0)) * weight
            kept = kept + key[:, None] * change[None, :]
            found = narrow(tl.sum(kept * query[:, None], axis=0), out.dtype.element_ty)
            where = tl.cast(token, tl.int64) * (HEADS * WIDTH) + head * WIDTH + p
            tl.store(out + where, found, mask=p < WIDTH)
            if PLACED:
                target = pool + tl.load(places + token).to(tl.int64) * (HEADS * DIM * WIDTH)
                lines = tl.where(_stays(places, token, end), DIM, 0)
                tl.store(target, kept, mask=inside & (d < lines)[:, None])
            query, key, value, decay, weight = further
        if not PLACED:
            tl.store(at, kept, mask=inside)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Tensor,
    beta: Tensor,
    a: Tensor,
    state: Tensor,
    rows: StateRows,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    tiled: bool = False,
) -> Tensor:
    """As kernels.api.GatedDeltaRule."""
    _, heads, dim, width = state.shape
    out = torch.empty(len(v), heads * width, dtype=v.dtype, device=v.device)
    if not len(v):
        return out
    q, k = _side_by_side(q, v), _side_by_side(k, v)
    step, beta = _side_by_side(step, v), _side_by_side(beta, v)
    v = _side_by_side(v, v)
    bd = triton.next_power_of_2(dim)
    bv = min(triton.next_power_of_2(width), max(8, _ELEMENTS // bd))
    _delta[len(rows.slot), heads, triton.cdiv(width, bv)](
        q, k, v, step, beta, a, a if bias is None else bias, state, out, rows.query_start, rows.context_len, rows.slot,
        _places(rows), q.stride(0), k.stride(0), v.stride(0), step.stride(0), beta.stride(0), eps, heads,
        q.shape[1] // dim, dim, width, tiled, bias is not None, rows.after is not None, bd, bv,
        num_warps=max(1, bd * bv // 2048),
    )  # fmt: skip
    return out
