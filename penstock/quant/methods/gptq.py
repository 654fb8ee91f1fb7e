"""GPTQ checkpoints (Frantar et al., arXiv:2210.17323) as AutoGPTQ and GPTQModel store them.

`qweight` int32 [K · bits / 32, N] packs codes along the inputs, `qzeros` int32 [G, N · bits / 32] zero points along the
outputs, lowest bits first (3-bit fields run across words); `scales` [G, N]; `g_idx` [K] the group of each input, which
is no plain division where groups follow the activation order. Format "gptq" stores zero points less one, "gptq_v2" as
they are. Bits and group size are read from the shapes, so that layers may differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.config.errors import CheckpointError
from penstock.kernels.canonical import Affine
from penstock.quant.formats.record import Bytes
from penstock.quant.methods.bits import unpack_words
from penstock.quant.methods.record import Layout, Matrix, Method
from penstock.quant.tensor import TensorInfo

BITS = (2, 3, 4, 8)
FORMATS = ("gptq", "gptq_v2")


def _code_bits(matrix: Matrix) -> int:
    rows, inputs = matrix.stored_shape(".qweight")[0], matrix.shape[1]
    bits = next((bits for bits in BITS if rows * 32 == inputs * bits), None)
    if bits is None:
        raise matrix.error(
            ".qweight", f"has {rows} rows for {inputs} inputs, which is none of {', '.join(map(str, BITS))} bits"
        )
    return bits


def _zero_points(matrix: Matrix, bits: int, groups: int, *, less_one: bool) -> Bytes:
    """[N, G]. The one is added to whole words (2, 4, 8 bits), as it was taken off them."""
    outputs = matrix.shape[0]
    words = matrix.array(".qzeros", "i32", (groups, -(-outputs * bits // 32))).view(np.uint32)
    if less_one and bits != 3:
        words = words + np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
    zeros = unpack_words(words, bits)[:, :outputs]
    if less_one and bits == 3:
        zeros = (zeros + np.uint8(1)) & np.uint8(7)
    return np.ascontiguousarray(zeros.T)


def _order(matrix: Matrix, group: int) -> npt.NDArray[np.int32] | None:
    """Inputs sorted by group; None where they are in order."""
    inputs = matrix.shape[1]
    if not matrix.has(".g_idx"):
        return None
    groups = matrix.array(".g_idx", "i32", (inputs,))
    if np.array_equal(groups, np.arange(inputs) // group):
        return None
    if groups.min() < 0 or (np.bincount(groups, minlength=inputs // group) != group).any():
        raise matrix.error(".g_idx", f"does not give each of {inputs // group} groups {group} inputs")
    return np.argsort(groups, kind="stable").astype(np.int32)


def _decode(matrix: Matrix, *, less_one: bool) -> Affine:
    outputs, inputs = matrix.shape
    bits = _code_bits(matrix)
    words = matrix.array(".qweight", "i32", (inputs * bits // 32, outputs))
    groups = matrix.stored_shape(".scales")[0]
    group = matrix.group_size(".scales", groups)
    scales = np.ascontiguousarray(matrix.floats(".scales", (groups, outputs)).T)
    codes = unpack_words(words.T, bits)
    order = _order(matrix, group)
    if order is not None:
        codes = np.take(codes, order, axis=1)
    return with_zeros(codes, bits, group, scales, _zero_points(matrix, bits, groups, less_one=less_one), order)


def with_zeros(
    codes: Bytes,
    bits: int,
    group: int,
    scales: npt.NDArray[np.float32],
    zeros: Bytes,
    order: npt.NDArray[np.int32] | None = None,
) -> Affine:
    """The matrix, with one zero point where all are alike."""
    first = int(zeros.flat[0])
    if (zeros == first).all():
        return Affine(codes, bits, group, scales, zero=first, order=order)
    return Affine(codes, bits, group, scales, zeros=zeros, order=order)


def _values(infos: Mapping[str, TensorInfo], *, bits: int) -> int:
    inputs = infos[".g_idx"].shape[0] if ".g_idx" in infos else infos[".qweight"].shape[0] * 32 // bits
    return inputs * infos[".qweight"].shape[-1]


def gptq(config: Mapping[str, Any]) -> Method:
    """The method of a `quantization_config`.

    Raises:
        CheckpointError: a bit width or packing that cannot be read.
    """
    bits, packing = config.get("bits", 4), config.get("checkpoint_format") or config.get("format") or "gptq"
    if bits not in BITS or packing not in FORMATS:
        raise CheckpointError(
            f"quantization_config: {bits!r} bits in checkpoint_format {packing!r} cannot be read; allowed: "
            f"{', '.join(map(str, BITS))} bits in {', '.join(FORMATS)}. Use another quantisation of the model."
        )
    decode = partial(_decode, less_one=packing == "gptq")
    layout = Layout((".qweight", ".qzeros", ".scales"), decode, partial(_values, bits=bits), optional=(".g_idx",))
    return Method("gptq", (layout,))
