"""Formats of GGUF files with one scale a block for values of one or two bits: TQ1_0, TQ2_0, Q1_0 and Q2_0."""

from __future__ import annotations

import numpy as np

from penstock.quant.formats.fields import CRUMBS, half, signs, unpack
from penstock.quant.formats.record import Bytes, Floats, Format

_POWERS_OF_THREE = np.array([1, 3, 9, 27, 81], dtype=np.uint8)[:, None]


def _trits(packed: Bytes, run: int, count: int) -> Bytes:
    """[n, b] bytes → [n, b · count] digits 0 … 2. A byte is ceil(256 · x / 243) of a number x of five ternary digits:
    times three, the first digit overflows, and the rest of it is the fraction that the next one is taken from."""
    rest = packed.reshape(len(packed), -1, 1, run) * _POWERS_OF_THREE[:count]
    return (rest.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(packed), -1)


def _decode_tq1_0(blocks: Bytes) -> Floats:
    """48 bytes of five digits (first digits of 32 bytes together, then the second ones; 16 bytes after them likewise),
    four bytes of four, d."""
    parts = [_trits(blocks[:, :32], 32, 5), _trits(blocks[:, 32:48], 16, 5), _trits(blocks[:, 48:52], 4, 4)]
    return half(blocks, 52) * (np.concatenate(parts, axis=1).astype(np.float32) - np.float32(1))


def _decode_tq2_0(blocks: Bytes) -> Floats:
    codes = unpack(blocks[:, :64], 32, CRUMBS, 3).reshape(-1, 256)
    return half(blocks, 64) * (codes.astype(np.float32) - np.float32(1))


def _decode_q1_0(blocks: Bytes) -> Floats:
    """A set bit is d, a clear one -d."""
    return half(blocks, 0) * -signs(blocks[:, 2:])


def _decode_q2_0(blocks: Bytes) -> Floats:
    """As TQ2_0, the four fields of a byte side by side."""
    codes = unpack(blocks[:, 2:], 1, CRUMBS, 3).reshape(-1, 64)
    return half(blocks, 0) * (codes.astype(np.float32) - np.float32(1))


TERNARY_FORMATS: tuple[Format, ...] = (
    Format("tq1_0", 256, 54, _decode_tq1_0),
    Format("tq2_0", 256, 66, _decode_tq2_0),
    Format("q1_0", 128, 18, _decode_q1_0),
    Format("q2_0", 64, 18, _decode_q2_0),
)
