"""The slopes of scores over distance (ALiBi, Press et al. 2021, arXiv:2108.12409)."""

from __future__ import annotations


def slopes(heads: int, most: float = 8.0, scale: float = 1.0) -> tuple[float, ...]:
    """One slope a head, times `scale`: 2^(-most · k / n), k from 1, where n is the number of heads, a power of two.

    For other numbers they are those of the next power, every second of them first.
    """
    whole = 1 << (heads - 1).bit_length()
    every = [scale * 2.0 ** (-most * place / whole) for place in range(1, whole + 1)]
    ordered = every if whole == heads else every[1::2] + every[::2]
    return tuple(ordered[:heads])
