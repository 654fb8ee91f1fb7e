"""AQLM checkpoints (Egiazarian et al., arXiv:2401.06118): every group of weights is a sum of codebook vectors.

`codes` [N / o, K / i, C] signed, `codebooks` [C, 2 ** bits, o, i], `scales` [N / o, 1, 1, 1]. Decoded at load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.kernels.canonical import Plain
from penstock.quant.methods.record import Layout, Matrix, Method
from penstock.quant.tensor import TensorInfo

_BATCH = 2**14  # groups decoded at a time, which caches hold


def _decode(matrix: Matrix) -> Plain:
    outputs, inputs = matrix.shape
    shape = matrix.stored_shape(".codebooks")
    if len(shape) != 4 or 0 in shape or outputs % shape[2] or inputs % shape[3]:
        raise matrix.error(".codebooks", f"has shape {list(shape)}, whose groups do not divide {list(matrix.shape)}")
    books, entries, rows, columns = shape
    tables = matrix.floats(".codebooks").reshape(books, entries, rows * columns)
    stored = matrix.tensors[".codes"].info.format
    if stored not in ("i8", "i16", "i32"):
        raise matrix.error(".codes", f"is stored as {stored}; allowed: i8, i16, i32")
    codes = matrix.array(".codes", stored, (outputs // rows, inputs // columns, books))
    scales = matrix.floats(".scales", (outputs // rows, 1))
    out = np.empty((outputs // rows, rows, inputs // columns, columns), dtype=np.float32)
    step = max(1, _BATCH * columns // inputs)
    for row in range(0, outputs // rows, step):
        picked = codes[row : row + step].astype(np.int64) % entries
        total = tables[0].take(picked[..., 0], axis=0)
        for book in range(1, books):
            total += tables[book].take(picked[..., book], axis=0)
        total *= scales[row : row + step, :, None]
        out[row : row + step] = total.reshape(*total.shape[:2], rows, columns).swapaxes(1, 2)
    return Plain("f32", matrix.shape, out.reshape(-1).view(np.uint8))


def _values(infos: Mapping[str, TensorInfo]) -> int:
    return math.prod(infos[".codes"].shape[:2]) * math.prod(infos[".codebooks"].shape[2:])


def aqlm(config: Mapping[str, Any]) -> Method:
    """The method of a `quantization_config`."""
    del config  # sizes stand in the tensors' shapes
    return Method("aqlm", (Layout((".codes", ".codebooks", ".scales"), _decode, _values),), converted=True)
