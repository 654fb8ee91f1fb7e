"""Slots for low-rank adapters in every projection of a model that takes them. The null form: a model has none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

from penstock.kernels.api import KernelSet
from penstock.layers.linear import ProjectionAdapters
from penstock.layers.weight import Layer


@runtime_checkable
class Adaptable(Protocol):
    """A layer with projections that adapters can change."""

    def make_adapters(self, kernels: KernelSet, slots: int, max_rank: int) -> Iterator[tuple[str, ProjectionAdapters]]:
        """Makes slots and has the layer use them; each with the name under which checkpoints have the projection."""


def add_adapters(model: Layer, kernels: KernelSet, slots: int, max_rank: int) -> Mapping[str, ProjectionAdapters]:
    """Gives a model slots 1 … slots - 1 for adapters of up to `max_rank`, before its steps are recorded.

    Returns:
        What fills them, by the checkpoint name of the projection (without `.weight`).
    """
    found: dict[str, ProjectionAdapters] = {}
    for layer in model.walk():
        if isinstance(layer, Adaptable):
            found.update(layer.make_adapters(kernels, slots, max_rank))
    return found
