"""What layers keep between steps: keys and values in blocks, recurrent states in slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from penstock.config.cache_spec import CacheSpec, group_layers
from penstock.core.protocol import CacheOp, CacheOpKind
from penstock.kernels.cache import KvTensors
from penstock.layers.batch import LayerCache

if TYPE_CHECKING:
    from penstock.kernels.api import MakeCache


ELSEWHERE = ""
"""The type of a layer's cache that another process has, with the layer."""


class CacheMaker(Protocol):
    """Kernels, or the part of them that makes caches."""

    @property
    def make_cache(self) -> MakeCache:
        """The op of that name."""


class KVMemory:
    """Allocates every layer's blocks, layer by layer in its type; `caches` are in layer order.

    Attributes:
        told: called with each operation that is applied, ahead of it; None for nobody.
    """

    told: Callable[[CacheOp], None] | None = None

    def __init__(
        self,
        kernels: CacheMaker,
        specs: Sequence[CacheSpec],
        num_blocks: Sequence[int],
        block_size: int,
        *,
        kv_types: Sequence[str] = (),
        device: str | None = "cpu",
        state_slots: int = 1,
        shared: bool = False,
    ) -> None:
        """Allocates it.

        Args:
            kernels, specs, num_blocks, block_size: of the model and its plan; where ranks share contexts, each has an
                even part of a block's positions.
            device: of torch; None for arrays on the host.
            kv_types: the layers' types, ELSEWHERE for those without memory here; without them all keep float32.
            state_slots: of recurrent layers.
            shared: layers of a group take turns in one memory, since nothing is read after its layer has been computed.
        """
        kv_types = kv_types or ("float32",) * len(specs)
        groups = group_layers(specs)
        group_of = {layer: g for g, group in enumerate(groups) for layer in group.layers}
        self.caches: list[LayerCache] = []
        made: dict[tuple[object, ...], KvTensors] = {}
        here = {layer for layer, kv_type in enumerate(kv_types) if kv_type != ELSEWHERE}
        nothing = _zeros((0,), device)
        for layer, spec in enumerate(specs):
            if spec.state:
                slots = state_slots if layer in here else 0
                arrays = tuple(_zeros((slots, *shape), device) for shape in spec.state)
                self.caches.append(LayerCache(len(groups), KvTensors(nothing, nothing), arrays))
                continue
            if layer not in here:
                self.caches.append(LayerCache(group_of[layer], KvTensors(nothing, nothing)))
                continue
            group = group_of[layer]
            kv_type = kv_types[layer]
            place = (group, kv_type, spec.num_kv_heads, spec.key_dim, spec.value_dim, None if shared else layer)
            if place not in made:
                cache = kernels.make_cache(
                    kv_type,
                    num_blocks[group],
                    block_size // spec.stripe.ranks,
                    spec.num_kv_heads,
                    spec.key_dim,
                    spec.value_dim,
                    device or "cpu",
                    spec.latent,
                )
                made[place] = cache if spec.stripe.whole else replace(cache, stripe=spec.stripe)
            self.caches.append(LayerCache(group, made[place]))
        self._members = [[self.caches[layer].kv for layer in group.layers if layer in here] for group in groups]
        states = (cache.state for layer, cache in enumerate(self.caches) if layer in here)
        self._states: list[Any] = [array for arrays in states for array in arrays]
        self._has_states = any(spec.state for spec in specs)

    @property
    def has_states(self) -> bool:
        """Whether layers keep recurrent states, here or elsewhere."""
        return self._has_states

    @property
    def num_groups(self) -> int:
        """Cache groups, recurrent states counted as one behind all groups of blocks."""
        return len(self._members) + self.has_states

    def arrays(self, group: int) -> list[Any]:
        """What the layers of a group keep, each array [blocks, …], or [slots, …] of recurrent states."""
        if group == len(self._members):
            return list(self._states)
        kept = [(kv.key,) if kv.latent else (kv.key, kv.value) for kv in self._members[group]]
        return [array for arrays in kept for array in arrays]

    def apply(self, op: CacheOp) -> None:
        """Copies a block, or a recurrent state; loads and saves are a mover's."""
        if self.told is not None:
            self.told(op)
        if op.group == len(self._members) and op.kind in (CacheOpKind.COPY, CacheOpKind.CHECKPOINT):
            for array in self._states:
                array[op.target] = array[op.source]
            return
        for kv in self._members[op.group]:
            kv.copy_block(op.source, op.target)

    def close(self) -> None:
        """Frees all blocks; nothing can be computed afterwards."""
        self.caches.clear()
        self._members.clear()
        self._states.clear()


def _zeros(shape: tuple[int, ...], device: str | None) -> Any:
    """Of float32: a tensor on the device, an array without one."""
    if device is None:
        return np.zeros(shape, np.float32)
    import torch

    return torch.zeros(shape, device=device)
