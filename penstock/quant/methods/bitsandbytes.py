"""bitsandbytes checkpoints: NF4 and FP4 (Dettmers et al., arXiv:2305.14314) and LLM.int8() (arXiv:2208.07339).

Four bits: `weight` holds two codes a byte of the row-major matrix, the earlier input in the high half; `absmax` the
scale of each block of consecutive values, or with nested quantisation a code of `nested_quant_map` under
`nested_absmax` a block of 256, plus an offset; `quant_map` the table; `quant_state` sizes as JSON. Eight bits: `weight`
int8 [N, K], `SCB` [N] the largest magnitude of each row: w = value · SCB / 127.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.kernels.canonical import Affine, Codebook
from penstock.quant.formats.record import Bytes, Floats
from penstock.quant.methods.bits import unpack
from penstock.quant.methods.record import Layout, Matrix, Method, packed_values

_STATES = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")


def _state(matrix: Matrix) -> dict[str, Any]:
    suffix = next((suffix for suffix in _STATES if matrix.has(suffix)), None)
    if suffix is None:
        raise matrix.error(".weight", f"has no {' or '.join(_STATES)} beside it")
    try:
        state = json.loads(matrix.tensors[suffix].data.tobytes())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise matrix.error(suffix, f"is no JSON: {error}") from error
    if not isinstance(state, dict) or type(state.get("blocksize")) is not int or state["blocksize"] < 2:
        raise matrix.error(suffix, "states no blocksize")
    return state


def _block_scales(matrix: Matrix, state: Mapping[str, Any], blocks: int) -> Floats:
    if not matrix.has(".weight.nested_absmax"):
        return matrix.floats(".weight.absmax", (blocks,))
    codes = matrix.array(".weight.absmax", "u8", (blocks,))
    table = matrix.floats(".weight.nested_quant_map", (256,))
    size, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if type(size) is not int or size < 1 or not isinstance(offset, (int, float)) or not math.isfinite(offset):
        raise matrix.error(".weight.nested_absmax", "lacks nested_blocksize or nested_offset beside it")
    outer = matrix.floats(".weight.nested_absmax", (math.ceil(blocks / size),))
    scales: Floats = table[codes] * np.repeat(outer, size)[:blocks] + np.float32(offset)
    return scales


def _four_bits(matrix: Matrix) -> Codebook:
    rows, inputs = matrix.shape
    state, packed = _state(matrix), matrix.tensors[".weight"].data
    values, block = rows * inputs, int(state["blocksize"])
    if packed.size * 2 != values or inputs % 2:
        raise matrix.error(".weight", f"has {packed.size} bytes where {rows} rows of {inputs} inputs are needed")
    group = math.gcd(inputs, block)  # blocks run over the ends of rows that they do not divide
    scales = _block_scales(matrix, state, math.ceil(values / block))
    if group != block:
        scales = scales[np.arange(values // group) * group // block]
    swapped: Bytes = (packed >> np.uint8(4)) | (packed << np.uint8(4))
    codes = unpack(swapped.reshape(rows, inputs // 2), 4)
    return Codebook(codes, matrix.floats(".weight.quant_map", (16,)), group, scales.reshape(rows, inputs // group))


def _eight_bits(matrix: Matrix) -> Affine:
    rows, inputs = matrix.shape
    if matrix.has(".weight_format") and matrix.array(".weight_format", "u8").any():
        raise matrix.error(".weight_format", "is not 0: only weights stored row by row can be read")
    codes = matrix.array(".weight", "i8", matrix.shape).view(np.uint8) ^ np.uint8(0x80)
    return Affine(codes, 8, inputs, matrix.floats(".SCB", (rows, 1)) / np.float32(127), zero=128)


def bitsandbytes(config: Mapping[str, Any]) -> Method:
    """The method of a `quantization_config`."""
    del config  # both widths may stand in one checkpoint; the tensors tell
    nested = (".weight.nested_absmax", ".weight.nested_quant_map", *_STATES)
    four = Layout((".weight", ".weight.absmax", ".weight.quant_map"), _four_bits, packed_values(".weight", 4), nested)
    eight = Layout((".weight", ".SCB"), _eight_bits, packed_values(".weight", 8), (".weight_format",))
    return Method("bitsandbytes", (four, eight))
