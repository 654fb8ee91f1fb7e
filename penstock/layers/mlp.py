"""Feed-forward layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from penstock.kernels.api import Activation, KernelSet
from penstock.layers.decoder import FeedForward
from penstock.layers.linear import Linear, StoredRows
from penstock.layers.norm import Norm
from penstock.layers.sharding import Shards
from penstock.layers.step import ForwardStep
from penstock.layers.weight import Layer


@dataclass(frozen=True, slots=True)
class MlpVariant:
    """What few families do otherwise.

    Attributes:
        down_bias: the output has a bias, or none, whatever the others have.
        up_first: a fused matrix on disk has up's rows before the gate's.
        factors: of the gate's product and of the output.
        deviations: only what lies so many standard deviations above the mean of the gate's product counts, from there
            (kernels.api.StatisticalTopk).
    """

    down_bias: bool | None = None
    up_first: bool = False
    factors: tuple[float, float] = (1.0, 1.0)
    deviations: float | None = None


USUAL = MlpVariant()


class GatedMlp(Layer):
    """down(activation(gate(x)) · up(x)), with gate and up merged into one product (also `gate_up_proj` on disk)."""

    def __init__(
        self,
        kernels: KernelSet,
        prefix: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation = "silu",
        bias: bool = False,
        variant: MlpVariant = USUAL,
    ) -> None:
        factors, down_bias = variant.factors, variant.down_bias
        self._kernels = kernels
        self.size, self.deviations = intermediate_size, variant.deviations
        self.activation: Activation = activation
        size = intermediate_size
        parts = (StoredRows(f"{prefix}.gate_proj", size, factor=factors[0]), StoredRows(f"{prefix}.up_proj", size))
        both = None if factors[0] == 1.0 else np.repeat(np.array([factors[0], 1.0], np.float32), size)
        order = np.roll(np.arange(2 * size, dtype=np.int64), size) if variant.up_first else None
        fused = StoredRows(f"{prefix}.gate_up_proj", 2 * size, order, both)
        self.gate_up = Linear(kernels, parts, hidden_size, bias=bias, fused=(fused,))
        self.gate_up.weight.gate_up = True
        last = (StoredRows(f"{prefix}.down_proj", hidden_size, factor=factors[1]),)
        self.down = Linear(kernels, last, size, bias=bias if down_bias is None else down_bias, segment=1)

    def shard(self, shards: Shards) -> None:
        """Each rank has some of the inner elements."""
        columns = None if self.deviations is not None else shards.columns(self.down.weight)
        if columns is None:
            shards.keep_whole(self, "its inner elements are counted together, or are fewer segments than ranks")
            return
        own = columns.inputs
        self.gate_up.take_rows(np.concatenate((own, self.size + own)))
        self.down.take_columns(columns, shards.group)
        self.size = len(own)

    def __call__(self, hidden: Tensor, step: ForwardStep, residual: Tensor | None = None) -> Tensor:
        """hidden [T, hidden_size] → output (+ residual), [T, hidden_size]."""
        kernels = self._kernels
        if self.deviations is None:
            gated = kernels.gated_linear(
                hidden,
                self.gate_up.weight.value,
                self.activation,
                self.gate_up.bias_value,
                adapters=self.gate_up.adapted(step),
            )
            return self.down(gated, step, residual)
        gate, up = kernels.split(self.gate_up(hidden, step), (self.size, self.size))
        gate = kernels.activate(kernels.statistical_topk(gate, self.deviations), self.activation)
        return self.down(kernels.multiply(gate, up), step, residual)


class NormedFeedForward(Layer):
    """norm(feed_forward(norm(x))): one of several that read the same and have norms of their own."""

    def __init__(self, before: Norm | None, feed_forward: FeedForward, after: Norm) -> None:
        self.before = before
        self.feed_forward = feed_forward
        self.after = after

    def __call__(self, hidden: Tensor, step: ForwardStep, residual: Tensor | None = None) -> Tensor:
        """hidden [T, hidden_size] → output (+ residual), [T, hidden_size]."""
        assert residual is None  # the caller adds it after the norm
        normed = hidden if self.before is None else self.before(hidden)[0]
        return self.after(self.feed_forward(normed, step))[0]


class SummedFeedForward(Layer):
    """The sum of two feed-forward layers that read the same."""

    def __init__(self, kernels: KernelSet, first: FeedForward, second: FeedForward) -> None:
        self._add = kernels.add
        self.first, self.second = first, second

    def __call__(self, hidden: Tensor, step: ForwardStep, residual: Tensor | None = None) -> Tensor:
        """hidden [T, hidden_size] → output (+ residual), [T, hidden_size]."""
        total = self._add(self.first(hidden, step), self.second(hidden, step))
        return total if residual is None else self._add(residual, total)


class PlainMlp(Layer):
    """down(activation(up(x)))."""

    def __init__(
        self,
        kernels: KernelSet,
        prefix: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation = "gelu",
        bias: bool = False,
    ) -> None:
        self._activate = kernels.activate
        self.activation: Activation = activation
        self.up = Linear(kernels, ((f"{prefix}.up_proj", intermediate_size),), hidden_size, bias=bias)
        last = ((f"{prefix}.down_proj", hidden_size),)
        self.down = Linear(kernels, last, intermediate_size, bias=bias, segment=1)

    def shard(self, shards: Shards) -> None:
        """Each rank has some of the inner elements."""
        if (columns := shards.columns(self.down.weight)) is None:
            shards.keep_whole(self, "its inner elements are fewer segments than ranks")
            return
        self.up.take_rows(columns.inputs)
        self.down.take_columns(columns, shards.group)

    def __call__(self, hidden: Tensor, step: ForwardStep, residual: Tensor | None = None) -> Tensor:
        """hidden [T, hidden_size] → output (+ residual), [T, hidden_size]."""
        return self.down(self._activate(self.up(hidden, step), self.activation), step, residual)
