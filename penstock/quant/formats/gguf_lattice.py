"""Formats of GGUF files that store runs of four or eight values as points of a lattice: IQ1_S to IQ3_S.

A code picks a point of magnitudes from a fixed grid; its signs are stored beside it, in the `xxs` and `xs` formats
seven of eight, the eighth making their number even (E8 and D4 lattices: Tseng et al., "QuIP#", 2024). One-bit formats
have no signs but a shift of a run by an eighth up or down. Every value is an integer times a scale without rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.quant.formats.fields import half, nibbles, scaled, signs, words
from penstock.quant.formats.record import Bytes, Floats, Format

Integers = npt.NDArray[np.integer[Any]]

_IQ2 = (8, 25, 43)
# Points and magnitudes of each grid, in the order of the data file.
_GRIDS: tuple[tuple[str, int, tuple[int, ...]], ...] = (
    ("iq2_xxs", 256, _IQ2),
    ("iq2_xs", 512, _IQ2),
    ("iq2_s", 1024, _IQ2),
    ("iq3_xxs", 256, (4, 12, 20, 28, 36, 44, 52, 62)),
    ("iq3_s", 512, (1, 3, 5, 7, 9, 11, 13, 15)),
    ("iq1", 2048, (-8, 0, 8)),
)
_SIGN_FIELDS = np.array([0, 7, 14, 21], dtype=np.uint32)


@functools.cache
def grids() -> Mapping[str, Floats]:
    """The grid of each format ("iq1" for both): [points, 8 or 4] magnitudes; of iq1 in eighths, with their signs."""
    text = resources.files("penstock.quant.formats").joinpath("lattice_grids.txt").read_text(encoding="ascii")
    words_of = " ".join(line for line in text.splitlines() if not line.startswith("#")).split()
    codes = np.array([int(word, 16) for word in words_of], dtype=np.uint16)
    found: dict[str, Floats] = {}
    for name, points, magnitudes in _GRIDS:
        own, codes = np.split(codes, [points])
        bits = 2 if len(magnitudes) == 3 else 4
        fields = own[:, None] >> np.arange(0, 16, bits, dtype=np.uint16) & np.uint16(2**bits - 1)
        found[name] = np.array(magnitudes, dtype=np.float32)[fields]
        found[name].flags.writeable = False
    return MappingProxyType(found)


def _even_signs(fields: Integers) -> Floats:
    """[n, r] seven sign bits each → [n, 8 · r]: the eighth makes their number even."""
    seven = (fields & 0x7F).astype(np.uint8)
    parity = seven ^ seven >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    return signs((seven | (parity & 1) << 7).astype(np.uint8))


def _signed(name: str, indices: Integers, sign: Floats) -> Floats:
    return grids()[name][indices].reshape(len(indices), -1) * sign


def _odd(codes: Integers, d: Floats, factor: float) -> Floats:
    """Scales d · factor · (2 · code + 1)."""
    return d * np.float32(factor) * (2 * codes.astype(np.float32) + 1)


def _decode_iq2_xxs(blocks: Bytes) -> Floats:
    """d, then for each 32 values four indices of a byte, four times seven signs and a four-bit scale."""
    pairs = words(blocks, 2, 66, "<u4").reshape(len(blocks), 8, 2)
    indices = np.ascontiguousarray(pairs[..., 0]).astype("<u4").view(np.uint8).reshape(len(blocks), 32)
    sign = _even_signs((pairs[..., 1, None] >> _SIGN_FIELDS).reshape(len(blocks), -1))
    scale = _odd(pairs[..., 1] >> 28, half(blocks, 0), 0.125)
    return scaled(scale, _signed("iq2_xxs", indices.astype(np.uint32), sign)).reshape(-1, 256)


def _decode_iq2_xs(blocks: Bytes) -> Floats:
    """d, 32 words of a nine-bit index and seven signs, four-bit scales of 16 values."""
    codes = words(blocks, 2, 66, "<u2")
    scale = _odd(nibbles(blocks[:, 66:]), half(blocks, 0), 0.125)
    return scaled(scale, _signed("iq2_xs", codes & 511, _even_signs(codes >> 9))).reshape(-1, 256)


def _decode_iq2_s(blocks: Bytes) -> Floats:
    """d, 32 low bytes of indices, 32 of signs, two high bits of each index, four-bit scales of 16 values."""
    high = words(blocks, 66, 74, "<u2").repeat(8, axis=1) >> np.tile(np.arange(0, 16, 2, dtype=np.uint32), 4) & 3
    indices = words(blocks, 2, 34, "u1") | high << 8
    scale = _odd(nibbles(blocks[:, 74:]), half(blocks, 0), 0.125)
    return scaled(scale, _signed("iq2_s", indices, signs(blocks[:, 34:66]))).reshape(-1, 256)


def _decode_iq3_xxs(blocks: Bytes) -> Floats:
    """d, 64 indices of a byte, then for each 32 values four times seven signs and a four-bit scale."""
    tail = words(blocks, 66, 98, "<u4")
    sign = _even_signs((tail[..., None] >> _SIGN_FIELDS).reshape(len(blocks), -1))
    scale = _odd(tail >> 28, half(blocks, 0), 0.25)
    return scaled(scale, _signed("iq3_xxs", words(blocks, 2, 66, "u1"), sign)).reshape(-1, 256)


def _decode_iq3_s(blocks: Bytes) -> Floats:
    """d, 64 low bytes of indices, a high bit of each, signs, four-bit scales of 32 values."""
    high = np.unpackbits(blocks[:, 66:74], axis=1, bitorder="little").astype(np.uint32)
    indices = words(blocks, 2, 66, "u1") | high << 8
    scale = _odd(nibbles(blocks[:, 106:]), half(blocks, 0), 1)
    return scaled(scale, _signed("iq3_s", indices, signs(blocks[:, 74:106]))).reshape(-1, 256)


def _shifted(indices: Integers, down: npt.NDArray[np.bool_]) -> Floats:
    """Points of the one-bit grid in eighths, each moved up by one, or down where told: [n, r] → [n, r, 8]."""
    return grids()["iq1"][indices] + np.where(down, np.float32(-1), np.float32(1))[..., None]


def _decode_iq1_s(blocks: Bytes) -> Floats:
    """d, 32 low bytes of indices, then a word for each 32 values: four times three high bits, scale, shift."""
    tail = words(blocks, 34, 50, "<u2")
    high = tail[..., None] >> np.arange(0, 12, 3, dtype=np.uint32) & 7
    indices = words(blocks, 2, 34, "u1") | high.reshape(len(blocks), -1) << 8
    runs = _shifted(indices, (tail >= 0x8000).repeat(4, axis=1))
    return scaled(_odd(tail >> 12 & 7, half(blocks, 0), 0.125), runs).reshape(-1, 256)


def _decode_iq1_m(blocks: Bytes) -> Floats:
    """32 low bytes of indices, a nibble for each (three high bits, shift), four words of four scales of 16 values; d is
    spread over the top nibbles of the words."""
    tail = nibbles(blocks[:, 32:48]).astype(np.uint32)
    packed = words(blocks, 48, 56, "<u2")
    d_bits = (packed >> 12) << np.array([0, 4, 8, 12], dtype=np.uint32)
    d = d_bits.sum(axis=1, keepdims=True).astype(np.uint16).view(np.float16).astype(np.float32)
    codes = (packed[..., None] >> np.arange(0, 12, 3, dtype=np.uint32) & 7).reshape(len(blocks), 16)
    runs = _shifted(words(blocks, 0, 32, "u1") | (tail & 7) << 8, tail >= 8)
    return scaled(_odd(codes, d, 0.125), runs).reshape(-1, 256)


LATTICE_FORMATS: tuple[Format, ...] = (
    Format("iq2_xxs", 256, 66, _decode_iq2_xxs),
    Format("iq2_xs", 256, 74, _decode_iq2_xs),
    Format("iq2_s", 256, 82, _decode_iq2_s),
    Format("iq3_xxs", 256, 98, _decode_iq3_xxs),
    Format("iq3_s", 256, 110, _decode_iq3_s),
    Format("iq1_s", 256, 50, _decode_iq1_s),
    Format("iq1_m", 256, 56, _decode_iq1_m),
)
