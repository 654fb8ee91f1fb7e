"""Normalisation layers."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.api import KernelSet
from penstock.layers.linear import Linear
from penstock.layers.weight import Layer, Weight, WeightPart


class Norm(Protocol):
    """RmsNorm or LayerNorm."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x, residual [T, size] → (normalised sum, sum)."""


def one_plus(scale: Tensor) -> Tensor:
    """The scale of checkpoints that store its distance from one."""
    return scale.float() + 1.0


def scale_weight(key: str, size: int, *, around_one: bool, repeat: int = 0, factor: float = 1.0) -> WeightPart:
    """The part holding a norm's scale [size], times `factor`; with `repeat`, laid out as [repeat, size]."""

    def place(scale: Tensor) -> Tensor:
        scale = one_plus(scale) if around_one else scale
        scale = scale if factor == 1.0 else scale.float() * factor
        return scale.expand(repeat, size) if repeat else scale

    changed = around_one or repeat or factor != 1.0
    return WeightPart(key, (size,), transform=place if changed else None)


class RmsNorm(Layer):
    """RMS norm whose scale stays in float32; `around_one` for checkpoints that store scale - 1 (Gemma).

    `factor` multiplies what comes out.
    """

    def __init__(
        self, kernels: KernelSet, key: str, size: int, eps: float, *, around_one: bool = False, factor: float = 1.0
    ) -> None:
        self._norm = kernels.rms_norm
        self.eps = eps
        part = scale_weight(key, size, around_one=around_one, factor=factor)
        self.weight = Weight((size,), (part,), keep_float32=True)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x, residual [T, size] → (normalised sum, sum)."""
        return self._norm(x, self.weight.value, self.eps, residual)


class Projected(Layer):
    """A norm, if there is one, and a projection of what it gives, in the place of a norm."""

    def __init__(self, norm: Norm | None, projection: Linear) -> None:
        self.norm, self.projection = norm, projection
        projection.knows_tokens = False

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x, residual [T, size] → (projected, normalised sum)."""
        normed = x if self.norm is None else self.norm(x, residual)[0]
        return self.projection(normed, None), normed


class LayerNorm(Layer):
    """Layer norm with weights `<prefix>.weight` and, if `bias`, `<prefix>.bias`, both in float32.

    Options as of RmsNorm; `scaled` tells that there are weights at all.
    """

    def __init__(
        self,
        kernels: KernelSet,
        prefix: str,
        size: int,
        eps: float,
        *,
        bias: bool = True,
        scaled: bool = True,
        around_one: bool = False,
        factor: float = 1.0,
    ) -> None:
        self._norm, self._add = kernels.layer_norm, kernels.add
        self.eps = eps
        scale = scale_weight(f"{prefix}.weight", size, around_one=around_one, factor=factor)
        shift = scale_weight(f"{prefix}.bias", size, around_one=False, factor=factor)
        self.weight = Weight((size,), (scale,), keep_float32=True) if scaled else None
        self.bias = Weight((size,), (shift,), keep_float32=True) if bias else None
        self._unscaled = torch.full((size,), factor)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x, residual [T, size] → (normalised sum, sum)."""
        total = x if residual is None else self._add(residual, x)
        weight = self._unscaled if self.weight is None else self.weight.value
        return self._norm(total, weight, None if self.bias is None else self.bias.value, self.eps), total
