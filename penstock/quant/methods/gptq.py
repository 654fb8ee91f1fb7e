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

from penstock.kernels.canonical import Affine
from penstock.quant.formats.record import Bytes
from penstock.quant.methods.affine import group_order, with_zeros
from penstock.quant.methods.bits import unpack_words
from penstock.quant.methods.record import Layout, Matrix, Method, unsupported
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


def _decode(matrix: Matrix, *, less_one: bool) -> Affine:
    outputs, inputs = matrix.shape
    bits = _code_bits(matrix)
    words = matrix.array(".qweight", "i32", (inputs * bits // 32, outputs))
    groups = matrix.stored_shape(".scales")[0]
    group = matrix.group_size(".scales", groups)
    scales = np.ascontiguousarray(matrix.floats(".scales", (groups, outputs)).T)
    codes = unpack_words(words.T, bits)
    order = group_order(matrix, ".g_idx", group)
    if order is not None:
        codes = np.take(codes, order, axis=1)
    return with_zeros(codes, bits, group, scales, _zero_points(matrix, bits, groups, less_one=less_one), order)


def _values(infos: Mapping[str, TensorInfo], *, bits: int) -> int:
    inputs = infos[".g_idx"].shape[0] if ".g_idx" in infos else infos[".qweight"].shape[0] * 32 // bits
    return inputs * infos[".qweight"].shape[-1]


def gptq_method(name: str, bits: Any, *, less_one: bool) -> Method:
    """The method of checkpoints packed as GPTQ packs.

    Raises:
        CheckpointError: a bit width that cannot be read.
    """
    if bits not in BITS:
        raise unsupported(f"{bits!r} bits", BITS)
    count = partial(_values, bits=bits)
    layout = Layout((".qweight", ".qzeros", ".scales"), partial(_decode, less_one=less_one), count, (".g_idx",))
    return Method(name, (layout,))


def gptq(config: Mapping[str, Any]) -> Method:
    """The method of a `quantization_config`.

    Raises:
        CheckpointError: a bit width or packing that cannot be read.
    """
    packing = config.get("checkpoint_format") or config.get("format") or "gptq"
    if packing not in FORMATS:
        raise unsupported(f"checkpoint_format {packing!r}", FORMATS)
    return gptq_method("gptq", config.get("bits", 4), less_one=packing == "gptq")
