"""Slots for low-rank adapters in every projection of a model that takes them. The null form: a model has none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from penstock.kernels.adapters import AdapterSlots, LowRank
from penstock.kernels.api import KernelSet
from penstock.layers.linear import AdapterTarget
from penstock.layers.weight import Layer


@runtime_checkable
class Adaptable(Protocol):
    """A layer with projections that adapters can change."""

    def make_adapters(self, kernels: KernelSet, slots: int, max_rank: int) -> Iterator[tuple[str, AdapterTarget]]:
        """Makes slots and has the layer use them; each with the name under which checkpoints have the projection."""


def add_adapters(model: Layer, kernels: KernelSet, slots: int, max_rank: int) -> Mapping[str, AdapterTarget]:
    """Gives a model slots 1 … slots - 1 for adapters of up to `max_rank`, before its steps are recorded.

    Returns:
        What fills them, by the checkpoint name of the projection (without `.weight`).
    """
    return add_to_layers(model.walk(), kernels, slots, max_rank)


def add_to_layers(
    layers: Iterable[Layer], kernels: KernelSet, slots: int, max_rank: int
) -> Mapping[str, AdapterTarget]:
    """As `add_adapters`, of these layers alone, not of what is below them."""
    found: dict[str, AdapterTarget] = {}
    for layer in layers:
        if isinstance(layer, Adaptable):
            for name, target in layer.make_adapters(kernels, slots, max_rank):
                found[name] = _Together((found[name], target)) if name in found else target
    return found


@dataclass(frozen=True, slots=True)
class _Together:
    """The adapters of a matrix of which several weights have rows."""

    targets: tuple[AdapterTarget, ...]

    def entries(
        self, down: Tensor, up: Tensor, scale: float, columns: Tensor | None = None
    ) -> tuple[tuple[AdapterSlots, LowRank], ...]:
        """As AdapterTarget."""
        return tuple(entry for target in self.targets for entry in target.entries(down, up, scale, columns))
