"""HQQ checkpoints (Badri and Shaji, Half-Quadratic Quantization, 2023), as the library writes them to safetensors.

The matrix, cut into groups along its inputs (`axis` 1), is a table of one group a row; `W_q` packs it along its first
axis: each byte (word of 3-bit codes) holds entries a fixed distance apart, the first in the highest bits. `scale` and
`zero` hold one number a group: w = (code - zero) · scale. `axis` 0 puts a scale to every column of a table that no
kernel reads, so such a matrix is decoded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from penstock.kernels.canonical import Affine, Plain
from penstock.quant.formats.record import Bytes
from penstock.quant.methods.affine import with_zeros
from penstock.quant.methods.record import Layout, Matrix, Method
from penstock.quant.tensor import TensorInfo

# packing → bits, bytes of a unit, entries in it
_PACKINGS = {
    "8bit_u8": (8, 1, 1),
    "4bit_u8": (4, 1, 2),
    "3bit_32": (3, 4, 10),
    "2bit_u8": (2, 1, 4),
    "1bit_u8": (1, 1, 8),
}
_NOTES = (
    ".axis", ".shape", ".nbits", ".group_size", ".packing", ".view_as_float", ".unpack_view_dtype", ".compute_dtype",
    ".quant_zero", ".quant_scale", ".round_zero", ".optimize", ".channel_wise", ".offload_meta", ".encoded_state_dict",
    ".stores_quant_config",
)  # fmt: skip


def _number(matrix: Matrix, suffix: str, default: int) -> int:
    return int(matrix.floats(suffix, (1,))[0]) if matrix.has(suffix) else default


def _packing(matrix: Matrix) -> tuple[int, int, int]:
    stored = matrix.tensors.get(".packing")
    name = f"{_number(matrix, '.nbits', 4)}bit_u8" if stored is None else bytes(stored.data).decode("latin-1")
    if name not in _PACKINGS:
        raise matrix.error(".W_q", f"is packed as {name[:20]!r}; allowed: {', '.join(_PACKINGS)}")
    return _PACKINGS[name]


def _table(matrix: Matrix, rows: int, columns: int) -> tuple[Bytes, int]:
    """Codes [rows, columns] and their width."""
    bits, size, fields = _packing(matrix)
    data, step = matrix.tensors[".W_q"].data, math.ceil(rows / fields)
    if data.size != step * columns * size:
        raise matrix.error(".W_q", f"has {data.size} bytes where {step * columns * size} are needed")
    units = data.view(f"<u{size}").reshape(step, columns)
    out = np.empty((fields, step, columns), dtype=np.uint8)
    for field in range(fields):
        out[field] = (units >> units.dtype.type(bits * (fields - 1 - field))) & units.dtype.type(2**bits - 1)
    return out.reshape(fields * step, columns)[:rows], bits


def _decode(matrix: Matrix) -> Affine | Plain:
    matrix.check_noted_shape(".shape")
    outputs, inputs = matrix.shape
    groups = math.prod(matrix.stored_shape(".scale"))
    group, odd = divmod(outputs * inputs, max(groups, 1))
    if odd or not group:
        raise matrix.error(".scale", f"has {groups} scales, which do not divide {outputs} rows of {inputs} inputs")
    scale, zero = matrix.floats(".scale", (groups,)), matrix.floats(".zero")
    if zero.size not in (1, groups):
        raise matrix.error(".zero", f"has {zero.size} zero points for {groups} scales")
    zero = np.broadcast_to(zero.reshape(-1), (groups,))
    if _number(matrix, ".axis", 1) == 0:
        codes, _ = _table(matrix, group, groups)
        values = (codes.astype(np.float32) - zero) * scale
        return Plain("f32", matrix.shape, values.reshape(-1).view(np.uint8))
    if inputs % group:
        raise matrix.error(".scale", f"makes groups of {group} inputs, which do not divide a row of {inputs}")
    codes, bits = _table(matrix, groups, group)
    shape, codes = (outputs, inputs // group), np.ascontiguousarray(codes).reshape(matrix.shape)
    scale, zero = scale.reshape(shape), zero.reshape(shape)
    whole = zero.astype(np.uint8)
    if (whole == zero).all():
        return with_zeros(codes, bits, group, scale, whole)
    return Affine(codes, bits, group, scale, zeros=np.ascontiguousarray(zero))


def _values(infos: Mapping[str, TensorInfo], *, group: int | None) -> int:
    return math.prod(infos[".scale"].shape) * (group or infos[".W_q"].shape[-1])


def hqq(config: Mapping[str, Any]) -> Method:
    """The method of a `quantization_config`."""
    found = config.get("quant_config")
    weights = found.get("weight_quant_params") if isinstance(found, Mapping) else None
    settings = weights if isinstance(weights, Mapping) else {}
    size = settings.get("group_size")
    count = partial(_values, group=size if isinstance(size, int) else None)
    layout = Layout((".W_q", ".scale", ".zero"), _decode, count, _NOTES)
    return Method("hqq", (layout,), converted=settings.get("axis") == 0)
