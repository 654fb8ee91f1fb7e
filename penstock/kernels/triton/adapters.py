"""Low-rank adapters (LoRA), others for each token: rows sorted by slot and expert, then two tiled products."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.adapters import Adapted, AdapterSlots, LowRank, PlacedAdapters, RowAdapters, rows_of
from penstock.kernels.registry import KernelContext
from penstock.kernels.triton.packing import HOME
from penstock.kernels.triton.products import GroupedRows, multiply
from penstock.kernels.triton.sorting import sorted_rows

_STEP = 16  # ranks are filled up to a multiple of it


def refuse(_: KernelContext) -> str | None:
    return None


class DeviceAdapters(AdapterSlots):
    """Adapters of a projection as two stacks of the slots' matrices, as wide as the largest rank among them.

    Attributes:
        down: [slots · E · rank, K].
        up: [slots · E · M, rank], times the adapters' scales.
        used: [slots] int64, each slot's own number where it is filled, else -1.
        columns: [slots · E, M] float32, factors of columns; None while no adapter has any.
    """

    def __init__(self, slots: int, inputs: int, outputs: int, max_rank: int = 256, experts: int = 1) -> None:
        super().__init__(slots, inputs, outputs, max_rank, experts)
        self.down = torch.empty(0, inputs, device=HOME)
        self.up = torch.empty(0, 0, device=HOME)
        self.used = torch.full((slots,), -1, dtype=torch.int64, device=HOME)
        self.columns: Tensor | None = None

    @property
    def filled(self) -> bool:
        return any(entry is not None for entry in self.entries)

    def in_type(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Both stacks in the type of activations, which they keep."""
        if self.down.dtype != dtype:
            self.down, self.up = self.down.to(dtype), self.up.to(dtype)
        return self.down, self.up

    def _set(self, slot: int, entry: LowRank | None) -> None:
        super()._set(slot, entry)
        self.used[slot] = -1 if entry is None else slot
        if self.columns is not None:
            self.columns.view(len(self.entries), -1)[slot] = 1.0
        if entry is None:
            return
        if entry.columns is not None:
            if self.columns is None:
                self.columns = torch.ones(len(self.entries) * self.experts, self.outputs, device=HOME)
            self.columns.view(len(self.entries), -1)[slot] = entry.columns.reshape(-1).to(HOME)
        own = entry.down.shape[-2]
        rank = -(-own // _STEP) * _STEP
        if rank > self.up.shape[1]:
            self._widen(rank)
        down, up = self._slot(slot)
        down.zero_()[:, :own] = entry.down.view(self.experts, own, -1)
        change = entry.up.view(self.experts, own, -1).transpose(1, 2)
        up.zero_()[..., :own] = change.to(HOME, torch.float32) * entry.scale

    def _slot(self, slot: int) -> tuple[Tensor, Tensor]:
        count, experts = len(self.entries), self.experts
        down = self.down.view(count, experts, -1, self.inputs)
        return down[slot], self.up.view(count, experts, self.outputs, -1)[slot]

    def _widen(self, rank: int) -> None:
        """Gives all slots that rank, and keeps what they hold."""
        count, old = len(self.entries) * self.experts, self.up.shape[1]
        down = torch.zeros(count, rank, self.inputs, dtype=self.down.dtype, device=HOME)
        up = torch.zeros(count, self.outputs, rank, dtype=self.down.dtype, device=HOME)
        if old:
            down[:, :old], up[:, :, :old] = self.down.view(count, old, -1), self.up.view(count, self.outputs, old)
        self.down, self.up = down.view(count * rank, self.inputs), up.view(count * self.outputs, rank)


def make_adapters(slots: int, inputs: int, outputs: int, max_rank: int = 256, experts: int = 1) -> DeviceAdapters:
    """As kernels.api.MakeAdapters."""
    return DeviceAdapters(slots, inputs, outputs, max_rank, experts)


def change(
    x: Tensor, out: Tensor, parts: tuple[PlacedAdapters, ...], rows: RowAdapters, known: Tensor | None = None,
    share: int = 1,
) -> None:  # fmt: skip
    """out [R, N] in place; row r of it comes of row r // share of x. `known`: what out has besides the product."""
    x = x if x.stride(1) == 1 else x.contiguous()
    for part in parts:
        slots, columns = part.slots, slice(part.offset, part.offset + part.slots.outputs)
        assert isinstance(slots, DeviceAdapters)
        if slots.filled and len(x):
            _change(x, out[:, columns], slots, rows, None if known is None else known[..., columns], share)


def _change(
    x: Tensor, out: Tensor, adapters: DeviceAdapters, rows: RowAdapters, known: Tensor | None, share: int
) -> None:
    given = None
    if adapters.columns is not None:
        given = out.float() - (0.0 if known is None else known)  # before the first adapter changes it
    for place in range(rows.slot.shape[1]):
        number = adapters.used[rows.slot[:, place].clamp(max=len(adapters.entries) - 1)]
        if adapters.experts > 1 and rows.expert is not None:
            number = torch.where(number < 0, -1, number * adapters.experts + rows.expert)
        _add(x, out, adapters, number, rows.scale[:, place : place + 1], given, share)


def _add(
    x: Tensor, out: Tensor, adapters: DeviceAdapters, number: Tensor, scale: Tensor, given: Tensor | None, share: int
) -> None:
    """Adds what matrices [R] of the stacks, -1 for none, make of their rows."""
    down, up = adapters.in_type(x.dtype)
    count = len(adapters.entries) * adapters.experts
    chosen = sorted_rows(number.unsqueeze(1), count)
    shared = GroupedRows(chosen.rows, chosen.experts, chosen.size, chosen.count, share)
    low = torch.zeros(len(number), up.shape[1], dtype=x.dtype, device=out.device)
    multiply(x, down, low, None, None, shared, count, split=True)
    _expand((low.float() * scale).to(x.dtype), out, adapters, number, scale, given, chosen)


def _expand(
    low: Tensor, out: Tensor, adapters: DeviceAdapters, number: Tensor, scale: Tensor, given: Tensor | None,
    chosen: GroupedRows | None = None,
) -> None:  # fmt: skip
    count = len(adapters.entries) * adapters.experts
    _, up = adapters.in_type(low.dtype)
    chosen = chosen or sorted_rows(number.unsqueeze(1), count)
    if adapters.columns is None or given is None:
        multiply(low, up, out, None, out, chosen, count)
        return
    more = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    multiply(low, up, more, None, None, chosen, count)
    factor = adapters.columns[number.clamp(min=0)]
    changed = out.float() + factor * more + (factor - 1.0) * scale * given
    out.copy_(torch.where((number < 0).unsqueeze(1), out, changed.to(out.dtype)))


def table_adapter(numbers: Tensor, out: Tensor, adapters: Adapted, scale: float = 1.0) -> Tensor:
    """As kernels.api.TableAdapter."""
    rows = rows_of(adapters.tokens, out)
    for part in adapters.parts:
        slots = part.slots
        assert isinstance(slots, DeviceAdapters)
        if not slots.filled or not len(out):
            continue
        given = None if slots.columns is None else out.to(torch.float32, copy=True)
        for place in range(rows.slot.shape[1]):
            number = slots.used[rows.slot[:, place].clamp(max=len(slots.entries) - 1)]
            down, _ = slots.in_type(out.dtype)
            found = down.view(len(slots.entries), -1, slots.inputs)[number.clamp(min=0), :, numbers]
            factors = rows.scale[:, place : place + 1]
            low = (found.float() * (scale * factors)).to(out.dtype).contiguous()
            _expand(low, out, slots, number, factors, given)
    return out


def adapter(
    x: Tensor, out: Tensor, adapters: Adapted, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """As kernels.api.Adapter."""
    known = residual if bias is None else bias if residual is None else bias.float() + residual
    change(x, out, adapters.parts, rows_of(adapters.tokens, x), known)
    return out
