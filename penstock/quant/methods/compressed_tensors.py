"""compressed-tensors checkpoints (LLM Compressor): every format it writes for whole weights.

`weight_packed` int32 [N, K · bits / 32] with `weight_scale` [N, K / g] and zero points packed along the outputs;
`weight_packed` uint8 of four-bit floats; or `weight` int8 or float8 with its scales. Codes are signed and stored plus
half their range. Quantised activations are arithmetic of other engines; weights are used as they are here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from penstock.kernels.canonical import Affine, Blocks, Plain
from penstock.quant.formats.record import Floats
from penstock.quant.methods.affine import group_order, with_zeros
from penstock.quant.methods.bits import unpack_words
from penstock.quant.methods.float4 import mxfp4_matrix, nvfp4_stored
from penstock.quant.methods.fp8 import ACTIVATION_SCALES, tiled_floats
from penstock.quant.methods.record import Layout, Matrix, Method, unsupported
from penstock.quant.tensor import TensorInfo

FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mixed-precision",
)  # fmt: skip
_WIDTHS = tuple(range(1, 9))


def _either(numbers: frozenset[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))


def _row_scales(matrix: Matrix) -> tuple[Floats, int]:
    """Scales [N, K / g] and g; one scale of the whole matrix is given to every row."""
    rows, scale = matrix.shape[0], ".weight_scale"
    shape = matrix.stored_shape(scale)
    if math.prod(shape) == 1:
        return np.full((rows, 1), matrix.floats(scale, (1,))[0], dtype=np.float32), matrix.shape[1]
    groups = shape[-1] if len(shape) > 1 else 1
    return matrix.floats(scale, (rows, groups)), matrix.group_size(scale, groups)


def _packed(matrix: Matrix, *, widths: frozenset[int], sizes: frozenset[int]) -> Affine | Blocks:
    if matrix.tensors[".weight_packed"].info.format == "u8":
        return mxfp4_matrix(matrix, ".weight_packed", ".weight_scale")
    matrix.check_noted_shape(".weight_shape")
    rows, inputs = matrix.shape
    words = matrix.stored_shape(".weight_packed")[-1]
    bits = next((bits for bits in range(1, 9) if math.ceil(inputs * bits / 32) == words), None)
    if bits is None:
        raise matrix.error(".weight_packed", f"has {words} words a row of {inputs} inputs: no width of 1 to 8 bits")
    if widths and bits not in widths:
        raise matrix.error(".weight_packed", f"has {bits} bits a weight where num_bits is {_either(widths)}")
    packed = matrix.array(".weight_packed", "i32", (rows, words))
    codes = np.ascontiguousarray(unpack_words(packed, bits)[:, :inputs])
    scales, group = _row_scales(matrix)
    if sizes and scales.shape[1] > 1 and group not in sizes:
        raise matrix.error(".weight_scale", f"has groups of {group} inputs where group_size is {_either(sizes)}")
    order = group_order(matrix, ".weight_g_idx", group)
    if order is not None:
        codes = np.take(codes, order, axis=1)
    if not matrix.has(".weight_zero_point"):
        return Affine(codes, bits, group, scales, zero=1 << (bits - 1), order=order)
    points = matrix.array(".weight_zero_point", "i32", (math.ceil(rows * bits / 32), scales.shape[1]))
    return with_zeros(codes, bits, group, scales, np.ascontiguousarray(unpack_words(points.T, bits)[:, :rows].T), order)


def _whole(matrix: Matrix, *, block: tuple[int, int] | None) -> Affine | Plain:
    if matrix.tensors[".weight"].info.format != "i8":
        return tiled_floats(matrix, ".weight_scale", block)
    codes = matrix.array(".weight", "i8", matrix.shape).view(np.uint8) ^ np.uint8(0x80)
    scales, group = _row_scales(matrix)
    if not matrix.has(".weight_zero_point"):
        return Affine(codes, 8, group, scales, zero=128)
    points = matrix.array(".weight_zero_point", "i8").view(np.uint8) ^ np.uint8(0x80)
    if points.size not in (1, scales.size):
        raise matrix.error(".weight_zero_point", f"has {points.size} zero points for {scales.size} scales")
    zeros = points.reshape(scales.shape) if points.size > 1 else np.full(scales.shape, points.item(), dtype=np.uint8)
    return with_zeros(codes, 8, group, scales, zeros)


def _values(infos: Mapping[str, TensorInfo], *, bits: int, group: int) -> int:
    packed, scale = infos[".weight_packed"], infos[".weight_scale"]
    if packed.format == "u8":
        return 2 * packed.nbytes
    return math.prod(scale.shape) * group if group > 0 else packed.nbytes * 8 // bits


def _mappings(groups: Any) -> list[Mapping[str, Any]]:
    return [one for one in groups.values() if isinstance(one, Mapping)] if isinstance(groups, Mapping) else []


def compressed_tensors(config: Mapping[str, Any]) -> Method:
    """The method of a `quantization_config`.

    Raises:
        CheckpointError: a format that cannot be read.
    """
    kind = config.get("format", "pack-quantized")
    if kind not in FORMATS:
        raise unsupported(f"compressed-tensors format {kind!r}", FORMATS)
    for name, what in (("sparsity_config", "format"), ("transform_config", "config_groups")):
        extra = config.get(name)
        if isinstance(extra, Mapping) and extra.get(what, "dense") not in ("dense", {}):
            raise unsupported(f"weights under a {name}", ("whole, untransformed weights",))
    groups = config.get("config_groups")
    if groups is not None and not isinstance(groups, Mapping):
        raise unsupported(f"config_groups {groups!r}", ("groups by name",))
    schemes = [one["weights"] for one in _mappings(groups) if isinstance(one.get("weights"), Mapping)]
    for one in schemes:
        if one.get("num_bits", 4) not in _WIDTHS:
            raise unsupported(f"num_bits {one['num_bits']!r}", _WIDTHS)
        if type(one.get("group_size", -1)) is not int and one["group_size"] is not None:
            raise unsupported(f"group_size {one['group_size']!r}", ("a number of inputs", "null"))
    weights = schemes[0] if schemes else {}
    widths = frozenset(one["num_bits"] for one in schemes if "num_bits" in one)
    sizes = frozenset(one["group_size"] for one in schemes if (one.get("group_size") or 0) > 0)
    size = weights.get("group_size")
    bits = weights.get("num_bits")
    tile = weights.get("block_structure")
    block = (int(tile[0]), int(tile[1])) if isinstance(tile, (list, tuple)) and len(tile) == 2 else None
    whole = partial(_whole, block=block)
    nvfp4 = partial(nvfp4_stored, packed=".weight_packed", whole=".weight_global_scale", divide=True)
    count = partial(_values, bits=bits if isinstance(bits, int) else 4, group=size if isinstance(size, int) else -1)
    more = (".weight_zero_point", ".weight_g_idx", ".weight_shape")
    layouts = (
        Layout((".weight_packed", ".weight_scale", ".weight_global_scale"), nvfp4, count),
        Layout((".weight_packed", ".weight_scale"), partial(_packed, widths=widths, sizes=sizes), count, more),
        Layout((".weight", ".weight_scale"), whole, lambda infos: math.prod(infos[".weight"].shape), more),
    )
    return Method("compressed-tensors", layouts, ACTIVATION_SCALES)
