"""One layer's KV memory, in the layout of the implementation that made it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

KV_TYPES = ("float32", "bfloat16", "float16", "fp8", "int8", "int4")


@dataclass(frozen=True, slots=True)
class KvCache:
    """Keys and values of every block.

    Attributes:
        key, value: [num_blocks, …]: the reference keeps [num_blocks, block_size, K, D] and [num_blocks, block_size, K,
            Dv], the native library bytes. A latent cache's value is a view of its key, or empty.
        layout: what its implementation knows of the bytes; None for the reference.
        latent: a value is the beginning of its key.
    """

    key: Tensor
    value: Tensor
    layout: Any = None
    latent: bool = False

    def copy_block(self, source: int, target: int) -> None:
        """Copies a whole block; slots of it that no query may see are never read."""
        self.key[target] = self.key[source]
        if not self.latent:
            self.value[target] = self.value[source]
