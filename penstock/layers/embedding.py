"""Token embedding and output head, which may share one table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.adapters import Adapted, PlacedAdapters, TokenAdapters
from penstock.kernels.api import EmbeddingOp, KernelSet
from penstock.layers.batch import Batch
from penstock.layers.linear import AdapterTarget, Linear, ProjectionAdapters
from penstock.layers.norm import Norm
from penstock.layers.sharding import Shards
from penstock.layers.weight import Layer, Weight, WeightPart


def table(kernels: KernelSet, key: str, vocab_size: int, hidden_size: int) -> Weight:
    """A [vocab, hidden] weight, for an embedding, a head or both."""
    shape = (vocab_size, hidden_size)
    pack, packable = kernels.pack_table, kernels.packable
    part = WeightPart(key, shape)
    return Weight(shape, (part,), shard_axis=0, pack=pack, packable=packable, quantize_policy="eight bits")


def learned(kernels: KernelSet, key: str, rows: int, hidden_size: int, *, first: int = 0) -> Weight:
    """A table [rows, hidden] of positions or token types; the checkpoint's begins with `first` rows nobody uses."""
    order = np.arange(first, first + rows, dtype=np.int64) if first else None
    part = WeightPart(key, (first + rows, hidden_size), rows=order)
    pack, packable = kernels.pack_table, kernels.packable
    return Weight((rows, hidden_size), (part,), pack=pack, packable=packable, quantize_policy="kept")


def _take_rows(weight: Weight, shards: Shards) -> int:
    """Has a table, which embedding and head may share, keep this rank's rows; the first of them."""
    whole = weight.whole_rows or weight.shape[0]
    first, end = shards.table_runs(whole)[shards.ranks.rank]
    if weight.whole_rows is None:
        weight.whole_rows = whole
        weight.take_rows(np.arange(first, end, dtype=np.int64))
    return first


class Embedding(Layer):
    """Rows of the table, times `scale`, projected, plus those of positions and of token types, normalised.

    All but the first where there is such a part.

    Attributes:
        takes_rows: a step may give rows [width] in the place of some of the table's, as they are behind the scale;
            before a recording is made.
        multiplies: rows that are given are multiplied by `scale` too: the family's scale belongs to what comes next.
    """

    def __init__(
        self,
        kernels: KernelSet,
        weight: Weight,
        scale: float = 1.0,
        *,
        projection: Linear | None = None,
        positions: Weight | None = None,
        types: Weight | None = None,
        norm: Norm | None = None,
        multiplies: bool = False,
    ) -> None:
        self._kernels = kernels
        self._embedding, self._add = kernels.embedding, kernels.add
        self._of_tokens: EmbeddingOp = kernels.embedding
        self._inject = kernels.inject
        self.takes_rows, self.multiplies = False, multiplies
        self._adapter = kernels.table_adapter
        self.adapters: tuple[PlacedAdapters, ...] = ()
        self.weight = weight
        self.scale = scale
        self.projection = projection
        if projection is not None:
            projection.knows_tokens = False
        self.positions = positions
        self.types = types
        self.norm = norm

    def shard(self, shards: Shards) -> None:
        """Each rank has some of the vocabulary."""
        if not shards.deals(self.weight.whole_rows or self.weight.shape[0]):
            return
        first, group = _take_rows(self.weight, shards), shards.group
        shared = self._kernels.shared_embedding

        def embedding(numbers: Tensor, table: Any, scale: float = 1.0) -> Tensor:
            return shared(numbers, table, scale, first, group)

        self._of_tokens = embedding

    def __call__(self, batch: Batch) -> Tensor:
        """The step's tokens → [T, hidden], changed by their adapters."""
        hidden = self._of_tokens(batch.token_ids, self.weight.value, self.scale)
        tokens = batch.adapters if self.adapters else None
        if tokens is not None:
            hidden = self._adapter(batch.token_ids, hidden, Adapted(self.adapters, tokens), self.scale)
        if self.takes_rows and batch.injected is not None:
            hidden = self._inject(hidden, batch.injected.rows, batch.injected.values, 0)
        if self.projection is not None:
            hidden = self.projection(hidden, None)
        if self.positions is not None:
            hidden = self._add(hidden, self._embedding(batch.positions[0], self.positions.value))
        if self.types is not None:
            assert batch.token_types is not None
            hidden = self._add(hidden, self._embedding(batch.token_types, self.types.value))
        return hidden if self.norm is None else self.norm(hidden)[0]

    def make_adapters(self, kernels: KernelSet, slots: int, max_rank: int) -> Iterator[tuple[str, AdapterTarget]]:
        """Slots for the adapters of the table, which is a projection [hidden, vocab] of tokens."""
        vocab, hidden = self.weight.shape
        made = kernels.make_adapters(slots, vocab, hidden, max_rank)
        self.adapters = (PlacedAdapters(made),)
        yield self.weight.parts[0].key.removesuffix(".weight"), ProjectionAdapters(made)


class Head(Layer):
    """Logits, with a bias if there is one, optionally soft-capped to ±soft_cap (Gemma 2 report, arXiv:2408.00118)."""

    def __init__(
        self, kernels: KernelSet, weight: Weight, soft_cap: float | None = None, bias: Weight | None = None
    ) -> None:
        self._kernels = kernels
        self.weight = weight
        self.bias = bias
        self.soft_cap = soft_cap
        self.adapters: tuple[PlacedAdapters, ...] = ()
        self._joined: Callable[[Tensor], Tensor] | None = None  # with the logits that other ranks have

    def shard(self, shards: Shards) -> None:
        """Each rank has some of the vocabulary."""
        vocab = self.weight.whole_rows or self.weight.shape[0]
        if not shards.deals(vocab):
            return
        first = _take_rows(self.weight, shards)
        widths = [end - begin for begin, end in shards.table_runs(vocab)]
        if self.bias is not None:
            self.bias.own = np.arange(first, first + widths[shards.ranks.rank], dtype=np.int64)
        self._joined = partial(self._kernels.gather_columns, widths=widths, group=shards.group)

    def __call__(self, hidden: Tensor, adapters: TokenAdapters | None = None) -> Tensor:
        """hidden [L, hidden] → logits [L, vocab] float32, changed by the adapters of those tokens."""
        bias = None if self.bias is None else self.bias.value
        logits = self._kernels.linear(hidden, self.weight.value, bias)
        if adapters is not None and self.adapters:
            logits = self._kernels.adapter(hidden, logits, Adapted(self.adapters, adapters), bias)
        logits = logits if logits.dtype == torch.float32 else logits.float()
        logits = logits if self._joined is None else self._joined(logits)
        return logits if self.soft_cap is None else self._kernels.soft_cap(logits, self.soft_cap)

    def make_adapters(self, kernels: KernelSet, slots: int, max_rank: int) -> Iterator[tuple[str, AdapterTarget]]:
        """Slots for the adapters of the logits, which an embedding with the same table does not have."""
        vocab, hidden = self.weight.shape
        made = kernels.make_adapters(slots, hidden, vocab, max_rank)
        self.adapters = (PlacedAdapters(made),)
        yield "lm_head", ProjectionAdapters(made)
