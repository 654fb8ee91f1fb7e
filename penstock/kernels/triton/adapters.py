"""Low-rank adapters (LoRA), a different one a row: tokens sorted by slot, then two tiled products."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.adapters import AdapterSlots, LowRank
from penstock.kernels.registry import KernelContext
from penstock.kernels.triton.experts import sorted_rows
from penstock.kernels.triton.packing import HOME
from penstock.kernels.triton.products import GroupedRows, multiply

_STEP = 16  # ranks are filled up to a multiple of it


def refuse(_: KernelContext) -> str | None:
    return None


class DeviceAdapters(AdapterSlots):
    """Adapters of a projection as two stacks of the slots' matrices, as wide as the largest rank among them.

    Attributes:
        down: [slots · rank, K].
        up: [slots · M, rank], times the adapters' scales.
        used: [slots] int64, each slot's own number where it is filled, else -1.
    """

    def __init__(self, slots: int, inputs: int, outputs: int, max_rank: int = 256) -> None:
        super().__init__(slots, inputs, outputs, max_rank)
        self.down = torch.empty(0, inputs, device=HOME)
        self.up = torch.empty(0, 0, device=HOME)
        self.used = torch.full((slots,), -1, dtype=torch.int64, device=HOME)

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
        if entry is None:
            return
        rank = -(-entry.down.shape[0] // _STEP) * _STEP
        if rank > self.up.shape[1]:
            self._widen(rank)
        down, up = self._slot(slot)
        down.zero_()[: entry.down.shape[0]] = entry.down
        up.zero_()[:, : entry.down.shape[0]] = entry.up.t().to(HOME, torch.float32) * entry.scale

    def _slot(self, slot: int) -> tuple[Tensor, Tensor]:
        count = len(self.entries)
        return self.down.view(count, -1, self.inputs)[slot], self.up.view(count, self.outputs, -1)[slot]

    def _widen(self, rank: int) -> None:
        """Gives all slots that rank, and keeps what they hold."""
        count, old = len(self.entries), self.up.shape[1]
        down = torch.zeros(count, rank, self.inputs, dtype=self.down.dtype, device=HOME)
        up = torch.zeros(count, self.outputs, rank, dtype=self.down.dtype, device=HOME)
        if old:
            down[:, :old], up[:, :, :old] = self.down.view(count, old, -1), self.up.view(count, self.outputs, old)
        self.down, self.up = down.view(count * rank, self.inputs), up.view(count * self.outputs, rank)


def make_adapters(slots: int, inputs: int, outputs: int, max_rank: int = 256) -> DeviceAdapters:
    """As kernels.api.MakeAdapters."""
    return DeviceAdapters(slots, inputs, outputs, max_rank)


def adapter(
    x: Tensor,
    out: Tensor,
    adapters: DeviceAdapters,
    slot: Tensor,
    query_start: Tensor,
    offset: int = 0,
    rows: Tensor | None = None,
) -> Tensor:
    """As kernels.api.Adapter."""
    if not adapters.filled or not len(x):
        return out
    down, up = adapters.in_type(x.dtype)
    count = len(adapters.entries)
    token = torch.arange(len(x), device=x.device) if rows is None else rows
    row = torch.searchsorted(query_start[1:].long(), token, right=True)
    named = slot[row.clamp(max=len(slot) - 1)].clamp(max=count - 1)
    chosen = sorted_rows(torch.where(row < len(slot), adapters.used[named], -1).unsqueeze(1), count)
    low = torch.empty(len(x), up.shape[1], dtype=x.dtype, device=x.device)
    multiply(x if x.stride(1) == 1 else x.contiguous(), down, low, None, None, chosen, count, split=True)
    part = out[:, offset : offset + adapters.outputs]
    multiply(low, up, part, None, part, GroupedRows(chosen.rows, chosen.experts, chosen.size, chosen.count, 1), count)
    return out
