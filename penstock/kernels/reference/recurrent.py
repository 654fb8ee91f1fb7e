"""Reference of the recurrent ops, one token after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.cache import StateRows


@dataclass(frozen=True, slots=True)
class _Span:
    """A row's tokens `begin` … `end` - 1.

    Attributes:
        slot: where its state is read.
        fresh: whether the row starts.
        kept: where its state goes, by the token behind which it is kept.
    """

    begin: int
    end: int
    slot: int
    fresh: bool
    kept: dict[int, int]


def _spans(rows: StateRows) -> Iterator[_Span]:
    starts, lengths = rows.query_start.tolist(), rows.context_len.tolist()
    after = None if rows.after is None else rows.after.tolist()
    for row, slot in enumerate(rows.slot.tolist()):
        begin, end = starts[row], starts[row + 1]
        last = {slot: end - 1} if after is None else {after[token]: token for token in range(begin, end)}
        kept = {token: place for place, token in last.items()}
        yield _Span(begin, end, slot, lengths[row] == end - begin, kept)


def split(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    return torch.split(x, list(sizes), dim=-1)


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
    taps, channels = weight.shape
    inputs = x.float() if before is None else before.float() * x.float()
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for span in _spans(rows):
        past = torch.zeros_like(state[span.slot]) if span.fresh else state[span.slot]
        seen = torch.cat((past, inputs[span.begin : span.end]))
        total = torch.zeros(1, channels, device=x.device) if bias is None else bias.unsqueeze(0)
        for tap in range(taps):
            total = total + weight[tap] * seen[tap : tap + span.end - span.begin]
        out[span.begin : span.end] = total
        for token, place in span.kept.items():
            behind = token - span.begin + 1
            state[place] = seen[behind : behind + taps - 1]
    if activation == "silu":
        out = functional.silu(out)
    return (out if after is None else out * after.float()).to(x.dtype)


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
    tokens = x.shape[0]
    _, heads, states, size = state.shape
    each = (heads, 1, 1) if a.dim() == 1 else (1, 1, size)  # where steps differ, in a state [H, N, P]
    step = functional.softplus(dt.float() if dt_bias is None else dt.float() + dt_bias).clamp(dt_limit[0], dt_limit[1])
    decay = a.view(each) if a.dim() == 1 else a.view(1, states, size)
    inputs = x.float().reshape(tokens, heads, 1, size)
    groups = b.shape[1] // states
    read, write = (
        part.float().reshape(tokens, groups, states, 1).repeat_interleave(heads // groups, dim=1) for part in (c, b)
    )
    out = torch.empty(tokens, heads, size, device=x.device)
    for span in _spans(rows):
        if span.fresh:
            state[span.slot] = 0.0
        hidden = state[span.slot].clone()
        for t in range(span.begin, span.end):
            dts = step[t].view(each)
            hidden = hidden * (dts * decay).exp() + (dts * inputs[t]) * write[t]
            out[t] = (hidden * read[t]).sum(dim=1)
            if t in span.kept:
                state[span.kept[t]] = hidden
    if skip is not None:
        out += inputs.squeeze(2) * (skip.view(heads, 1) if a.dim() == 1 else skip.view(1, size))
    flat = out.view(tokens, heads * size)
    return (flat if gate is None else flat * functional.silu(gate.float())).to(x.dtype)


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
    tokens = q.shape[0]
    _, heads, dim, width = state.shape
    share = heads * dim // q.shape[1]
    q, k = (part.float().reshape(tokens, -1, dim) for part in (q, k))
    q, k = (part.repeat(1, share, 1) if tiled else part.repeat_interleave(share, dim=1) for part in (q, k))
    q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + eps) * dim**-0.5
    k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + eps)
    values = v.float().reshape(tokens, heads, width)
    decay = (a * functional.softplus(step.float() if bias is None else step.float() + bias)).exp()
    weight = beta.float().sigmoid()
    out = torch.empty(tokens, heads, width, device=q.device)
    for span in _spans(rows):
        if span.fresh:
            state[span.slot] = 0.0
        kept = state[span.slot].clone()
        for t in range(span.begin, span.end):
            kept = kept * decay[t].view(heads, 1, 1)
            known = (kept * k[t].unsqueeze(-1)).sum(dim=1)
            change = (values[t] - known) * weight[t].unsqueeze(-1)
            kept = kept + k[t].unsqueeze(-1) * change.unsqueeze(1)
            out[t] = (kept * q[t].unsqueeze(-1)).sum(dim=1)
            if t in span.kept:
                state[span.kept[t]] = kept
    return out.view(tokens, heads * width).to(v.dtype)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    eps: float,
    group_size: int | None = None,
    gate_first: bool = False,
    segment: int = 0,
) -> Tensor:
    value = x.float()
    factor = None if gate is None else functional.silu(gate.float())
    if factor is not None and gate_first:
        value, factor = value * factor, None
    groups = value.reshape(value.shape[0], -1, group_size or value.shape[1])
    normal = functional.rms_norm(groups, groups.shape[2:], None, eps).view(value.shape) * weight
    return (normal if factor is None else normal * factor).to(x.dtype)
