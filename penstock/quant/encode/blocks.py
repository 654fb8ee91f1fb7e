"""Encoders of the GGUF formats that need no search, and of 16-bit floats: float32 → blocks, in numpy.

Where a format's rounding is fixed by ggml, results equal its own to the bit. The ternary formats take the scale with
the least squared error, which is exact for ternary weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from penstock.quant.formats.mxfp4 import half_scale
from penstock.quant.formats.record import Bytes, Floats

Encoder = Callable[[Floats, Floats | None], Bytes]
"""([n, block] values, importance [n, block] or None) → [n, block bytes]."""

_E2M1_MIDDLES: Floats = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=np.float32)
_DIGITS = np.array([81, 27, 9, 3, 1], dtype=np.uint8)[:, None]


def _half_bytes(scales: Floats) -> Bytes:
    """[n, 1] float32 → [n, 2]; what is beyond the largest half stays at it."""
    return np.clip(scales, -65504, 65504).astype("<f2").view(np.uint8).reshape(-1, 2)


def _reciprocal(scales: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        return np.where(scales == 0, np.float32(0), np.float32(1) / scales)


def _nibbles(codes: Bytes) -> Bytes:
    """[n, 32] codes below 16 → [n, 16]: value i low, value i + 16 high."""
    return codes[:, :16] | (codes[:, 16:] << np.uint8(4))


def _fifth_bits(codes: Bytes) -> Bytes:
    return np.packbits(codes >> np.uint8(4), axis=1, bitorder="little")


def _around_zero(values: Floats, bits: int) -> tuple[Bytes, Bytes]:
    """Scale bytes and codes: the value of largest magnitude takes the code 0, which stands for -2 ** (bits - 1)."""
    middle = 2 ** (bits - 1)
    peaks = np.take_along_axis(values, np.abs(values).argmax(axis=1)[:, None], axis=1)
    scales = peaks / np.float32(-middle)
    codes = np.trunc(values * _reciprocal(scales) + np.float32(middle + 0.5))
    return _half_bytes(scales), np.minimum(codes, 2 * middle - 1).astype(np.uint8)


def _from_minimum(values: Floats, bits: int) -> tuple[Bytes, Bytes]:
    """Scale and minimum bytes, and codes from 0 at the minimum to the largest at the maximum."""
    most = 2**bits - 1
    low = values.min(axis=1, keepdims=True)
    scales = (values.max(axis=1, keepdims=True) - low) / np.float32(most)
    codes = np.trunc((values - low) * _reciprocal(scales) + np.float32(0.5))
    return np.concatenate([_half_bytes(scales), _half_bytes(low)], axis=1), np.minimum(codes, most).astype(np.uint8)


def _q4_0(values: Floats, importance: Floats | None) -> Bytes:
    head, codes = _around_zero(values, 4)
    return np.concatenate([head, _nibbles(codes)], axis=1)


def _q4_1(values: Floats, importance: Floats | None) -> Bytes:
    head, codes = _from_minimum(values, 4)
    return np.concatenate([head, _nibbles(codes)], axis=1)


def _q5_0(values: Floats, importance: Floats | None) -> Bytes:
    head, codes = _around_zero(values, 5)
    return np.concatenate([head, _fifth_bits(codes), _nibbles(codes & np.uint8(15))], axis=1)


def _q5_1(values: Floats, importance: Floats | None) -> Bytes:
    head, codes = _from_minimum(values, 5)
    return np.concatenate([head, _fifth_bits(codes), _nibbles(codes & np.uint8(15))], axis=1)


def _q8_0(values: Floats, importance: Floats | None) -> Bytes:
    scales = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    scaled = values * _reciprocal(scales)
    away = np.copysign(np.floor(np.abs(scaled) + np.float32(0.5)), scaled)  # halves go away from zero
    return np.concatenate([_half_bytes(scales), away.astype(np.int8).view(np.uint8)], axis=1)


def e2m1_codes(values: Floats) -> Bytes:
    """The nearest 4-bit float (0, 0.5, 1, 1.5, 2, 3, 4, 6; OCP MX v1.0) of each value; ties go to the smaller."""
    magnitudes = np.abs(values)
    codes = np.zeros(values.shape, dtype=np.uint8)
    for middle in _E2M1_MIDDLES:
        codes += magnitudes > middle
    return codes | np.where((values < 0) & (codes > 0), np.uint8(8), np.uint8(0))


def _mxfp4(values: Floats, importance: Floats | None) -> Bytes:
    """The shared exponent is that of the largest magnitude, less the 2 of E2M1's largest (OCP MX v1.0, 6.3)."""
    peaks = np.abs(values).max(axis=1, keepdims=True)
    exponents = np.clip(np.frexp(peaks)[1] - 1 - 2 + 127, 0, 254)
    scales = np.where(peaks > 0, exponents, 0).astype(np.uint8)
    codes = e2m1_codes(values / (np.float32(2) * half_scale(scales)))
    return np.concatenate([scales, _nibbles(codes)], axis=1)


def _ternary(values: Floats, importance: Floats | None) -> tuple[Bytes, Bytes]:
    """Scale bytes and codes 0, 1, 2 for -d, 0, d of the least Σ w (x - d · code)².

    For any d the best codes are not 0 for the largest magnitudes; so all numbers of them are tried.
    """
    magnitudes = np.abs(values)
    if importance is None:
        ordered = np.sort(magnitudes, axis=1)[:, ::-1].astype(np.float64)
        weights = np.ones_like(ordered)
    else:
        order = np.argsort(-magnitudes, axis=1, kind="stable")
        ordered = np.take_along_axis(magnitudes, order, axis=1).astype(np.float64)
        weights = np.take_along_axis(importance, order, axis=1).astype(np.float64)
    count = np.cumsum(weights, axis=1, dtype=np.float64)
    total = np.cumsum(weights * ordered, axis=1)
    taken = np.argmax(total**2 / np.maximum(count, 1e-300), axis=1)[:, None]
    scales = np.take_along_axis(total, taken, axis=1) / np.take_along_axis(np.maximum(count, 1e-300), taken, axis=1)
    kept = magnitudes >= np.take_along_axis(ordered, taken, axis=1)
    codes = np.where(kept, np.sign(values), 0).astype(np.int8) + np.int8(1)
    return _half_bytes(scales.astype(np.float32)), codes.view(np.uint8)


def _tq2_0(values: Floats, importance: Floats | None) -> Bytes:
    head, codes = _ternary(values, importance)
    fields = codes.reshape(-1, 2, 4, 32) << np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    return np.concatenate([np.bitwise_or.reduce(fields, axis=2).reshape(-1, 64), head], axis=1)


def _tq1_0(values: Floats, importance: Floats | None) -> Bytes:
    """Five ternary digits a byte, as the fraction of 256 that lets each be multiplied out."""
    head, codes = _ternary(values, importance)
    count = len(codes)
    numbers = np.concatenate(
        [
            (codes[:, :160].reshape(count, 5, 32) * _DIGITS).sum(axis=1),
            (codes[:, 160:240].reshape(count, 5, 16) * _DIGITS).sum(axis=1),
            (codes[:, 240:].reshape(count, 4, 4) * _DIGITS[:4]).sum(axis=1),
        ],
        axis=1,
    )
    return np.concatenate([((numbers * 256 + 242) // 243).astype(np.uint8), head], axis=1)


def _f16(values: Floats, importance: Floats | None) -> Bytes:
    return np.clip(values, -65504, 65504).astype("<f2").view(np.uint8)


def to_bf16(values: Floats) -> npt.NDArray[np.uint16]:
    """The nearest bfloat16 of finite values, ties to even, as bits."""
    bits = values.view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype("<u2")


def _bf16(values: Floats, importance: Floats | None) -> Bytes:
    return to_bf16(values).view(np.uint8)


def _f32(values: Floats, importance: Floats | None) -> Bytes:
    return values.view(np.uint8)


BLOCK_ENCODERS: Mapping[str, Encoder] = MappingProxyType(
    {
        "f32": _f32,
        "f16": _f16,
        "bf16": _bf16,
        "q4_0": _q4_0,
        "q4_1": _q4_1,
        "q5_0": _q5_0,
        "q5_1": _q5_1,
        "q8_0": _q8_0,
        "mxfp4": _mxfp4,
        "tq1_0": _tq1_0,
        "tq2_0": _tq2_0,
    }
)
"""By format name."""
