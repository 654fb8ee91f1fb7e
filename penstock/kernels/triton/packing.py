"""Weights in the layouts that kernels read: plain tensors, codes in planes, and bytes for eight-bit products.

Codes of up to eight bits lie in planes: of a block of 8 · S inputs of a row, S being 16 or 32, field i of word j
belongs to input i · S + j. A kernel thus unpacks S neighbouring inputs from S neighbouring words by one shift, without
moving values between threads. Widths that are no power of two are split: five bits are words of four and words of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.kernels import devices
from penstock.kernels.canonical import Affine, Blocks, Canonical, Codebook, Plain
from penstock.kernels.plain import FLOAT_FORMATS
from penstock.kernels.staging import to_device
from penstock.kernels.triton import blocks
from penstock.kernels.triton.blocks import Codes
from penstock.kernels.triton.numbers import INTERPRETED

HOME = "cpu" if INTERPRETED.value else devices.home()
KIND = "interpreter" if INTERPRETED.value else devices.kind() or "cuda"
PLANES = 8
WIDTHS = {1: (1, 0), 2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 7: (4, 4), 8: (4, 4)}
TILE = 128  # inputs that share a scale of activations, where weights have scales of tiles
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_E2M1 = tuple(value / 2 for value in blocks.E2M1_DOUBLED)


@dataclass(frozen=True, slots=True)
class Planes:
    """Codes in planes, with a scale a group.

    Attributes:
        rows, inputs: N and K; of a stack of experts N counts all rows.
        low: [N, ⌈K / 8S⌉ · S] int32, int16 or uint8: words of the lower `widths[0]` bits.
        high: the same of the upper bits, or None.
        scales: [K / group, N] float16, bfloat16 or float32.
        offsets: [K / group, N] zero points (uint8) or minimums (as scales), or None.
        table: [16] float32 that codes index; None where they are numbers. Values of E2M1 have none either.
        kind: "affine", "e2m1" or "table".
        widths: bits of words of both kinds.
        span: S.
        group: inputs that share a scale.
        zero: zero point of all codes.
        order: [K] int64 or None: column k multiplies input order[k].
    """

    rows: int
    inputs: int
    low: Tensor
    high: Tensor | None
    scales: Tensor
    offsets: Tensor | None
    table: Tensor | None
    kind: str
    widths: tuple[int, int]
    span: int
    group: int
    zero: int
    order: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.inputs


@dataclass(frozen=True, slots=True)
class Eights:
    """Values of eight bits, multiplied with activations that are quantised to the same type.

    Attributes:
        rows, inputs: N and K.
        values: [N, K] float8_e4m3fn or int8.
        scales: [⌈K / TILE⌉, N] float32, or [1, N]: then activations have one scale a row too.
    """

    rows: int
    inputs: int
    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.inputs

    @property
    def tiled(self) -> bool:
        return self.scales.shape[0] > 1


Part = Tensor | Planes | Eights


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight: matrices one below the other, of `experts` matrices each."""

    parts: tuple[Part, ...]
    experts: int = 1

    @property
    def widths(self) -> tuple[int, ...]:
        """Rows of each part, of one expert."""
        return tuple(rows_of(part) // self.experts for part in self.parts)

    @property
    def rows(self) -> int:
        return sum(self.widths)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for part in self.parts for tensor in tensors(part))


def tensors(part: Part) -> tuple[Tensor, ...]:
    """The memory of a part."""
    if isinstance(part, Tensor):
        return (part,)
    if isinstance(part, Eights):
        return part.values, part.scales
    held = part.low, part.high, part.scales, part.offsets, part.table, part.order
    return tuple(tensor for tensor in held if tensor is not None)


def rows_of(part: Part) -> int:
    return part.shape[0] if isinstance(part, Tensor) else part.rows


def packable(matrix: Canonical) -> str | None:
    """Why there is no packing for a matrix, or None. Floats without scales become tensors of the compute type."""
    if isinstance(matrix, Plain):
        if matrix.format != "f8_e4m3":
            return f"{matrix.format} becomes the compute type"
        if matrix.scales is not None and matrix.tile[1] % TILE and matrix.tile[1] < matrix.shape[1]:
            return f"tiles of {matrix.tile[1]} inputs are no multiple of {TILE}"
        return devices.lacks_fp8(KIND)
    if isinstance(matrix, Blocks):
        return None if matrix.format in blocks.FORMATS else f"no kernel reads {matrix.format}"
    return f"groups of {matrix.group} inputs are no multiple of 16" if matrix.group % 16 else None


def pack(parts: Sequence[Canonical | Tensor], experts: int = 1) -> Packed:
    """Packs matrices [experts · rows, K]; parts of one kind become one.

    Raises:
        ValueError: `packable` refuses a part.
    """
    return Packed(_joined([_pack(part) for part in parts], experts), experts)


def _pack(matrix: Canonical | Tensor) -> Part:
    if isinstance(matrix, Tensor):
        return matrix.to(HOME).contiguous()
    reason = packable(matrix)
    if reason is not None:
        raise ValueError(f"a {type(matrix).__name__} matrix of shape {matrix.shape} cannot be packed: {reason}.")
    if isinstance(matrix, Plain):
        return _floats(matrix)
    if isinstance(matrix, Blocks):
        return _planes(blocks.take_apart(matrix.format, matrix.shape, _home(matrix.data)), None)
    order = None if isinstance(matrix, Codebook) or matrix.order is None else _home(matrix.order).long()
    if isinstance(matrix, Affine) and order is None and _is_whole_bytes(matrix):
        return Eights(
            *matrix.shape, (_home(matrix.codes) ^ 0x80).view(torch.int8), _home(matrix.scales).t().contiguous()
        )
    return _planes(_codes(matrix), order)


def _is_whole_bytes(matrix: Affine) -> bool:
    """Whether products of integers serve it: signed bytes with a scale a row."""
    plain = matrix.zeros is None and matrix.minimums is None
    return plain and matrix.bits == 8 and matrix.zero == 128 and matrix.scales.shape[1] == 1


def _home(array: Any) -> Tensor:
    """A numpy array on the device."""
    return to_device(array, HOME)


def _codes(matrix: Affine | Codebook) -> Codes:
    codes, scales = _home(matrix.codes), _home(matrix.scales)
    if isinstance(matrix, Codebook):
        return Codes(codes, 4, matrix.group, scales, table=tuple(matrix.table.tolist()))
    zeros = None if matrix.zeros is None else _home(matrix.zeros)
    minimums = None if matrix.minimums is None else _home(matrix.minimums)
    if zeros is not None and zeros.is_floating_point():
        return Codes(codes, matrix.bits, matrix.group, scales, minimums=-zeros * scales)
    return Codes(codes, matrix.bits, matrix.group, scales, matrix.zero, zeros, minimums)


def _floats(matrix: Plain) -> Eights:
    rows, inputs = matrix.shape
    values = _home(matrix.data).view(FLOAT_FORMATS[matrix.format]).view(rows, inputs)
    by_rows = matrix.by_rows()
    if by_rows.scales is None:
        return Eights(rows, inputs, values, torch.ones(1, rows, device=HOME))
    scales = _home(by_rows.scales)
    if scales.shape[1] > 1:
        scales = scales.repeat_interleave(by_rows.tile[1] // TILE, dim=1)[:, : -(-inputs // TILE)]
    return Eights(rows, inputs, values, scales.t().contiguous())


def _planes(codes: Codes, order: Tensor | None) -> Planes:
    rows, inputs = codes.codes.shape
    span = 32 if codes.group % 32 == 0 else 16
    low, high = WIDTHS[codes.bits]
    table = codes.table
    kind = "affine" if codes.table is None else "table"
    scales = codes.scales
    if table is not None and (factor := table[1] / _E2M1[1]) > 0 and table == tuple(factor * v for v in _E2M1):
        table = None
        kind = "e2m1"
        scales = scales * factor
    values = torch.zeros(rows, -(-inputs // (PLANES * span)) * PLANES * span, dtype=torch.uint8, device=HOME)
    values[:, :inputs] = codes.codes
    offsets = codes.zeros if codes.zeros is not None else codes.minimums
    number = number_type(scales, codes.minimums)
    return Planes(
        rows=rows,
        inputs=inputs,
        low=_words(values & (2**low - 1), low, span),
        high=_words(values >> low, high, span) if high else None,
        scales=scales.t().to(number).contiguous(),
        offsets=None
        if offsets is None
        else offsets.t().to(torch.uint8 if codes.zeros is not None else number).contiguous(),
        table=None if table is None else torch.tensor(table, device=HOME),
        kind=kind,
        widths=(low, high),
        span=span,
        group=codes.group,
        zero=codes.zero,
        order=order,
    )


def _words(values: Tensor, width: int, span: int) -> Tensor:
    """Fields [N, K] in words of PLANES fields."""
    fields = values.view(len(values), -1, PLANES, span)
    words = torch.zeros(len(values), fields.shape[1], span, dtype=torch.int32, device=values.device)
    for plane in range(PLANES):
        words |= fields[:, :, plane].int() << width * plane
    return words.to(_WORDS[width]).view(len(values), -1)


def number_type(*values: Tensor | None) -> torch.dtype:
    """The smallest type that keeps scales: exactly, or with the eleven bits of float16 where their range allows it."""
    given = [value for value in values if value is not None]
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(value.to(dtype).float(), value) for value in given):
            return dtype
    least = torch.finfo(torch.float16).tiny
    small = all(bool(((value == 0) | (value.abs() >= least)).all() and (value.abs() < 65504).all()) for value in given)
    return torch.float16 if small else torch.float32


def _joined(parts: list[Part], experts: int) -> tuple[Part, ...]:
    """Parts of the same kind as one, expert by expert."""
    first = parts[0]
    if len(parts) == 1:
        return (first,)

    def stacked(found: list[Tensor | None], axis: int) -> Tensor | None:
        given = [one for one in found if one is not None]
        if len(given) < len(found):
            return None
        if axis:
            return torch.cat([one.view(len(one), experts, -1) for one in given], dim=2).flatten(1)
        return torch.cat([one.view(experts, -1, one.shape[1]) for one in given], dim=1).flatten(0, 1)

    if isinstance(first, Tensor):
        if all(isinstance(part, Tensor) and part.dtype == first.dtype for part in parts):
            found = stacked([part for part in parts if isinstance(part, Tensor)], 0)
            assert found is not None
            return (found,)
        return tuple(parts)
    rows = sum(map(rows_of, parts))
    if isinstance(first, Eights):
        eights = [part for part in parts if isinstance(part, Eights)]
        if len(eights) < len(parts) or any(_facts(part) != _facts(first) for part in eights):
            return tuple(parts)
        values, scales = stacked([e.values for e in eights], 0), stacked([e.scales for e in eights], 1)
        assert values is not None and scales is not None
        return (replace(first, rows=rows, values=values, scales=scales),)
    planes = [part for part in parts if isinstance(part, Planes)]
    if len(planes) < len(parts) or any(
        _facts(part) != _facts(first) or not _same_order(part, first) for part in planes
    ):
        return tuple(parts)
    low, scales = stacked([p.low for p in planes], 0), stacked([p.scales for p in planes], 1)
    assert low is not None and scales is not None
    high, offsets = stacked([p.high for p in planes], 0), stacked([p.offsets for p in planes], 1)
    return (replace(first, rows=rows, low=low, high=high, scales=scales, offsets=offsets),)


def _facts(part: Planes | Eights) -> tuple[Any, ...]:
    """What parts must share to become one."""
    if isinstance(part, Eights):
        return part.values.dtype, part.inputs, part.scales.shape[0]
    offsets = None if part.offsets is None else part.offsets.dtype
    table = None if part.table is None else tuple(part.table.tolist())
    return part.inputs, part.kind, part.widths, part.span, part.group, part.zero, part.scales.dtype, offsets, table


def _same_order(a: Planes, b: Planes) -> bool:
    if a.order is None or b.order is None:
        return a.order is b.order
    return torch.equal(a.order, b.order)
