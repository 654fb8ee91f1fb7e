"""EXL2 checkpoints (ExLlamaV2): groups of inputs in 2 to 8 bits, inputs sorted by importance.

`q_weight` int32 [words, N] packs codes along the inputs, lowest bits first, group after group; `q_groups` [2 · G] holds
the bits and the first word of each; `q_scale` int32 [G, N / 8] four-bit scales, `q_scale_max` [G] their unit, 256 times
too large: scale = (code + 1)² · unit / 256; w = scale · (code - 2 ** (bits - 1)). `q_invperm` [K] says where each input
was sorted to. Rows of N are padded to a multiple of 32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.kernels.canonical import Affine
from penstock.quant.formats.record import Floats
from penstock.quant.methods.bits import unpack_words
from penstock.quant.methods.record import Layout, Matrix, Method
from penstock.quant.tensor import TensorInfo

_BITS = (2, 3, 4, 5, 6, 8)


def _spans(matrix: Matrix) -> list[tuple[int, int, int, int]]:
    """(bits, first word, words, inputs) of each group."""
    inputs, words = matrix.shape[1], matrix.stored_shape(".q_weight")[0]
    groups = matrix.array(".q_groups", "i16").reshape(-1, 2).view(np.uint16).astype(int)
    ends = [*groups[1:, 1], words]
    spans, left = [], inputs
    for (bits, first), end in zip(groups.tolist(), ends, strict=True):
        if bits not in _BITS or not 0 <= first < end <= words:
            raise matrix.error(".q_groups", f"names {bits} bits in words {first} to {end} of {words}")
        count = min((end - first) * 32 // bits, left)
        spans.append((bits, first, end - first, count))
        left -= count
    if left or any(span[3] == 0 for span in spans):
        raise matrix.error(".q_groups", f"makes groups that are not {inputs} inputs in all")
    return spans


def _scales(matrix: Matrix, groups: int, width: int) -> Floats:
    """[G, N]."""
    codes = unpack_words(matrix.array(".q_scale", "i32", (groups, width // 8)), 4).astype(np.float32) + np.float32(1)
    unit = matrix.floats(".q_scale_max", (groups, 1)) / np.float32(256)
    scales: Floats = (codes * codes * unit)[:, : matrix.shape[0]]
    return scales


def _decode(matrix: Matrix) -> Affine:
    outputs, inputs = matrix.shape
    words = matrix.array(".q_weight", "i32")
    width, spans = words.shape[-1], _spans(matrix)
    if width != math.ceil(outputs / 32) * 32:
        raise matrix.error(".q_weight", f"has {width} columns where {outputs} outputs, padded to 32, are needed")
    bits, group = max(span[0] for span in spans), math.gcd(*(span[3] for span in spans))
    codes, start = np.empty((outputs, inputs), dtype=np.uint8), 0
    for own, first, count, rows in spans:
        fields = unpack_words(words[first : first + count, :outputs].T, own)[:, :rows]
        codes[:, start : start + rows] = fields + np.uint8((1 << (bits - 1)) - (1 << (own - 1)))
        start += rows
    each = np.repeat(_scales(matrix, len(spans), width), [span[3] // group for span in spans], axis=0)
    where = matrix.array(".q_invperm", "i32", (inputs,))
    if not np.array_equal(np.sort(where), np.arange(inputs)):
        raise matrix.error(".q_invperm", f"is no permutation of {inputs} inputs")
    order = np.argsort(where).astype(np.int32)
    return Affine(codes, bits, group, np.ascontiguousarray(each.T), zero=1 << (bits - 1), order=order)


def _values(infos: Mapping[str, TensorInfo]) -> int:
    return infos[".q_invperm"].shape[0] * infos[".q_weight"].shape[-1]


def exl2(config: Mapping[str, Any]) -> Method:
    """The method of a `quantization_config`."""
    del config  # widths differ by group
    required = (".q_weight", ".q_scale", ".q_scale_max", ".q_groups", ".q_invperm")
    return Method("exl2", (Layout(required, _decode, _values),))
