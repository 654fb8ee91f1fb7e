"""One layer's memory: keys and values in the layout of the implementation that made it, or recurrent states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.config.cache_spec import WHOLE_CONTEXT, Stripe

if TYPE_CHECKING:
    from torch import Tensor

KV_TYPES = ("float32", "bfloat16", "float16", "fp8", "int8", "int4")


@dataclass(frozen=True, slots=True)
class KvTensors:
    """Keys and values of every block.

    Attributes:
        key, value: [num_blocks, …]: the reference keeps [num_blocks, block_size, K, D] and [num_blocks, block_size, K,
            Dv], the native library bytes. A latent cache's value is a view of its key, or empty.
        layout: what its implementation knows of the bytes; None for the reference.
        latent: a value is the beginning of its key.
        stripe: of each block's positions, those that are here; where they are not all, `block_size` counts these.
    """

    key: Tensor
    value: Tensor
    layout: Any = None
    latent: bool = False
    stripe: Stripe = WHOLE_CONTEXT

    def copy_block(self, source: int, target: int) -> None:
        """Copies a whole block; slots of it that no query may see are never read."""
        self.key[target] = self.key[source]
        if not self.latent:
            self.value[target] = self.value[source]


@dataclass(frozen=True, slots=True)
class StateRows:
    """Where the rows of a step keep their recurrent states. A state tensor is [slots, …] float32, a slot a row.

    A row that starts at position 0 finds zeros in its slot, whatever lies there; any other what its tokens so far left.
    Its state is read there, and goes there after its last token, or where `after` says.

    Attributes:
        slot: [R] int64, all different.
        query_start: [R + 1] int32, first token of each row.
        context_len: [R] int32, tokens of the row so far, this step's included.
        after: [T] int64, the slot that a row's state goes to after each token; of tokens with one slot the last one's
            state stays there. No slot of one row is another row's. None: each row's own.
    """

    slot: Tensor
    query_start: Tensor
    context_len: Tensor
    after: Tensor | None = None
