"""Normalisation layers."""

from __future__ import annotations

from torch import Tensor

from penstock.kernels.api import KernelSet
from penstock.layers.weight import Layer, Weight, WeightPart


def one_plus(scale: Tensor) -> Tensor:
    """The scale of checkpoints that store its distance from one."""
    return scale.float() + 1.0


def scale_weight(key: str, size: int, *, around_one: bool, repeat: int = 0) -> WeightPart:
    """The part holding a norm's scale [size]; with `repeat`, laid out as [repeat, size]."""

    def place(scale: Tensor) -> Tensor:
        scale = one_plus(scale) if around_one else scale
        return scale.expand(repeat, size) if repeat else scale

    return WeightPart(key, (size,), transform=place if around_one or repeat else None)


class RmsNorm(Layer):
    """RMS norm whose scale stays in float32; `around_one` for checkpoints that store scale - 1 (Gemma)."""

    def __init__(self, kernels: KernelSet, key: str, size: int, eps: float, *, around_one: bool = False) -> None:
        self._norm = kernels.rms_norm
        self.eps = eps
        self.weight = Weight((size,), (scale_weight(key, size, around_one=around_one),), keep_float32=True)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x, residual [T, size] → (normalised sum, sum)."""
        return self._norm(x, self.weight.value, self.eps, residual)
