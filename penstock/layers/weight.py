"""Weight declarations: a layer says which checkpoint tensors it needs and where each goes; one loader walks them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.api import Matrix
from penstock.kernels.canonical import Canonical

if TYPE_CHECKING:
    from penstock.layers.sharding import Shards


@dataclass(frozen=True, slots=True)
class WeightPart:
    """One checkpoint tensor that fills (a slot of) a weight.

    Attributes:
        key: the checkpoint's tensor name, Hugging Face spelling.
        shape: the shape it must have there (decoded, where the checkpoint is quantised).
        offset: first index along `Weight.merge_axis` it fills (merge slot; 0 for an unmerged weight).
        transform: applied to the decoded tensor before it is placed, for example a transpose; None for none.
        interleaved: rows alternate between the two halves of the weight (gate, up, gate, up …); the loader parts them.
        aliases: other names under which checkpoints store the same tensor, tried in order.
        index: for a stacked weight (experts), which entry of the first axis it fills; merge_axis and offset then
            count within that entry. None fills all entries.
        rows: which rows of the checkpoint's tensor it takes, in its order; None for all, as they lie. Unlike with a
            transform, a quantised matrix stays as it is stored.
        entries: of a tensor that holds all experts, or all heads' matrices, which it takes: first, last plus one, and
            how many there are; None for all.
        columns: which inputs it takes, the last axis of what is placed (first, last plus one); None for all.
    """

    key: str
    shape: tuple[int, ...]
    offset: int = 0
    transform: Callable[[Tensor], Tensor] | None = None
    aliases: tuple[str, ...] = ()
    index: int | None = None
    interleaved: bool = False
    rows: npt.NDArray[np.int64] | None = field(default=None, compare=False, repr=False)
    entries: tuple[int, int, int] | None = None
    columns: tuple[int, int] | None = None


@dataclass(slots=True)
class Weight:
    """A tensor a layer computes with, filled by the loader.

    Attributes:
        shape: final shape.
        parts: what fills it.
        merge_axis: axis along which parts are laid side by side.
        shard_axis: axis split among tensor-parallel ranks, or None if replicated.
        segment: where ranks may share the inputs, of how many neighbours (a KV head's group, say) each has to have all;
            these inputs are summed in segments (kernels/segments.py). 0 where they are not shared.
        keep_float32: stay in float32 whatever the compute dtype (norm scales, sinks, router bias).
        alternatives: other complete sets of parts (the same weight in another layout on disk), tried in order when
            the first part of `parts` is not in the checkpoint.
        pack: brings matrices [N, K], stored (see `packable`) or plain tensors, that lie one below the other into the
            layout the weight's kernel reads; None keeps one plain tensor.
        packable: why `pack` cannot take a matrix as it is stored, or None if it can.
        experts: entries of the first axis of a stacked weight; its matrices hold all of them, one below the other.
        gate_up: the rows (of each entry) are two equal halves, gates and then ups, which are packed as two matrices.
        quantize_policy: what becomes of it where a model is quantised while it loads: "quantised", "eight bits"
            (tables, whose errors weigh more) or "kept" (routers).
        own: of a weight that is not packed, which of the rows that its parts give are this rank's; None for all.
        whole_rows: rows of a table of which this rank has some; None where it has all.
        others: parts that other ranks have, which are not read.
        tensor: what the weight is once loaded, packed; None before.
    """

    shape: tuple[int, ...]
    parts: tuple[WeightPart, ...]
    merge_axis: int = 0
    shard_axis: int | None = None
    segment: int = 0
    keep_float32: bool = False
    alternatives: tuple[tuple[WeightPart, ...], ...] = ()
    pack: Callable[[Sequence[Matrix]], Any] | None = field(default=None, repr=False)
    packable: Callable[[Canonical], str | None] | None = field(default=None, repr=False)
    experts: int = 1
    gate_up: bool = False
    quantize_policy: Literal["quantised", "eight bits", "kept"] = "quantised"
    own: npt.NDArray[np.int64] | None = field(default=None, repr=False)
    whole_rows: int | None = None
    others: tuple[WeightPart, ...] = ()
    tensor: Any = field(default=None, repr=False)

    def fill(self, parts: Sequence[Matrix]) -> None:
        """Takes the whole weight: matrices one below the other, or the one plain tensor of a weight without `pack`."""
        if self.pack is not None:
            self.tensor = self.pack(parts)
        elif self.own is None:
            self.tensor = parts[0]
        else:
            whole = parts[0]
            assert isinstance(whole, Tensor)
            self.tensor = whole[torch.from_numpy(self.own).to(whole.device)]

    def take_rows(self, rows: npt.NDArray[np.int64]) -> None:
        """Only these rows of a table, a weight of one part, are this rank's."""
        self.shape = (len(rows), *self.shape[1:])
        self._take(lambda part: replace(part, rows=rows if part.rows is None else part.rows[rows]))

    def take_columns(self, first: int, end: int) -> None:
        """Only these inputs are this rank's."""
        self.shape = (*self.shape[:-1], end - first)
        self._take(lambda part: replace(part, columns=(first, end)))

    def take_entries(self, first: int, end: int) -> None:
        """Only these experts, or heads, are this rank's."""
        count = self.shape[0]

        def taken(part: WeightPart) -> WeightPart | None:
            if part.index is None:
                return replace(part, entries=(first, end, count))
            return replace(part, index=part.index - first) if first <= part.index < end else None

        self.shape, self.experts = (end - first, *self.shape[1:]), end - first
        self._take(taken)

    def _take(self, taken: Callable[[WeightPart], WeightPart | None]) -> None:
        layouts = (self.parts, *self.alternatives)
        self.others += tuple(part for parts in layouts for part in parts if taken(part) is None)
        kept = (tuple(own for part in parts if (own := taken(part)) is not None) for parts in layouts)
        self.parts, *alternatives = kept
        self.alternatives = tuple(alternatives)

    @property
    def value(self) -> Any:
        """The loaded tensor, in the layout `pack` gave it.

        Raises:
            RuntimeError: the loader has not filled it.
        """
        if self.tensor is None:
            raise RuntimeError(f"weight {self.parts[0].key} was used before it was loaded")
        return self.tensor


class Layer:
    """Base of all layers: weights and sub-layers are found among the attributes, in order of assignment."""

    def shard(self, shards: Shards) -> None:
        """Takes a rank's share of what the layer declares, before it is loaded; layers that cannot are left whole."""

    def weights(self) -> Iterator[Weight]:
        """Every declared weight below this layer, each once, in order of assignment."""
        seen: set[int] = set()
        stack: list[object] = [self]
        while stack:
            item = stack.pop()
            if isinstance(item, Weight):
                if id(item) not in seen:
                    seen.add(id(item))
                    yield item
            elif isinstance(item, Layer):
                stack.extend(reversed(list(vars(item).values())))
            elif isinstance(item, (list, tuple)):
                stack.extend(reversed(item))

    def walk(self) -> Iterator[Layer]:
        """This layer and every layer below it, each once."""
        seen: set[int] = set()
        stack: list[object] = [self]
        while stack:
            item = stack.pop()
            if isinstance(item, Layer):
                if id(item) not in seen:
                    seen.add(id(item))
                    yield item
                    stack.extend(reversed(list(vars(item).values())))
            elif isinstance(item, (list, tuple)):
                stack.extend(reversed(item))

    def place(self, device: torch.device) -> None:
        """Moves the tensors among the attributes that are no weights, constants, to where weights were loaded."""
        stack: list[object] = [self]
        while stack:
            item = stack.pop()
            if isinstance(item, Layer):
                for name, value in vars(item).items():
                    if isinstance(value, Tensor):
                        setattr(item, name, value.to(device))
                    else:
                        stack.append(value)
            elif isinstance(item, (list, tuple)):
                stack.extend(item)
