"""The low-rank adapters of one projection, in slots that tokens of a step name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.config.adapters import MOST_ADAPTERS
from penstock.config.errors import ConfigError

ADAPTER_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class LowRank:
    """One adapter: outputs change by scale · up ᵀ · (down · x), then are multiplied by `columns`.

    Attributes:
        down: [rank, K]; of experts (or heads) [E, rank, K].
        up: [rank, M]; of experts [E, rank, M].
        scale: alpha / rank, usually.
        columns: [M] float32, of experts [E, M]: factors of what weight and adapter give together, `column_factors`;
            None for none.
    """

    down: Tensor
    up: Tensor
    scale: float
    columns: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.down.nbytes + self.up.nbytes + (0 if self.columns is None else self.columns.nbytes)


def column_factors(
    weight: Iterable[Tensor], down: Tensor, up: Tensor, scale: float, magnitude: Tensor, *, looked_up: bool = False
) -> Tensor:
    """What outputs are multiplied by (DoRA, Liu et al. 2024, arXiv:2402.09353): m / ‖W + scale · B · A‖ of each, [M].

    weight W [M, K], down A [rank, K] and up B [M, rank] as in checkpoints, magnitude m [M]. Of W come some rows at a
    time; of a table that is `looked_up`, which is W's transpose, some of the table's.

    Raises:
        ValueError: W is not of that shape.
    """
    down, up = scale * down.float(), up.float()
    outputs, inputs = len(up), down.shape[1]
    shape = (inputs, outputs) if looked_up else (outputs, inputs)
    squares, end = torch.zeros(outputs), 0
    for piece in weight:
        begin, end = end, end + len(piece)
        if end > shape[0] or piece.shape[1] != shape[1]:
            raise ValueError(f"a matrix of {piece.shape[1]} columns and {end} rows or more, not of {list(shape)}")
        if looked_up:
            squares += (piece + down[:, begin:end].T @ up.T).square().sum(dim=0)
        else:
            squares[begin:end] = (piece + up[begin:end] @ down).square().sum(dim=1)
    if end != shape[0]:
        raise ValueError(f"a matrix of {end} rows, not of {list(shape)}")
    lengths = squares.sqrt()
    return torch.where(lengths > 0, magnitude.float() / lengths, 1.0)  # a row of zeros has no direction and stays so


class AdapterSlots:
    """Adapters of a projection [M, K], or of one an expert, by slot; slot 0 is none. Changed between steps only.

    Attributes:
        entries: what lies in each slot.
        experts: projections side by side, experts or heads, each with matrices of its own; 1 for a plain one.
        table: what a native implementation knows of them, told of every change; None for the reference.
    """

    def __init__(
        self, slots: int, inputs: int, outputs: int, max_rank: int = 256, experts: int = 1, table: Any = None
    ) -> None:
        self.entries: list[LowRank | None] = [None] * slots
        self.inputs = inputs
        self.outputs = outputs
        self.max_rank = max_rank
        self.experts = experts
        self.table = table

    def fill(self, slot: int, down: Tensor, up: Tensor, scale: float, columns: Tensor | None = None) -> None:
        """Puts an adapter into a slot; as `prepared`."""
        self.put(slot, self.prepared(down, up, scale, columns))

    def prepared(self, down: Tensor, up: Tensor, scale: float, columns: Tensor | None = None) -> LowRank:
        """An adapter as slots hold it: `down` [rank, K] and `up` [M, rank], as checkpoints have them; `columns` [M].

        Of experts all have a first axis [E]. Changes nothing here, so that another thread may do it.

        Raises:
            ConfigError: shapes, rank or type are not served.
        """
        first = () if self.experts == 1 else (self.experts,)
        rank = down.shape[-2] if down.dim() > 1 else 0
        if down.shape != (*first, rank, self.inputs) or up.shape != (*first, self.outputs, rank):
            each = f" for each of {self.experts} experts" if first else ""
            raise ConfigError(
                f"an adapter has tensors of {tuple(down.shape)} and {tuple(up.shape)}, but the projection needs (rank, "
                f"{self.inputs}) and ({self.outputs}, rank){each}; take an adapter that was made for this model."
            )
        if columns is not None and columns.shape != (*first, self.outputs):
            raise ConfigError(
                f"an adapter has factors of {tuple(columns.shape)} for {self.outputs} outputs; "
                "take an adapter that was made for this model."
            )
        if rank > self.max_rank:
            raise ConfigError(f"an adapter has rank {rank}; at most {self.max_rank} is served, start with more.")
        if down.dtype != up.dtype or down.dtype not in ADAPTER_TYPES:
            raise ConfigError(
                f"an adapter has tensors of {down.dtype} and {up.dtype}; allowed is one of float32, bfloat16, float16."
            )
        factors = None if columns is None else columns.float().contiguous()
        return LowRank(down.contiguous(), up.transpose(-2, -1).contiguous(), scale, factors)

    def put(self, slot: int, entry: LowRank) -> None:
        """Puts a prepared adapter into a slot.

        Raises:
            ConfigError: there is no such slot.
        """
        if not 1 <= slot < len(self.entries):
            raise ConfigError(f"adapter slot {slot} is not one of 1 to {len(self.entries) - 1}; start with more slots.")
        self._set(slot, entry)

    def clear(self, slot: int) -> None:
        """Empties a slot."""
        self._set(slot, None)

    def _set(self, slot: int, entry: LowRank | None) -> None:
        if self.table is not None:
            if entry is None:
                self.table.set(slot, 0, 0, 0, 0.0, "float32", 0)
            else:
                kind = str(entry.down.dtype).removeprefix("torch.")
                rank = entry.down.shape[-2]
                columns = 0 if entry.columns is None else entry.columns.data_ptr()
                self.table.set(slot, entry.down.data_ptr(), entry.up.data_ptr(), rank, entry.scale, kind, columns)
        self.entries[slot] = entry


def check_adapters(slot: Any, scale: Any) -> None:
    """Refuses adapters of tokens that not every implementation takes; what is recorded is looked at in its steps.

    Raises:
        ValueError: they are more than MOST_ADAPTERS, or of other types or shapes than in TokenAdapters.
    """
    if not isinstance(slot, Tensor):
        return
    if slot.dim() == 2 and slot.shape[1] > MOST_ADAPTERS:
        raise ValueError(f"a token has {slot.shape[1]} adapters; allowed are at most {MOST_ADAPTERS}")
    if slot.dim() != 2 or slot.shape != scale.shape or (slot.dtype, scale.dtype) != (torch.int64, torch.float32):
        given, scales = (f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in (slot, scale))
        raise ValueError(
            f"adapters of tokens are {given} and their scales {scales}; allowed are int64 and float32, one of each for "
            f"every token and each of at most {MOST_ADAPTERS} adapters"
        )


@dataclass(frozen=True, slots=True)
class TokenAdapters:
    """Which adapters the tokens of a step have.

    Attributes:
        slot: [T, A] int64, A at most MOST_ADAPTERS; 0, or a slot that is empty, stands for none.
        scale: [T, A] float32, of each.
        rows: [L] int64, the tokens that activations of the last layer hold, as `Batch.logit_rows`; an activation of
            another length holds all tokens.
    """

    slot: Tensor
    scale: Tensor
    rows: Tensor

    def __post_init__(self) -> None:
        check_adapters(self.slot, self.scale)


@dataclass(frozen=True, slots=True)
class RowAdapters:
    """Which adapters the rows of a product have.

    Attributes:
        slot, scale: [R, A], as in TokenAdapters.
        expert: [R] int64, whose matrices count; None where there is one for all.
    """

    slot: Tensor
    scale: Tensor
    expert: Tensor | None = None

    def repeated(self, times: int, expert: Tensor) -> RowAdapters:
        """The same for so many rows a token, of these experts."""
        return RowAdapters(self.slot.repeat_interleave(times, 0), self.scale.repeat_interleave(times, 0), expert)

    def some(self, rows: Tensor | slice) -> RowAdapters:
        """Those of some rows."""
        expert = None if self.expert is None else self.expert[rows]
        return RowAdapters(self.slot[rows], self.scale[rows], expert)


def tokens_of(tokens: TokenAdapters, rows: Tensor) -> TokenAdapters:
    """What the tokens have whose logits are made: rows [n] of those that activations of the last layer hold."""
    chosen = tokens.rows[rows]
    return TokenAdapters(tokens.slot[chosen], tokens.scale[chosen], rows)


def rows_of(tokens: TokenAdapters, x: Tensor) -> RowAdapters:
    """Which adapters the tokens have that x holds."""
    every = RowAdapters(tokens.slot, tokens.scale)
    return every if len(x) == len(tokens.slot) else every.some(tokens.rows)


@dataclass(frozen=True, slots=True)
class PlacedAdapters:
    """Adapters of the columns of a merged projection from `offset` on."""

    slots: AdapterSlots
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Adapted:
    """The adapters of one product, and who has which."""

    parts: tuple[PlacedAdapters, ...]
    tokens: TokenAdapters


@dataclass(frozen=True, slots=True)
class ExpertAdapters:
    """The adapters of experts: of their gates and ups, [E, 2 · I, N], and of their outputs, [E, N, I]."""

    gate_up: tuple[PlacedAdapters, ...]
    down: tuple[PlacedAdapters, ...]
    tokens: TokenAdapters
