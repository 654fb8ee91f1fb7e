"""Token embedding and output head, which may share one table."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.api import KernelSet
from penstock.layers.weight import Layer, Weight, WeightPart


def table(kernels: KernelSet, key: str, vocab_size: int, hidden_size: int) -> Weight:
    """A [vocab, hidden] weight, for an embedding, a head or both."""
    shape = (vocab_size, hidden_size)
    pack, packable = kernels.pack_table, kernels.packable
    part = WeightPart(key, shape)
    return Weight(shape, (part,), shard_axis=0, pack=pack, packable=packable, on_request="eight bits")


class Embedding(Layer):
    """Rows of the table, times `scale`."""

    def __init__(self, kernels: KernelSet, weight: Weight, scale: float = 1.0) -> None:
        self._embedding = kernels.embedding
        self.weight = weight
        self.scale = scale

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int64 → [T, hidden]."""
        return self._embedding(token_ids, self.weight.value, self.scale)


class Head(Layer):
    """Logits, with a bias if there is one, optionally soft-capped to ±soft_cap (Gemma 2 report, arXiv:2408.00118)."""

    def __init__(
        self, kernels: KernelSet, weight: Weight, soft_cap: float | None = None, bias: Weight | None = None
    ) -> None:
        self._kernels = kernels
        self.weight = weight
        self.bias = bias
        self.soft_cap = soft_cap

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [L, hidden] → logits [L, vocab] float32."""
        bias = None if self.bias is None else self.bias.value
        logits = self._kernels.linear(hidden, self.weight.value, bias)
        logits = logits if logits.dtype == torch.float32 else logits.float()
        return logits if self.soft_cap is None else self._kernels.soft_cap(logits, self.soft_cap)
