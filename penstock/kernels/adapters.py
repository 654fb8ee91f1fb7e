"""The low-rank adapters of one projection, in slots that rows of a step name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.config.errors import ConfigError

ADAPTER_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class LowRank:
    """One adapter: outputs change by scale · up ᵀ · (down · x).

    Attributes:
        down: [rank, K].
        up: [rank, M].
        scale: alpha / rank, usually.
    """

    down: Tensor
    up: Tensor
    scale: float


class AdapterSlots:
    """Adapters of a projection [M, K] by slot; slot 0 is none. Changed between steps only.

    Attributes:
        entries: what lies in each slot.
        table: what a native implementation knows of them, told of every change; None for the reference.
    """

    def __init__(self, slots: int, inputs: int, outputs: int, max_rank: int = 256, table: Any = None) -> None:
        self.entries: list[LowRank | None] = [None] * slots
        self.inputs = inputs
        self.outputs = outputs
        self.max_rank = max_rank
        self.table = table

    def fill(self, slot: int, down: Tensor, up: Tensor, scale: float) -> None:
        """Puts an adapter into a slot: `down` [rank, K] and `up` [M, rank], as checkpoints have them.

        Raises:
            ConfigError: slot, shapes, rank or type are not served.
        """
        if not 1 <= slot < len(self.entries):
            raise ConfigError(f"adapter slot {slot} is not one of 1 to {len(self.entries) - 1}; start with more slots.")
        rank = down.shape[0]
        if down.shape != (rank, self.inputs) or up.shape != (self.outputs, rank):
            raise ConfigError(
                f"an adapter has tensors of {tuple(down.shape)} and {tuple(up.shape)}, but the projection needs (rank, "
                f"{self.inputs}) and ({self.outputs}, rank); take an adapter that was made for this model."
            )
        if rank > self.max_rank:
            raise ConfigError(f"an adapter has rank {rank}; at most {self.max_rank} is served, start with more.")
        if down.dtype != up.dtype or down.dtype not in ADAPTER_TYPES:
            raise ConfigError(
                f"an adapter has tensors of {down.dtype} and {up.dtype}; allowed is one of float32, bfloat16, float16."
            )
        self._set(slot, LowRank(down.contiguous(), up.t().contiguous(), scale))

    def clear(self, slot: int) -> None:
        """Empties a slot."""
        self._set(slot, None)

    def _set(self, slot: int, entry: LowRank | None) -> None:
        if self.table is not None:
            if entry is None:
                self.table.set(slot, 0, 0, 0, 0.0, "float32")
            else:
                kind = str(entry.down.dtype).removeprefix("torch.")
                self.table.set(slot, entry.down.data_ptr(), entry.up.data_ptr(), entry.down.shape[0], entry.scale, kind)
        self.entries[slot] = entry
