"""8-bit float checkpoints: a weight of float8 beside the scale of each tile, w = value · scale.

`fp8` (DeepSeek-V3, arXiv:2412.19437, and Qwen): `weight_scale_inv`, one number or one a block of 128 × 128. FBGEMM:
`weight_scale` [N, 1]. Scales of activations belong to arithmetic in float8; weights are used as they are here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from penstock.kernels.canonical import Plain
from penstock.quant.methods.record import Layout, Matrix, Method, unsupported

ACTIVATION_SCALES = (r".*\.(input|activation|output|k|v|q)_(scale|zero_point|global_scale|scale_ub|scale_inv)",)


def tiled_floats(matrix: Matrix, scale: str, block: tuple[int, int] | None = None, weight: str = ".weight") -> Plain:
    """Float8 values and the scales of their tiles.

    Args:
        matrix: as stored.
        scale: suffix of the scales: one, one a row, or [tiles of outputs, tiles of inputs].
        block: outputs and inputs of a tile; None to tell from the shape.
        weight: suffix of the values.

    Raises:
        CheckpointError: the scales are not those of such tiles, or the weight is no float8.
    """
    rows, inputs = matrix.shape
    stored = matrix.tensors[weight]
    if stored.info.format not in ("f8_e4m3", "f8_e5m2") or stored.info.shape != matrix.shape:
        shown = f"{stored.info.format}{list(stored.info.shape)}"
        raise matrix.error(weight, f"is {shown} where a float8 matrix {list(matrix.shape)} is needed")
    shape = matrix.stored_shape(scale)
    tiles = (shape[0] if shape else 1, 1) if len(shape) < 2 else (shape[0], shape[-1 if len(shape) == 2 else 2])
    if math.prod(shape) == 1:
        block = matrix.shape
    elif math.prod(shape) == rows == tiles[0]:
        block = (1, inputs)
    elif block is None and 0 not in tiles and rows % tiles[0] == 0 and inputs % tiles[1] == 0:
        block = rows // tiles[0], inputs // tiles[1]
    if block is None or tiles != (math.ceil(rows / block[0]), math.ceil(inputs / block[1])):
        raise matrix.error(scale, f"has shape {list(shape)}, which no tiles of {list(matrix.shape)} values have")
    return Plain(stored.info.format, matrix.shape, stored.data, matrix.floats(scale, tiles), block)


def float_layout(scale: str, block: tuple[int, int] | None = None) -> Layout:
    """Layout of `weight` beside scales of suffix `scale`."""
    return Layout(
        (".weight", scale),
        partial(tiled_floats, scale=scale, block=block),
        lambda infos: math.prod(infos[".weight"].shape),
    )


def _block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    block = config.get("weight_block_size")
    if block is None:
        return None
    if not isinstance(block, (list, tuple)) or len(block) != 2 or any(type(n) is not int or n < 1 for n in block):
        raise unsupported(f"weight_block_size {str(block)[:40]!r}", ("two positive integers", "null"))
    return block[0], block[1]


def fp8(config: Mapping[str, Any]) -> Method:
    """The method of a `quantization_config`.

    Raises:
        CheckpointError: an impossible block size.
    """
    block = _block(config)
    layouts = (float_layout(".weight_scale_inv", block), float_layout(".weight_scale", block))
    return Method("fp8", layouts, ACTIVATION_SCALES)


def fbgemm_fp8(config: Mapping[str, Any]) -> Method:
    """The method of a `quantization_config`."""
    del config  # activation settings only
    return Method("fbgemm_fp8", (float_layout(".weight_scale"),), ACTIVATION_SCALES)
