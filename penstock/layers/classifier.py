"""What one pooled hidden state passes: classification heads, and the dense layers of sentence embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import functional

from penstock.layers.norm import Norm
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
        norm: Norm | None = None,
    ) -> None:
        self.dense = dense
        self.activation = activation
        self.norm = norm
        self.output = output

    def __call__(self, pooled: Tensor) -> Tensor:
        """pooled [1, hidden_size] float32 → scores [1, labels] float32."""
        for part in (self.dense, self.activation):
            pooled = pooled if part is None else part(pooled)
        return self.output(pooled if self.norm is None else self.norm(pooled)[0])


class Projection(Layer):
    """Dense layers with activations, one after the other."""

    def __init__(self, layers: Sequence[tuple[Dense, Callable[[Tensor], Tensor] | None]]) -> None:
        self.layers = tuple(dense for dense, _ in layers)
        self._activations = tuple(activation for _, activation in layers)

    def __call__(self, pooled: Tensor) -> Tensor:
        """pooled [n, hidden_size] float32 → [n, outputs of the last layer] float32."""
        for dense, activation in zip(self.layers, self._activations, strict=True):
            pooled = dense(pooled) if activation is None else activation(dense(pooled))
        return pooled
