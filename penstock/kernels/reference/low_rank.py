"""Reference of low-rank adapters: of a projection, of gates before their activation, of experts and of heads."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.adapters import Adapted, AdapterSlots, LowRank, PlacedAdapters, RowAdapters, rows_of


def make_adapters(slots: int, inputs: int, outputs: int, max_rank: int = 256, experts: int = 1) -> AdapterSlots:
    return AdapterSlots(slots, inputs, outputs, max_rank, experts)


def change(x: Tensor, out: Tensor, slots: AdapterSlots, rows: RowAdapters, known: Tensor | None = None) -> None:
    """x [R, K], out [R, M] in place; `known` [R, M] or [M] is what out has besides the product."""
    given = out.float() - (0.0 if known is None else known)  # before the first adapter changes it
    expert = torch.zeros_like(rows.slot[:, 0]) if rows.expert is None or slots.experts == 1 else rows.expert
    for place in range(rows.slot.shape[1]):
        named = rows.slot[:, place]
        for index, number in set(zip(named.tolist(), expert.tolist(), strict=True)):
            entry = slots.entries[index] if index < len(slots.entries) else None
            if entry is None:
                continue
            chosen = ((named == index) & (expert == number)).nonzero().squeeze(1)
            own = entry if slots.experts == 1 else _of_expert(entry, number)
            low = functional.linear(x[chosen].float(), own.down.float()) * own.scale
            more = low @ own.up.float()
            if own.columns is not None:
                more = own.columns * more + (own.columns - 1.0) * given[chosen]
            out[chosen] += (more * rows.scale[chosen, place].unsqueeze(1)).to(out.dtype)


def table_adapter(numbers: Tensor, out: Tensor, adapters: Adapted, scale: float = 1.0) -> Tensor:
    rows, given = rows_of(adapters.tokens, out), out.to(torch.float32, copy=True)
    for part in adapters.parts:
        for place in range(rows.slot.shape[1]):
            named = rows.slot[:, place]
            for index in set(named.tolist()):
                entry = part.slots.entries[index] if index < len(part.slots.entries) else None
                if entry is None:
                    continue
                chosen = (named == index).nonzero().squeeze(1)
                low = entry.down[:, numbers[chosen]].T.float() * (scale * entry.scale)
                more = low @ entry.up.float()
                if entry.columns is not None:
                    more = entry.columns * more + (entry.columns - 1.0) * given[chosen]
                out[chosen] += (more * rows.scale[chosen, place].unsqueeze(1)).to(out.dtype)
    return out


def _of_expert(entry: LowRank, number: int) -> LowRank:
    columns = None if entry.columns is None else entry.columns[number]
    return replace(entry, down=entry.down[number], up=entry.up[number], columns=columns)


def change_parts(
    x: Tensor, out: Tensor, parts: tuple[PlacedAdapters, ...], rows: RowAdapters, known: Tensor | None = None
) -> None:
    """As `change`, for each part of a merged product."""
    for part in parts:
        columns = slice(part.offset, part.offset + part.slots.outputs)
        change(x, out[:, columns], part.slots, rows, None if known is None else known[..., columns])


def adapter(
    x: Tensor, out: Tensor, adapters: Adapted, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    known = residual if bias is None else bias if residual is None else bias + residual
    change_parts(x, out, adapters.parts, rows_of(adapters.tokens, x), known)
    return out
