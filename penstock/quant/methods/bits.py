"""Fields of 1 to 8 bits in little-endian bit streams."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.quant.formats.record import Bytes

# bits → wide type, then (shift, mask) of each step that moves the upper half of every field away
_SPREADS: Mapping[int, tuple[str, tuple[tuple[int, int], ...]]] = MappingProxyType(
    {
        4: ("<u2", ((4, 0x0F0F),)),
        2: ("<u4", ((12, 0x000F000F), (6, 0x03030303))),
        1: ("<u8", ((28, 0x0000000F0000000F), (14, 0x0003000300030003), (7, 0x0101010101010101))),
    }
)


def _spread(data: Bytes, bits: int) -> Bytes:
    """Each byte becomes a wide integer whose bytes are its fields: whole-array shifts, which vectorise."""
    dtype, steps = _SPREADS[bits]
    wide = data.astype(dtype)
    for shift, mask in steps:
        wide |= wide << wide.dtype.type(shift)
        wide &= wide.dtype.type(mask)
    return wide.view(np.uint8)


def unpack(data: Bytes, bits: int) -> Bytes:
    """Bytes → fields, along the last axis; the first field lies in the lowest bits of the first byte.

    Args:
        data: [..., n] contiguous uint8.
        bits: 1 to 8.

    Returns:
        [..., m] uint8: every whole field, and as many as follow until a field ends on a byte's border.
    """
    if bits == 8:
        return data
    if 8 % bits == 0:
        return _spread(data, bits)
    run = math.lcm(bits, 8) // 8  # bytes in which whole fields fit
    odd = -data.shape[-1] % run
    if odd:
        data = np.pad(data, [(0, 0)] * (data.ndim - 1) + [(0, odd)])
    fields = run * 8 // bits
    runs = data.reshape(*data.shape[:-1], -1, run)
    out = np.empty((*runs.shape[:-1], fields), dtype=np.uint8)
    for field in range(fields):
        byte, shift = divmod(field * bits, 8)
        value = runs[..., byte] >> np.uint8(shift)
        if shift + bits > 8:
            value |= runs[..., byte + 1] << np.uint8(8 - shift)
        out[..., field] = value & np.uint8(2**bits - 1)
    return out.reshape(*data.shape[:-1], -1)


def unpack_words(words: npt.NDArray[Any], bits: int) -> Bytes:
    """The same for little-endian words of any size: [..., n] → [..., n · word bits / bits or more] uint8."""
    return unpack(np.ascontiguousarray(words).view(np.uint8), bits)
