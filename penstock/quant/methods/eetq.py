"""EETQ checkpoints: int8 with a scale a row, `weight` [K, N] in the layout CUTLASS's mixed GEMM reads.

Codes plus 128 lie as its layout for compute capability 7.5 and later has them: of each 16 inputs the order below, two
outputs interleaved in runs of 64 inputs, and the middle two of each four bytes exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.kernels.canonical import Affine
from penstock.quant.methods.record import Layout, Matrix, Method, packed_values

_RUN = 64
_INPUTS = np.array([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15])  # of each 16, as they are stored


def _decode(matrix: Matrix) -> Affine:
    outputs, inputs = matrix.shape
    if inputs % _RUN or outputs % 2:
        raise matrix.error(".weight", f"needs inputs in runs of {_RUN} and even outputs, not {list(matrix.shape)}")
    codes = matrix.array(".weight", "i8", (inputs, outputs)).view(np.uint8)
    runs = codes.reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(outputs // 2, inputs // _RUN, 2, _RUN).swapaxes(1, 2)
    stored = np.ascontiguousarray(runs).reshape(-1, 16)
    ordered = np.take(stored, np.argsort(_INPUTS), axis=1).reshape(outputs, inputs)
    return Affine(ordered, 8, inputs, matrix.floats(".weight_scales", (outputs, 1)), zero=128)


def eetq(config: Mapping[str, Any]) -> Method:
    """The method of a `quantization_config`."""
    del config
    return Method("eetq", (Layout((".weight", ".weight_scales"), _decode, packed_values(".weight", 8)),))
