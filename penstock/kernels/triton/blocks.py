"""GGUF blocks as codes with scales, taken apart by torch on the device that will multiply with them.

Layouts are those of ggml's `block_q*` structures. Values equal the format's decoder up to the rounding of a product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

E2M1_DOUBLED = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0)
IQ4_VALUES = tuple(map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)))


@dataclass(frozen=True, slots=True)
class Codes:
    """Codes of a matrix [N, K], a scale a group: scale · (code - zero), scale · code + minimum, or scale · table[code].

    Attributes:
        codes: [N, K] uint8.
        bits: of a code.
        group: inputs that share a scale.
        scales: [N, K / group] float32.
        zero: the zero point where it is one for all.
        zeros: [N, K / group] uint8, or None.
        minimums: [N, K / group] float32, or None.
        table: values of four-bit codes, or None.
    """

    codes: Tensor
    bits: int
    group: int
    scales: Tensor
    zero: int = 0
    zeros: Tensor | None = None
    minimums: Tensor | None = None
    table: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Layout:
    """Of a format: values and bytes of a block, and how blocks [n, bytes] become Codes of n rows."""

    values: int
    size: int
    take: Callable[[Tensor], Codes]


def take_apart(format: str, shape: tuple[int, int], data: Tensor) -> Codes:
    """Codes of rows of blocks; `format` is one of FORMATS, `data` [bytes] uint8 on any device."""
    layout = FORMATS[format]
    rows, inputs = shape
    found = layout.take(data.view(-1, layout.size))

    def by_rows(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.reshape(rows, inputs // found.group).contiguous()

    scales = by_rows(found.scales)
    assert scales is not None
    codes = found.codes.reshape(rows, inputs)
    minimums = by_rows(found.minimums)
    return Codes(codes, found.bits, found.group, scales, found.zero, None, minimums, found.table)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of every block, as [n, 1] float32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _fields(packed: Tensor, run: int, width: int) -> Tensor:
    """[n, b] bytes → [n, b · 8 / width]: runs of bytes hold fields of `width` bits, lowest first, run after run."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device).view(-1, 1)
    fields: Tensor = (packed.reshape(len(packed), -1, 1, run) >> shifts) & (2**width - 1)
    return fields.reshape(len(packed), -1)


def _q4_0(blocks: Tensor) -> Codes:
    return Codes(_fields(blocks[:, 2:], 16, 4), 4, 32, _half(blocks, 0), zero=8)


def _q4_1(blocks: Tensor) -> Codes:
    return Codes(_fields(blocks[:, 4:], 16, 4), 4, 32, _half(blocks, 0), minimums=_half(blocks, 2))


def _fifth_bits(packed: Tensor) -> Tensor:
    return _fields(packed, 1, 1) << 4


def _q5_0(blocks: Tensor) -> Codes:
    codes = _fields(blocks[:, 6:], 16, 4) | _fifth_bits(blocks[:, 2:6])
    return Codes(codes, 5, 32, _half(blocks, 0), zero=16)


def _q5_1(blocks: Tensor) -> Codes:
    codes = _fields(blocks[:, 8:], 16, 4) | _fifth_bits(blocks[:, 4:8])
    return Codes(codes, 5, 32, _half(blocks, 0), minimums=_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Codes:
    return Codes(blocks[:, 2:] ^ 0x80, 8, 32, _half(blocks, 0), zero=128)


def _q2_k(blocks: Tensor) -> Codes:
    packed = blocks[:, :16]
    scales = _half(blocks, 80) * (packed & 15).float()
    return Codes(_fields(blocks[:, 16:80], 32, 2), 2, 16, scales, minimums=-_half(blocks, 82) * (packed >> 4).float())


def _q3_k(blocks: Tensor) -> Codes:
    codes = _fields(blocks[:, 32:96], 32, 2) | _fields(blocks[:, :32], 32, 1) << 2
    packed = blocks[:, 96:108]
    scales = _fields(packed[:, :8], 8, 4) | _fields(packed[:, 8:], 4, 2) << 4
    return Codes(codes, 3, 16, _half(blocks, 108) * (scales.float() - 32.0), zero=4)


def _scales_and_minimums(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The eight scales and minimums of Q4_K and Q5_K, of six bits each in bytes 4 to 16 of a block."""
    first = blocks[:, 4:8]
    second = blocks[:, 8:12]
    third = blocks[:, 12:16]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6) << 4), dim=1)
    minimums = torch.cat((second & 63, (third >> 4) | (second >> 6) << 4), dim=1)
    return _half(blocks, 0) * scales.float(), -_half(blocks, 2) * minimums.float()


def _q4_k(blocks: Tensor) -> Codes:
    scales, minimums = _scales_and_minimums(blocks)
    return Codes(_fields(blocks[:, 16:], 32, 4), 4, 32, scales, minimums=minimums)


def _q5_k(blocks: Tensor) -> Codes:
    scales, minimums = _scales_and_minimums(blocks)
    codes = _fields(blocks[:, 48:], 32, 4) | _fields(blocks[:, 16:48], 32, 1) << 4
    return Codes(codes, 5, 32, scales, minimums=minimums)


def _q6_k(blocks: Tensor) -> Codes:
    codes = _fields(blocks[:, :128], 64, 4) | _fields(blocks[:, 128:192], 32, 2) << 4
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return Codes(codes, 6, 16, _half(blocks, 208) * scales, zero=32)


def _mxfp4(blocks: Tensor) -> Codes:
    exponents = blocks[:, :1].int() - 128
    halved = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    return Codes(_fields(blocks[:, 1:], 16, 4), 4, 32, halved, table=E2M1_DOUBLED)


def _nvfp4(blocks: Tensor) -> Codes:
    packed = blocks[:, :4]
    stored = packed.int() & 127  # the sign is not looked at
    normal = torch.ldexp(8.0 + (stored & 7).float(), (stored >> 3) - 11)
    scales = torch.where(stored < 8, (stored & 7).float() / 1024.0, normal).masked_fill(packed == 127, 0.0)
    return Codes(_fields(blocks[:, 4:], 8, 4), 4, 16, scales, table=E2M1_DOUBLED)


def _iq4_nl(blocks: Tensor) -> Codes:
    return Codes(_fields(blocks[:, 2:], 16, 4), 4, 32, _half(blocks, 0), table=IQ4_VALUES)


def _iq4_xs(blocks: Tensor) -> Codes:
    scales = _fields(blocks[:, 4:8], 1, 4) | _fields(blocks[:, 2:4], 1, 2) << 4
    return Codes(_fields(blocks[:, 8:], 16, 4), 4, 32, _half(blocks, 0) * (scales.float() - 32.0), table=IQ4_VALUES)


FORMATS: dict[str, _Layout] = {
    "q4_0": _Layout(32, 18, _q4_0),
    "q4_1": _Layout(32, 20, _q4_1),
    "q5_0": _Layout(32, 22, _q5_0),
    "q5_1": _Layout(32, 24, _q5_1),
    "q8_0": _Layout(32, 34, _q8_0),
    "q2_k": _Layout(256, 84, _q2_k),
    "q3_k": _Layout(256, 110, _q3_k),
    "q4_k": _Layout(256, 144, _q4_k),
    "q5_k": _Layout(256, 176, _q5_k),
    "q6_k": _Layout(256, 210, _q6_k),
    "mxfp4": _Layout(32, 17, _mxfp4),
    "nvfp4": _Layout(64, 36, _nvfp4),
    "iq4_nl": _Layout(32, 18, _iq4_nl),
    "iq4_xs": _Layout(256, 136, _iq4_xs),
}
