"""Canonical matrices → float32, in numpy: what every kernel is compared with. No torch here."""

from __future__ import annotations

import numpy as np

from penstock.kernels.canonical import Affine, Blocks, Canonical, Codebook, Floats, Plain
from penstock.quant.formats import decode_to_float32

_CHUNK = 2**20  # values decoded at a time, so that temporaries stay in cache


def decode_canonical(matrix: Canonical) -> Floats:
    """The matrix's values, rounded once a product and once a sum.

    Returns:
        [N, K] float32, inputs in the model's order.

    Raises:
        ValueError: a block format without decoder.
    """
    rows, inputs = matrix.shape
    out = np.empty((rows, inputs), dtype=np.float32)
    step = max(1, _CHUNK // max(1, inputs))
    for start in range(0, rows, step):
        part = slice(start, min(rows, start + step))
        if isinstance(matrix, Affine):
            values = _affine(matrix, part)
            if matrix.order is None:
                out[part] = values
            else:
                out[part, matrix.order] = values
        elif isinstance(matrix, Codebook):
            values = _grouped(matrix.table[matrix.codes[part]], matrix.group)
            out[part] = (values * matrix.scales[part, :, None]).reshape(-1, inputs)
        else:
            out[part] = _stored(matrix, part)
    return out


def _grouped(values: Floats, group: int) -> Floats:
    return values.reshape(len(values), -1, group)


def _affine(matrix: Affine, part: slice) -> Floats:
    values = _grouped(matrix.codes[part].astype(np.float32), matrix.group)
    if matrix.minimums is not None:
        values *= matrix.scales[part, :, None]
        values += matrix.minimums[part, :, None]
    else:
        values -= np.float32(matrix.zero) if matrix.zeros is None else matrix.zeros[part, :, None].astype(np.float32)
        values *= matrix.scales[part, :, None]
    return values.reshape(len(values), -1)


def _stored(matrix: Blocks | Plain, part: slice) -> Floats:
    rows, inputs = matrix.shape
    size = matrix.data.size // rows
    values = decode_to_float32(matrix.format, matrix.data[part.start * size : part.stop * size]).reshape(-1, inputs)
    if isinstance(matrix, Plain) and matrix.scales is not None:
        scales = matrix.scales[np.arange(part.start, part.stop) // matrix.tile[0]]
        values *= np.repeat(scales, matrix.tile[1], axis=1)[:, :inputs]
    return values
