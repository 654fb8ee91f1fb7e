"""AWQ checkpoints (Lin et al., arXiv:2306.00978), four bits, in the packings AutoAWQ and llm-awq write.

"gemm": `qweight` int32 [K, N / 8] and `qzeros` int32 [K / g, N / 8] pack outputs 0, 2, 4, 6, 1, 3, 5, 7 of each eight
from the lowest bits up; `scales` [K / g, N]. "gemv": `qweight` [N, K / 8] and `qzeros` [N, …] pack inputs and groups in
order, rows of `scales` and `qzeros` padded. "gemv_fast" and "llm-awq": `qweight` int16 [N / 4, K] interleaves four
rows, and the zero points are minimums: minus scale times zero point.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.kernels.canonical import Affine
from penstock.quant.formats.record import Bytes
from penstock.quant.methods.affine import with_zeros
from penstock.quant.methods.bits import unpack_words
from penstock.quant.methods.record import Layout, Matrix, Method, packed_values, unsupported

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output of each nibble, lowest first


def _columns(words: npt.NDArray[Any]) -> Bytes:
    """[rows, N / 8] words → [N, rows] codes."""
    turned = np.ascontiguousarray(words.T).view(np.uint32)
    out = np.empty((len(turned), 8, turned.shape[1]), dtype=np.uint8)
    for nibble, output in enumerate(_ORDER):
        out[:, output] = (turned >> np.uint32(4 * nibble)) & np.uint32(15)
    return out.reshape(-1, turned.shape[1])


def _gemm(matrix: Matrix) -> Affine:
    outputs, inputs = matrix.shape
    groups = matrix.stored_shape(".scales")[0]
    group = matrix.group_size(".scales", groups)
    scales = np.ascontiguousarray(matrix.floats(".scales", (groups, outputs)).T)
    codes = _columns(matrix.array(".qweight", "i32", (inputs, outputs // 8)))
    zeros = np.ascontiguousarray(_columns(matrix.array(".qzeros", "i32", (groups, outputs // 8))))
    return with_zeros(codes, 4, group, scales, zeros)


def _groups(matrix: Matrix, group_size: int) -> int:
    inputs = matrix.shape[1]
    if group_size > 0 and inputs % group_size:
        raise matrix.error(".qweight", f"has rows of {inputs} inputs, which groups of {group_size} do not divide")
    return inputs // group_size if group_size > 0 else 1


def _gemv(matrix: Matrix, *, group_size: int) -> Affine:
    outputs, inputs = matrix.shape
    groups = _groups(matrix, group_size)
    width = matrix.stored_shape(".qzeros")[-1]
    codes = unpack_words(matrix.array(".qweight", "i32", (outputs, inputs // 8)), 4)
    zeros = unpack_words(matrix.array(".qzeros", "i32", (outputs, width)), 4)[:, :groups]
    scales = matrix.floats(".scales", (outputs, 8 * width))[:, :groups]
    return with_zeros(codes, 4, inputs // groups, np.ascontiguousarray(scales), np.ascontiguousarray(zeros))


def _gemv_fast(matrix: Matrix, *, group_size: int, zeros: str) -> Affine:
    outputs, inputs = matrix.shape
    groups = _groups(matrix, group_size)
    rows = matrix.stored_shape(".scales")[0]
    words = matrix.array(".qweight", "i16", (outputs // 4, inputs))
    tiles = unpack_words(words, 4).reshape(outputs // 4, inputs // 64, 4, 64).swapaxes(1, 2)  # one row after the other
    pairs = tiles.reshape(-1, 4, 2, 4).swapaxes(2, 3)  # of each 32: [4, 8], even inputs before odd ones
    codes = np.ascontiguousarray(pairs.reshape(-1, 4, 4, 2).swapaxes(1, 2)).reshape(outputs, inputs)
    scales, minimums = (matrix.floats(name, (rows, outputs))[:groups].T for name in (".scales", zeros))
    turned = np.ascontiguousarray(scales), np.ascontiguousarray(minimums)
    return Affine(codes, 4, inputs // groups, turned[0], minimums=turned[1])


def awq_method(name: str, bits: Any, packing: Any, group_size: int) -> Method:
    """The method of checkpoints packed as AutoAWQ packs.

    Raises:
        CheckpointError: a bit width or packing that cannot be read.
    """
    count = packed_values(".qweight", 4)
    usual = (".qweight", ".qzeros", ".scales")
    fast = (".qweight", ".scaled_zeros", ".scales")
    layouts = {
        "gemm": Layout(usual, _gemm, count),
        "exllama": Layout(usual, _gemm, count),
        "gemv": Layout(usual, partial(_gemv, group_size=group_size), count),
        "gemv_fast": Layout(usual, partial(_gemv_fast, group_size=group_size, zeros=".qzeros"), count),
        "llm-awq": Layout(fast, partial(_gemv_fast, group_size=group_size, zeros=".scaled_zeros"), count),
    }
    if bits != 4 or packing not in layouts:
        raise unsupported(f"AWQ of {bits!r} bits in packing {packing!r}", (f"4 bits in {key}" for key in layouts))
    return Method(name, (layouts[packing],))


def awq(config: Mapping[str, Any]) -> Method:
    """The method of a `quantization_config`.

    Raises:
        CheckpointError: a bit width or packing that cannot be read.
    """
    packing = config.get("version") or config.get("format") or "gemm"
    if config.get("backend") == "llm-awq":
        packing = "llm-awq"
    bits, group_size = config.get("bits", config.get("w_bit", 4)), config.get("group_size", config.get("q_group_size"))
    return awq_method("awq", bits, str(packing).lower(), group_size if isinstance(group_size, int) else 128)
