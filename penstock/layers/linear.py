"""Dense layers; several checkpoint matrices may be merged into one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from penstock.kernels.api import KernelSet
from penstock.layers.weight import Layer, Weight, WeightPart


def merged(parts: Sequence[tuple[str, int]], suffix: str, *columns: int) -> Weight:
    """A weight of the parts' rows one after the other: parts are (key prefix, rows), keys end in `suffix`."""
    placed: list[WeightPart] = []
    rows = 0
    for prefix, count in parts:
        placed.append(WeightPart(f"{prefix}.{suffix}", (count, *columns), offset=rows))
        rows += count
    return Weight((rows, *columns), tuple(placed), shard_axis=0)


class Linear(Layer):
    """y = x · Wᵀ + b (+ residual). W is [sum of outputs, inputs], merged from `parts` (key prefix, outputs)."""

    def __init__(self, kernels: KernelSet, parts: Sequence[tuple[str, int]], inputs: int, *, bias: bool) -> None:
        self._linear = kernels.linear
        self.weight = merged(parts, "weight", inputs)
        self.weight.pack, self.weight.packable = kernels.pack_linear, kernels.packable
        self.bias = merged(parts, "bias") if bias else None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [T, inputs], residual [T, outputs] → [T, outputs]."""
        bias = None if self.bias is None else self.bias.value
        return self._linear(x, self.weight.value, bias, residual)
