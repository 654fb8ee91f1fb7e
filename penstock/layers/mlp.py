"""Feed-forward layers."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from penstock.kernels.api import Activation, KernelSet
from penstock.layers.linear import Linear, Rows
from penstock.layers.step import Step
from penstock.layers.weight import Layer


class GatedMlp(Layer):
    """down(activation(gate(x)) · up(x)), with gate and up merged into one product (also `gate_up_proj` on disk).

    `factors` are those of the gate's product and of the output.
    """

    def __init__(
        self,
        kernels: KernelSet,
        prefix: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation = "silu",
        bias: bool = False,
        factors: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        self._gated = kernels.gated_linear
        self.activation: Activation = activation
        size = intermediate_size
        parts = (Rows(f"{prefix}.gate_proj", size, factor=factors[0]), Rows(f"{prefix}.up_proj", size))
        both = np.repeat(np.array([factors[0], 1.0], np.float32), size)
        fused = Rows(f"{prefix}.gate_up_proj", 2 * size, factor=both)
        self.gate_up = Linear(kernels, parts, hidden_size, bias=bias, fused=(fused,))
        self.gate_up.weight.halves = True
        self.down = Linear(kernels, (Rows(f"{prefix}.down_proj", hidden_size, factor=factors[1]),), size, bias=bias)

    def __call__(self, hidden: Tensor, step: Step, residual: Tensor | None = None) -> Tensor:
        """hidden [T, hidden_size] → output (+ residual), [T, hidden_size]."""
        gated = self._gated(hidden, self.gate_up.weight.value, self.activation, self.gate_up.bias_value)
        return self.down(gated, residual)


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
        self.down = Linear(kernels, ((f"{prefix}.down_proj", hidden_size),), intermediate_size, bias=bias)

    def __call__(self, hidden: Tensor, step: Step, residual: Tensor | None = None) -> Tensor:
        """hidden [T, hidden_size] → output (+ residual), [T, hidden_size]."""
        return self.down(self._activate(self.up(hidden), self.activation), residual)
