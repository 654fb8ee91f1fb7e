"""Formats of one value a block: IEEE floats, bfloat16, 8-bit floats, integers and booleans."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.quant.formats.record import Bytes, Floats, Format


def _numpy_decoder(dtype: str) -> Callable[[Bytes], Floats]:
    def decode(blocks: Bytes) -> Floats:
        return blocks.view(dtype).astype(np.float32)

    return decode


def _decode_bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _float8_table(exponent_bits: int, *, finite: bool) -> Floats:
    """All 256 values of an 8-bit float (OCP 8-bit Floating Point Specification, 2023).

    Args:
        exponent_bits: 4 (E4M3) or 5 (E5M2).
        finite: no infinities; only all-ones is NaN (E4M3). Otherwise IEEE rules (E5M2).
    """
    mantissa_bits = 7 - exponent_bits
    bias = 2 ** (exponent_bits - 1) - 1
    code = np.arange(256)
    exponent = (code >> mantissa_bits) & (2**exponent_bits - 1)
    fraction = (code & (2**mantissa_bits - 1)) / 2**mantissa_bits
    value = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    if finite:
        value[(code & 0x7F) == 0x7F] = np.nan
    else:
        top = exponent == 2**exponent_bits - 1
        value[top] = np.where(fraction[top] == 0, np.inf, np.nan)
    signed: Floats = np.where(code >= 128, -value, value).astype(np.float32)
    return signed


def _float8_decoder(exponent_bits: int, *, finite: bool) -> Callable[[Bytes], Floats]:
    table = _float8_table(exponent_bits, finite=finite)

    def decode(blocks: Bytes) -> Floats:
        return table[blocks]

    return decode


PLAIN_FORMATS: tuple[Format, ...] = (
    Format("f32", 1, 4, _numpy_decoder("<f4")),
    Format("f16", 1, 2, _numpy_decoder("<f2")),
    Format("bf16", 1, 2, _decode_bf16),
    Format("f64", 1, 8, _numpy_decoder("<f8")),
    Format("f8_e4m3", 1, 1, _float8_decoder(4, finite=True)),
    Format("f8_e5m2", 1, 1, _float8_decoder(5, finite=False)),
    Format("bool", 1, 1, _numpy_decoder("?")),
    *(
        Format(f"{kind}{8 * size}", 1, size, _numpy_decoder(f"<{kind}{size}"))
        for kind in ("i", "u")
        for size in (1, 2, 4, 8)
    ),
)
