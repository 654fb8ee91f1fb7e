"""Classification heads: scores of labels from one pooled hidden state."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from penstock.layers.weight import Layer, Weight, WeightPart


class Dense(Layer):
    """y = x · Wᵀ + b of a few rows, in float32."""

    def __init__(self, key: str, inputs: int, outputs: int, *, bias: bool) -> None:
        self.weight = Weight((outputs, inputs), (WeightPart(f"{key}.weight", (outputs, inputs)),), keep_float32=True)
        shape = (outputs,)
        self.bias = Weight(shape, (WeightPart(f"{key}.bias", shape),), keep_float32=True) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, inputs] float32 → [n, outputs]."""
        return functional.linear(x, self.weight.value, None if self.bias is None else self.bias.value)


class Classifier(Layer):
    """output(norm(activation(dense(x)))), where all but the output may be absent."""

    def __init__(
        self,
        output: Dense,
        dense: Dense | None = None,
        activation: Callable[[Tensor], Tensor] | None = None,
        norm: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.dense, self.activation, self.norm, self.output = dense, activation, norm, output

    def __call__(self, pooled: Tensor) -> Tensor:
        """pooled [1, hidden_size] float32 → scores [1, labels] float32."""
        for part in (self.dense, self.activation, self.norm):
            pooled = pooled if part is None else part(pooled)
        return self.output(pooled)
