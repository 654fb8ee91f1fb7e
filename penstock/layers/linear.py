"""Dense layers; several checkpoint matrices may be merged into one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.config.errors import ConfigError
from penstock.kernels.adapters import Adapted, AdapterSlots, LowRank, PlacedAdapters
from penstock.kernels.api import KernelSet, LinearOp
from penstock.layers.sharding import Columns
from penstock.layers.step import ForwardStep
from penstock.layers.weight import Layer, Weight, WeightPart


class StoredRows(NamedTuple):
    """Rows of a merged weight, as one checkpoint matrix has them.

    Attributes:
        prefix: of the checkpoint's names.
        stored: how many rows it has.
        order: which of them the weight has, in its order; None for all, as they lie.
        factor: of each row taken (float32), or of all.
    """

    prefix: str
    stored: int
    order: npt.NDArray[np.int64] | None = None
    factor: npt.NDArray[np.float32] | float | None = None

    def part(self, suffix: str, columns: tuple[int, ...], offset: int = 0) -> WeightPart:
        """These rows of the weight's matrix, or of its bias."""
        factor = 1.0 if self.factor is None else self.factor
        plain = bool(np.equal(factor, 1.0).all())  # stays as it is stored
        transform = None if plain else partial(_times, factor=factor)
        return WeightPart(f"{self.prefix}.{suffix}", (self.stored, *columns), offset, transform, rows=self.order)


def _times(rows: Tensor, factor: npt.NDArray[np.float32] | float) -> Tensor:
    return rows.float() * torch.as_tensor(factor, dtype=torch.float32).reshape(-1, *(1,) * (rows.dim() - 1))


def merged(
    parts: Sequence[tuple[str, int] | StoredRows], suffix: str, *columns: int, fused: Sequence[StoredRows] = ()
) -> Weight:
    """A weight of the parts' rows one after the other; keys end in `suffix`. `fused` are other matrices of them."""

    def placed(parts: Sequence[tuple[str, int] | StoredRows]) -> tuple[tuple[WeightPart, ...], int]:
        found: list[WeightPart] = []
        rows = 0
        for named in (StoredRows(*part) for part in parts):
            found.append(named.part(suffix, columns, rows))
            rows += named.stored if named.order is None else len(named.order)
        return tuple(found), rows

    usual, rows = placed(parts)
    return Weight((rows, *columns), usual, shard_axis=0, alternatives=(placed(fused)[0],) if fused else ())


class AdapterTarget(Protocol):
    """What an adapter of one matrix of a checkpoint changes."""

    def entries(
        self, down: Tensor, up: Tensor, scale: float, columns: Tensor | None = None
    ) -> tuple[tuple[AdapterSlots, LowRank], ...]:
        """The adapter as slots hold it, and whose slots; arguments and errors as of AdapterSlots.prepared."""


@dataclass(frozen=True, slots=True)
class ProjectionAdapters:
    """The adapters of one projection as checkpoints name it.

    Attributes:
        slots: where they lie.
        order, factor: of its rows, as in StoredRows; with experts, of each expert's.
    """

    slots: AdapterSlots
    order: npt.NDArray[np.int64] | None = None
    factor: npt.NDArray[np.float32] | float | None = None

    def fill(self, slot: int, down: Tensor, up: Tensor, scale: float, columns: Tensor | None = None) -> None:
        """As AdapterSlots.fill, with rows as the checkpoint has them."""
        self.slots.put(slot, self.prepared(down, up, scale, columns))

    def prepared(self, down: Tensor, up: Tensor, scale: float, columns: Tensor | None = None) -> LowRank:
        """As AdapterSlots.prepared, with rows as the checkpoint has them."""
        up, columns = self.ordered(up, columns)
        return self.slots.prepared(down, up, scale, columns)

    def ordered(self, up: Tensor, columns: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Rows and their factors in the order that the weight has."""
        if self.order is not None:
            up = up[..., torch.from_numpy(self.order), :]
            columns = None if columns is None else columns[..., torch.from_numpy(self.order)]
        if self.factor is not None:
            up = (up.float() * torch.as_tensor(self.factor, dtype=torch.float32).reshape(-1, 1)).to(up.dtype)
        return up, columns

    def entries(
        self, down: Tensor, up: Tensor, scale: float, columns: Tensor | None = None
    ) -> tuple[tuple[AdapterSlots, LowRank], ...]:
        """As AdapterTarget."""
        return ((self.slots, self.prepared(down, up, scale, columns)),)


@dataclass(frozen=True, slots=True)
class FusedAdapters:
    """The adapters of a matrix that a checkpoint may have in the place of several projections.

    Attributes:
        parts: those projections, by their places in the merged weight.
        rows: which of the merged weight's rows the matrix gives, first and last plus one.
        stored: the matrix.
    """

    parts: tuple[PlacedAdapters, ...]
    rows: tuple[int, int]
    stored: StoredRows

    def entries(
        self, down: Tensor, up: Tensor, scale: float, columns: Tensor | None = None
    ) -> tuple[tuple[AdapterSlots, LowRank], ...]:
        """As AdapterTarget: the adapter cut by projections."""
        if len(up) != self.stored.stored:
            told = f"{len(up)} outputs of {self.stored.prefix}, which has {self.stored.stored}"
            raise ConfigError(f"an adapter changes {told}; take an adapter that was made for this model.")
        whole = ProjectionAdapters(self.parts[0].slots, self.stored.order, self.stored.factor)
        up, columns = whole.ordered(up, columns)
        found = []
        for part in self.parts:
            begin = part.offset - self.rows[0]
            cut = slice(begin, begin + part.slots.outputs)
            found.append(
                (part.slots, part.slots.prepared(down, up[cut], scale, None if columns is None else columns[cut]))
            )
        return tuple(found)


def _transposed(matrix: Tensor, rows: npt.NDArray[np.int64] | None = None) -> Tensor:
    return matrix.T if rows is None else matrix.T[torch.from_numpy(rows)]


def _some(parts: Sequence[StoredRows], rows: npt.NDArray[np.int64]) -> tuple[StoredRows, ...]:
    """Of matrices that lie one below the other, these rows, which rise."""
    found, begin = [], 0
    for part in parts:
        order = np.arange(part.stored, dtype=np.int64) if part.order is None else part.order
        own = rows[(rows >= begin) & (rows < begin + len(order))] - begin
        factor = part.factor[own] if isinstance(part.factor, np.ndarray) else part.factor
        found.append(StoredRows(part.prefix, part.stored, order[own], factor))
        begin += len(order)
    return tuple(found)


class Linear(Layer):
    """y = x · Wᵀ + b (+ residual). W is [sum of outputs, inputs], merged from `parts` or stored as `fused`.

    A whole matrix that a checkpoint has as [inputs, outputs] (GPT-2's) is found under the suffix `transposed`.
    `segment` is the weight's.
    """

    def __init__(
        self,
        kernels: KernelSet,
        parts: Sequence[tuple[str, int] | StoredRows],
        inputs: int,
        *,
        bias: bool,
        fused: Sequence[StoredRows] = (),
        segment: int = 0,
    ) -> None:
        self._kernels = kernels
        self._linear: LinearOp = kernels.linear
        self._parts, self._fused = tuple(StoredRows(*part) for part in parts), tuple(fused)
        whole, *others = self._fused or self._parts
        self._may_be_transposed = not others and whole.order is None
        self.weight = self._declared(inputs)
        self.weight.segment, self.weight.packable = segment, kernels.packable
        self.weight.pack = partial(kernels.pack_linear, segment=segment) if segment else kernels.pack_linear
        self.bias = merged(parts, "bias", fused=fused) if bias else None
        self._adapter = kernels.adapter
        self.adapters: tuple[PlacedAdapters, ...] = ()
        self._inputs = inputs
        self._joined: Callable[[Tensor], Tensor] | None = None  # inputs with those that other ranks have
        self.knows_tokens = True  # whose its rows are; else it has no adapters

    def _declared(self, inputs: int) -> Weight:
        weight = merged(self._parts, "weight", inputs, fused=self._fused)
        if self._may_be_transposed:
            whole = (self._fused or self._parts)[0]
            turned = partial(_transposed, rows=whole.order) if whole.order is not None else _transposed
            part = WeightPart(f"{whole.prefix}.transposed", (inputs, whole.stored), transform=turned)
            weight.alternatives += ((part,),)
        return weight

    def take_rows(self, rows: npt.NDArray[np.int64]) -> None:
        """Only these outputs are this rank's, in rising order."""
        self._parts, self._fused = _some(self._parts, rows), _some(self._fused, rows)
        fresh = self._declared(self.weight.shape[-1])
        self.weight.shape, self.weight.parts = fresh.shape, fresh.parts
        self.weight.alternatives = fresh.alternatives
        if self.bias is not None:
            self.bias = merged(self._parts, "bias", fused=self._fused)

    def take_columns(self, columns: Columns, group: Any) -> None:
        """Only these inputs are this rank's; outputs are put together with those of the others."""
        self.weight.take_columns(columns.first, columns.end)
        self.weight.pack = partial(self._kernels.pack_linear, ends=columns.ends)
        shared = self._kernels.shared_linear

        def linear(x: Tensor, weight: Any, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
            return shared(x, weight, group, columns.place, bias, residual)

        self._linear = linear
        self._joined = partial(self._kernels.gather_columns, widths=columns.widths, group=group)

    def __call__(self, x: Tensor, step: ForwardStep | None, residual: Tensor | None = None) -> Tensor:
        """x [T, inputs], residual [T, outputs] → [T, outputs], changed by the adapters of the step's tokens.

        Without a step, as where there are no tokens of one, no adapters apply.
        """
        bias = self.bias_value
        out = self._linear(x, self.weight.value, bias, residual)
        if (adapters := self.adapted(step)) is None:
            return out
        return self._adapter(x if self._joined is None else self._joined(x), out, adapters, bias, residual)

    def adapted(self, step: ForwardStep | None) -> Adapted | None:
        """The adapters of a step's tokens here; None where there are none."""
        tokens = step.adapters if self.adapters and step is not None else None
        return None if tokens is None else Adapted(self.adapters, tokens)

    def make_adapters(self, kernels: KernelSet, slots: int, max_rank: int) -> Iterator[tuple[str, AdapterTarget]]:
        """Slots for the adapters of each merged projection, under its checkpoint name; and of fused matrices."""
        if not self.knows_tokens:
            return
        offset = 0
        for part in self._parts:
            rows = part.stored if part.order is None else len(part.order)
            made = kernels.make_adapters(slots, self._inputs, rows, max_rank)
            self.adapters = (*self.adapters, PlacedAdapters(made, offset))
            yield part.prefix, ProjectionAdapters(made, part.order, part.factor)
            offset += rows
        begin = 0
        for whole in self._fused:
            end = begin + (whole.stored if whole.order is None else len(whole.order))
            placed = tuple(part for part in self.adapters if begin <= part.offset < end)
            yield whole.prefix, FusedAdapters(placed, (begin, end), whole)
            begin = end

    @property
    def bias_value(self) -> Any:
        """The loaded bias, or None."""
        return None if self.bias is None else self.bias.value
