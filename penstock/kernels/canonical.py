"""Canonical quantised matrices: what every storage format becomes before a packing for a device is chosen. No torch.

All are matrices [N, K] of N output rows and K inputs; a stack of E experts is one matrix of E · N rows. Arrays are
C-contiguous numpy. A group is `group` consecutive inputs of one row; K is a multiple of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows of ggml blocks, as they lie in a GGUF file.

    Attributes:
        format: "q4_0", "q4_k", "iq4_xs", "tq2_0", "mxfp4", …, as in `quant.tensor`.
        shape: (N, K), K a multiple of the format's block.
        data: [N · bytes of a row] uint8, usually a view of the file.
    """

    format: str
    shape: tuple[int, int]
    data: Bytes


@dataclass(frozen=True, slots=True)
class Affine:
    """Integers with a scale a group: w = scale · (code - zero), or w = scale · code + minimum.

    Attributes:
        codes: [N, K] uint8, each below 2 ** bits.
        bits: 1 to 8.
        group: inputs that share a scale; K for one scale a row.
        scales: [N, K / group] float32.
        zero: the zero point where it is one number for all.
        zeros: [N, K / group] zero points, uint8 or float32 (each difference and each product rounded once), or None.
        minimums: [N, K / group] float32, or None. At most one of zeros and minimums is given, and zero is 0 then.
        order: [K] int32 or None: codes column k multiplies input order[k] (activation order of GPTQ).
    """

    codes: Bytes
    bits: int
    group: int
    scales: Floats
    zero: int = 0
    zeros: Bytes | Floats | None = None
    minimums: Floats | None = None
    order: npt.NDArray[np.int32] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]


@dataclass(frozen=True, slots=True)
class Codebook:
    """Four-bit indices into a table of 16 values: w = scale · table[code] (NF4, FP4, MXFP4, NVFP4, IQ4).

    Attributes:
        codes: [N, K] uint8 below 16.
        table: [16] float32.
        group: inputs that share a scale.
        scales: [N, K / group] float32.
    """

    codes: Bytes
    table: Floats
    group: int
    scales: Floats

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]


@dataclass(frozen=True, slots=True)
class Plain:
    """Floating-point values, with a scale a tile or none: w = scale · value.

    Attributes:
        format: "f32", "f16", "bf16", "f8_e4m3" or "f8_e5m2".
        shape: (N, K).
        data: [N · K · size] uint8, usually a view of the file.
        scales: [ceil(N / tile[0]), ceil(K / tile[1])] float32, or None.
        tile: rows and inputs that share a scale; (N, K) for one scale, (1, K) for one a row.
    """

    format: str
    shape: tuple[int, int]
    data: Bytes
    scales: Floats | None = None
    tile: tuple[int, int] = (1, 1)

    def by_rows(self) -> Plain:
        """The same with scales of its own for every row, as packings have them."""
        if self.scales is None or self.tile[0] == 1:
            return self
        scales = np.repeat(self.scales, self.tile[0], axis=0)[: self.shape[0]]
        return replace(self, scales=scales, tile=(1, self.tile[1]))


Canonical = Blocks | Affine | Codebook | Plain


def take_rows(matrix: Canonical, rows: npt.NDArray[np.int64]) -> Canonical:
    """The matrix of these rows, in this order."""
    if isinstance(matrix, Blocks):
        return replace(matrix, shape=(len(rows), matrix.shape[1]), data=_pick(matrix.data, matrix.shape[0], rows))
    if isinstance(matrix, Codebook):
        return replace(matrix, codes=matrix.codes[rows], scales=matrix.scales[rows])
    if isinstance(matrix, Affine):
        zeros, minimums = matrix.zeros, matrix.minimums
        return replace(
            matrix,
            codes=matrix.codes[rows],
            scales=matrix.scales[rows],
            zeros=None if zeros is None else zeros[rows],
            minimums=None if minimums is None else minimums[rows],
        )
    matrix = matrix.by_rows()
    scales = None if matrix.scales is None else matrix.scales[rows]
    data = _pick(matrix.data, matrix.shape[0], rows)
    return replace(matrix, shape=(len(rows), matrix.shape[1]), data=data, scales=scales)


def take_columns(matrix: Canonical, first: int, end: int) -> Canonical:
    """The matrix of inputs [first, end), of whole blocks, groups or tiles; only their bytes are read.

    Raises:
        ValueError: it cannot be cut there.
    """
    rows, inputs = matrix.shape
    if isinstance(matrix, Blocks):
        per_row = matrix.data.size // rows
        block = math.gcd(first, end, inputs)
        if per_row * block % inputs:
            raise ValueError(f"a matrix in {matrix.format} cannot be cut at {first} and {end} of {inputs} inputs")
        part = matrix.data.reshape(rows, per_row)[:, first * per_row // inputs : end * per_row // inputs]
        return replace(matrix, shape=(rows, end - first), data=np.ascontiguousarray(part).reshape(-1))
    if isinstance(matrix, Plain):
        data = matrix.data.reshape(rows, inputs, -1)[:, first:end]
        high, wide = matrix.tile
        scales = matrix.scales
        if scales is not None and wide < inputs:
            _check_cut(first, end, inputs, wide)
            scales = np.ascontiguousarray(scales[:, first // wide : -(-end // wide)])
        return replace(
            matrix,
            shape=(rows, end - first),
            data=np.ascontiguousarray(data).reshape(-1),
            scales=scales,
            tile=(high, min(wide, end - first)),
        )
    _check_cut(first, end, inputs, matrix.group)
    group = slice(first // matrix.group, end // matrix.group)
    codes, scales = np.ascontiguousarray(matrix.codes[:, first:end]), np.ascontiguousarray(matrix.scales[:, group])
    if isinstance(matrix, Codebook):
        return replace(matrix, codes=codes, scales=scales)
    if matrix.order is not None:
        raise ValueError("a matrix whose inputs are stored in another order cannot be cut")
    zeros: Any = None if matrix.zeros is None else np.ascontiguousarray(matrix.zeros[:, group])
    minimums = None if matrix.minimums is None else np.ascontiguousarray(matrix.minimums[:, group])
    return replace(matrix, codes=codes, scales=scales, zeros=zeros, minimums=minimums)


def _check_cut(first: int, end: int, inputs: int, size: int) -> None:
    if first % size or (end % size and end != inputs):
        raise ValueError(f"inputs {first} to {end} are no whole groups of {size}")


def concatenate(parts: Sequence[Canonical]) -> Canonical:
    """Matrices of one kind, one below the other.

    Raises:
        ValueError: they differ in more than their values.
    """
    if len(parts) == 1:
        return parts[0]
    parts = [part.by_rows() if isinstance(part, Plain) else part for part in parts]
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise ValueError("matrices of different kinds")
    fields = {name: [getattr(part, name) for part in parts] for name in first.__dataclass_fields__}
    stacked = {
        name: values
        for name, values in fields.items()
        if isinstance(values[0], np.ndarray) and name not in ("table", "order")
    }
    for name, values in fields.items():
        if name not in ("shape", *stacked) and not all(np.array_equal(value, values[0]) for value in values):
            raise ValueError(f"matrices of different {name}")
    merged: dict[str, Any] = {name: values[0] for name, values in fields.items()}
    if "shape" in fields:
        merged["shape"] = (sum(part.shape[0] for part in parts), first.shape[1])
    for name, values in stacked.items():
        if any(value is None for value in values):
            raise ValueError(f"matrices with and without {name}")
        merged[name] = np.concatenate(values)
    return type(first)(**merged)


def _pick(data: Bytes, count: int, rows: npt.NDArray[np.int64]) -> Bytes:
    return np.ascontiguousarray(data.reshape(count, -1)[rows]).reshape(-1)
