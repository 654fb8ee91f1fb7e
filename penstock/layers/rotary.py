"""Rotary position embedding: inverse frequencies of every scaling kind, and their tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """How positions become angles (Su et al. 2021, arXiv:2104.09864) and how that is stretched.

    Attributes:
        kind: one of ROPE_KINDS, or "none": positions turn nothing.
        theta: base of the geometric progression of wavelengths.
        rotary_dim: leading elements of a head that are rotated (even).
        original_length: positions the model was trained on before stretching.
        factor: how many times longer the stretched context is.
        low_freq_factor, high_freq_factor: "llama3" only: bounds of the blended band, in turns per original_length.
        beta_fast, beta_slow: "yarn" only: the same bounds, in turns per original_length.
        truncate: "yarn" only: round the band's bounds to whole dimensions.
        attention_factor: multiplies cos and sin; for "yarn" and "longrope" already derived from the factor.
        share: "proportional" only: the part of the pairs that turns, the fastest ones; the others stay as they are.
        short_factors, long_factors: "longrope" only: divisors of every pair's frequency, for engines whose sequences
            stay within original_length and for all others.
        axes: of several axes of positions, the one that turns each pair (`section_axes`, `turn_axes`); () for one axis.
    """

    kind: str
    theta: float
    rotary_dim: int
    original_length: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    share: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    axes: tuple[int, ...] = ()


def section_axes(sections: Sequence[int]) -> tuple[int, ...]:
    """Each pair's axis, the first `sections[0]` pairs having axis 0, and so on (Qwen2-VL, arXiv:2409.12191)."""
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))


def turn_axes(sections: Sequence[int]) -> tuple[int, ...]:
    """Each pair's axis where axes take turns, as long as each has pairs left; all others have axis 0 (Qwen3-VL).

    Every axis turns fast and slow pairs then.
    """
    count = len(sections)
    return tuple(pair % count if pair < count * sections[pair % count] else 0 for pair in range(sum(sections)))


def inverse_frequencies(rope: RopeParameters, max_length: int) -> Tensor:
    """Radians per position of every rotated pair, [rotary_dim / 2] float32.

    Args:
        rope: the scaling.
        max_length: longest sequence that will be served. Only "longrope" and "dynamic" depend on it: the published
            methods (frequencies, or with NTK-aware scaling a base, that change with the sequence) would re-rotate every
            cached key whenever a sequence grows. Keys are cached rotated, so one choice holds for an engine's life: the
            one for max_length, and the unstretched one if max_length is within the original length.
    """
    theta = rope.theta
    dim = rope.rotary_dim
    if rope.kind == "dynamic" and max_length > rope.original_length:
        stretch = rope.factor * max_length / rope.original_length - (rope.factor - 1)
        theta *= stretch ** (dim / (dim - 2))
    frequencies = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if rope.kind == "none":
        return torch.zeros(dim // 2)
    if rope.kind == "longrope":  # Ding et al. 2024, arXiv:2402.13753
        long = max_length > rope.original_length
        return frequencies / torch.tensor(rope.long_factors if long else rope.short_factors)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "proportional":
        frequencies[int(rope.share * dim // 2) :] = 0.0
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn(rope, frequencies)
    return frequencies


def _llama3(rope: RopeParameters, frequencies: Tensor) -> Tensor:
    """Llama 3.1's blend: slow pairs are interpolated, fast ones kept (Llama 3 report, arXiv:2407.21783)."""
    turns = rope.original_length * frequencies / (2 * math.pi)
    width = rope.high_freq_factor - rope.low_freq_factor
    kept = (turns - rope.low_freq_factor) / width if width else (turns >= rope.low_freq_factor).float()
    keep = kept.clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / rope.factor)


def _yarn(rope: RopeParameters, frequencies: Tensor) -> Tensor:
    """YaRN's blend, linear over dimensions (Peng et al. 2023, arXiv:2309.00071)."""

    def dimension(turns: float) -> float:
        return rope.rotary_dim * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    pairs = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    interpolate = ((pairs - low) / (high - low or 0.001)).clamp(0.0, 1.0)
    return frequencies * (1.0 - interpolate) + frequencies / rope.factor * interpolate


def longrope_attention_factor(factor: float, original_length: int) -> float:
    """LongRoPE's temperature, as a factor on cos and sin (Phi-3 report, arXiv:2404.14219)."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_length))


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """YaRN's temperature on attention, as a factor on cos and sin (arXiv:2309.00071, section 3.4)."""
    if mscale and mscale_all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, weight: float) -> float:
    """The temperature's square root for a stretch by `factor`, more or less of it by `weight`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries grow with the position p: 1 + weight · log(1 + floor((p + offset) / length)) (arXiv:2501.19399)."""

    length: float
    weight: float
    offset: int = 0


class Rotary:
    """The frequencies of one rotation; shared by all layers with equal parameters."""

    def __init__(self, rope: RopeParameters, max_length: int) -> None:
        if rope.axes and len(rope.axes) != rope.rotary_dim // 2:
            raise ValueError(f"{len(rope.axes)} axes are told of {rope.rotary_dim // 2} rotated pairs; give one a pair")
        self.rope = rope
        self.frequencies = inverse_frequencies(rope, max_length)
        self._axes = torch.tensor(rope.axes, dtype=torch.int32) if rope.axes else None
        self._copies: dict[torch.device, tuple[Tensor, Tensor | None]] = {}

    def beside(self, positions: object) -> tuple[Tensor, Tensor | None]:
        """The frequencies and the pairs' axes on the device of `positions`; a recording's handles are on the CPU."""
        if not isinstance(positions, Tensor) or positions.device.type == "cpu":
            return self.frequencies, self._axes
        device = positions.device
        if device not in self._copies:
            axes = None if self._axes is None else self._axes.to(device)
            self._copies[device] = self.frequencies.to(device), axes
        return self._copies[device]
