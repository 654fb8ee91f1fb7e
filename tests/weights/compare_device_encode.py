"""Weights quantised on a device against the host's encoders: the same bits."""

from __future__ import annotations

import numpy as np
import torch

from penstock.kernels.canonical import Blocks, Canonical, Plain
from penstock.kernels.plain import plain_matrix
from penstock.quant.canonical_decode import decode_canonical
from penstock.quant.encode import quantize_matrix
from penstock.weights.device_encode import device_encoder

FORMATS = ("fp8", "fp8_block", "int8", "q8_0")


def arrays(matrix: Canonical) -> list[np.ndarray]:
    if isinstance(matrix, Blocks):
        return [matrix.data]
    return [matrix.data if isinstance(matrix, Plain) else matrix.codes, matrix.scales]


def compare_encoding(device: str, format: str, dtype: torch.dtype, rows: int, inputs: int) -> None:
    torch.manual_seed(rows)
    values = torch.randn(rows, inputs) * torch.logspace(-9, 4, rows)[:, None]
    values[1] = 0.0
    values[2, ::2] *= -0.0
    values[3] = torch.arange(inputs) - inputs // 2 + 0.5  # ties
    matrix = plain_matrix(values.to(dtype))
    encode = device_encoder(format, matrix)
    assert encode is not None
    ours, theirs = encode(torch.device(device)), quantize_matrix(format, decode_canonical(matrix))
    assert type(ours) is type(theirs) and ours.shape == theirs.shape
    assert getattr(ours, "tile", None) == getattr(theirs, "tile", None)
    for left, right in zip(arrays(ours), arrays(theirs), strict=True):
        assert left.dtype == right.dtype and left.shape == right.shape
        np.testing.assert_array_equal(left, right)
