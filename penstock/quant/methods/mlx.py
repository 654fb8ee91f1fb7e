"""MLX checkpoints, and Hugging Face's "metal" alike: `weight` in uint32 words along the inputs, lowest bits first.

Mode "affine": w = scale · code + bias with `scales` and `biases` [N, K / g]. Modes "mxfp4" and "mxfp8" (E8M0 scales of
32 values) and "nvfp4" (float8 E4M3 scales of 16) have no biases. Layers may differ from the checkpoint's setting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from penstock.kernels.canonical import Affine, Blocks, Codebook, Plain
from penstock.quant.formats import decode_to_float32
from penstock.quant.formats.mxfp4 import half_scale
from penstock.quant.methods.bits import unpack_words
from penstock.quant.methods.float4 import mxfp4_matrix, nvfp4_groups, nvfp4_matrix
from penstock.quant.methods.record import Layout, Matrix, Method, unsupported
from penstock.quant.tensor import TensorInfo

BITS = (1, 2, 3, 4, 5, 6, 8)
MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")


def _groups(matrix: Matrix, settings: Mapping[str, Any]) -> int:
    """Groups a row, as the scales and the layer's setting agree."""
    shape = matrix.stored_shape(".scales")
    groups = shape[-1] if shape else 1
    group = matrix.group_size(".scales", groups)
    stated = _stated(settings, matrix.tensors[".weight"].info)
    if stated not in (None, group):
        raise matrix.error(".scales", f"makes groups of {group} inputs where the configuration says {stated}")
    return groups


def _stated(settings: Mapping[str, Any], info: TensorInfo) -> int | None:
    """The layer's group size, or the checkpoint's."""
    own = settings.get(info.name.removesuffix(".weight"))
    group = (own if isinstance(own, Mapping) else settings).get("group_size")
    return group if isinstance(group, int) else None


def _affine(matrix: Matrix, *, biases: str, settings: Mapping[str, Any]) -> Affine:
    rows, inputs = matrix.shape
    words, groups = (matrix.stored_shape(".weight") or (1,))[-1], _groups(matrix, settings)
    bits = next((bits for bits in BITS if words * 32 == inputs * bits), None)
    if bits is None:
        listed = ", ".join(map(str, BITS))
        raise matrix.error(".weight", f"has {words} words a row of {inputs} inputs, which is none of {listed} bits")
    codes = unpack_words(matrix.array(".weight", "u32", (rows, words)), bits)
    scales, minimums = (matrix.floats(name, (rows, groups)) for name in (".scales", biases))
    return Affine(codes, bits, matrix.group_size(".scales", groups), scales, minimums=minimums)


def _floats(matrix: Matrix, *, settings: Mapping[str, Any]) -> Blocks | Codebook | Plain:
    rows, inputs = matrix.shape
    groups = _groups(matrix, settings)
    if inputs // groups == 16:
        codes = matrix.array(".scales", "u8", nvfp4_groups(matrix, ".scales"))
        floats = decode_to_float32("f8_e4m3", codes.reshape(-1)).reshape(codes.shape)
        if not np.isfinite(floats).all():
            raise matrix.error(".scales", "holds NaN among its scales")
        packed = matrix.array(".weight", "u32", (rows, inputs // 8)).view(np.uint8)
        return nvfp4_matrix(matrix, packed, floats)
    data = matrix.tensors[".weight"].data
    if data.size * 2 == rows * inputs:
        return mxfp4_matrix(matrix, ".weight", ".scales")
    codes = matrix.array(".scales", "u8")
    if data.size != rows * inputs or codes.size * 32 != data.size or (codes == 0xFF).any():
        raise matrix.error(".scales", f"does not scale {rows} rows of {inputs} float8 values in groups of 32")
    with np.errstate(over="ignore"):
        scales = (half_scale(codes) * np.float32(2)).reshape(rows, groups)
    return Plain("f8_e4m3", matrix.shape, data, scales, (1, 32))


def _values(infos: Mapping[str, TensorInfo], *, settings: Mapping[str, Any]) -> int:
    return math.prod(infos[".scales"].shape) * (_stated(settings, infos[".weight"]) or 64)


def mlx(config: Mapping[str, Any], *, name: str = "mlx", biases: str = ".biases") -> Method:
    """The method of a `quantization`, or of a `quantization_config` without quant_method.

    Raises:
        CheckpointError: a bit width or mode that cannot be read.
    """
    bits, mode = config.get("bits", 4), config.get("mode", "affine")
    if bits not in BITS or mode not in MODES:
        raise unsupported(f"{bits!r} bits in mode {mode!r}", (f"{BITS} bits", *MODES))
    count = partial(_values, settings=config)
    affine = Layout((".weight", ".scales", biases), partial(_affine, biases=biases, settings=config), count)
    return Method(name, (affine, Layout((".weight", ".scales"), partial(_floats, settings=config), count)))


def metal(config: Mapping[str, Any]) -> Method:
    """The method of a `quantization_config`.

    Raises:
        CheckpointError: a bit width that cannot be read.
    """
    return mlx({"group_size": 64, **config}, name="metal", biases=".qbiases")
