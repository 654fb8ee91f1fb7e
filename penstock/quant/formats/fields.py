"""Reading fields of bits, scales and signs out of [n, bytes] blocks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.quant.formats.record import Bytes, Floats

NIBBLES = np.array([0, 4], dtype=np.uint8)[:, None]
CRUMBS = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
BITS = np.arange(8, dtype=np.uint8)


def half(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte `start` of every block, as [n, 1] float32."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def words(blocks: Bytes, start: int, end: int, kind: str) -> npt.NDArray[np.uint32]:
    """Bytes start … end of every block as little-endian words of numpy type `kind`, widened to [n, words] uint32."""
    return np.ascontiguousarray(blocks[:, start:end]).view(kind).astype(np.uint32)


def unpack(packed: Bytes, run: int, shifts: npt.NDArray[np.uint8], mask: int) -> Bytes:
    """[n, b] bytes → [n, b / run, len(shifts), run]: each run of bytes holds len(shifts) fields, lowest bits first."""
    return (packed.reshape(len(packed), -1, 1, run) >> shifts) & np.uint8(mask)


def low_nibbles_first(packed: Bytes) -> Bytes:
    """[n, 16] → [n, 32]: low nibbles are values 0 … 15, high nibbles 16 … 31."""
    return unpack(packed, 16, NIBBLES, 0x0F).reshape(len(packed), 32)


def nibbles(packed: Bytes) -> Bytes:
    """[n, b] → [n, 2 · b]: the two nibbles of each byte side by side, low first."""
    return unpack(packed, 1, NIBBLES, 0x0F).reshape(len(packed), -1)


def scaled(scale: Floats, quants: npt.NDArray[np.float32]) -> Floats:
    """scale [n, s] times quants [n, …], each scale for an equal share of consecutive values → [n, s, share]."""
    return scale[:, :, None] * quants.reshape(len(quants), scale.shape[1], -1)


def signs(bits: Bytes) -> Floats:
    """[n, b] bytes → [n, 8 · b]: -1 where a bit is set, else 1, lowest bits first."""
    return np.float32(1) - np.float32(2) * np.unpackbits(bits, axis=1, bitorder="little").astype(np.float32)
