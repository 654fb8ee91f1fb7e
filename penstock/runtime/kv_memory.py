"""The KV cache's memory: one key and one value tensor a layer, in blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.core.cache_spec import CacheGroup, CacheSpec
from penstock.core.protocol import CacheOp, CacheOpKind
from penstock.layers.batch import LayerCache


class KVMemory:
    """Allocates every layer's blocks; `caches` are in layer order."""

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        groups: Sequence[CacheGroup],
        num_blocks: Sequence[int],
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        group_of = {layer: g for g, group in enumerate(groups) for layer in group.layers}
        self.caches: list[LayerCache] = []
        for layer, spec in enumerate(specs):
            group = group_of[layer]
            shape = (num_blocks[group], block_size, spec.num_kv_heads)
            # zeros, not empty: a slot that is masked out must not hold NaN, which a multiplication by 0 would keep
            key = torch.zeros(*shape, spec.key_dim, dtype=dtype, device=device)
            value = torch.zeros(*shape, spec.value_dim, dtype=dtype, device=device)
            self.caches.append(LayerCache(group, key, value))
        self._members = [[self.caches[layer] for layer in group.layers] for group in groups]

    def apply(self, op: CacheOp) -> None:
        """Runs one cache operation.

        Raises:
            ValueError: its kind needs a memory tier this engine does not have.
        """
        if op.kind is not CacheOpKind.COPY:
            raise ValueError(f"cache operation {op.kind.value} has no tier to go to; served here: copy")
        for cache in self._members[op.group]:
            cache.key[op.target, : op.num_tokens] = cache.key[op.source, : op.num_tokens]
            cache.value[op.target, : op.num_tokens] = cache.value[op.source, : op.num_tokens]

    def close(self) -> None:
        """Frees all blocks; nothing can be computed afterwards."""
        self.caches.clear()
        self._members.clear()
