"""Models as Hugging Face folders with int8, int4, fp8 or nvfp4 weights, in layouts other engines read.

int8 (a scale a row), int4 (groups of 128, 64 or 32), fp8 (a scale a row) and nvfp4 follow compressed-tensors
(https://github.com/neuralmagic/compressed-tensors); fp8_block follows the FP8 checkpoints of DeepSeek-V3
(arXiv:2412.19437). Only weights of linear layers are quantised; activations stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from penstock.config.errors import ConfigError
from penstock.kernels.canonical import Affine, Canonical, Codebook, Plain
from penstock.quant.encode import INT4_GROUPS, quantize_matrix, require_finite
from penstock.quant.encode.blocks import to_bf16
from penstock.quant.encode.groups import NVFP4_GROUP, int4_groups, nvfp4_scales
from penstock.quant.formats.record import Bytes, Floats
from penstock.quant.tensor import TensorInfo
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.imatrix import ImportanceMatrix
from penstock.weights.writers.rows import FLOAT_FORMATS, rows_of
from penstock.weights.writers.safetensors import OutputGroup, StoredOutput

_LINEAR = re.compile(r".*\.layers\.\d+\..*\.weight")
_NOT_LINEAR = re.compile(r".*(norm|router|(block_sparse_moe|mlp)\.gate|embed[^.]*)\.weight")
_TILE = 128

Parts = tuple[tuple[str, str, tuple[int, ...]], ...]
"""(suffix, storage format, shape) of each tensor that a weight becomes."""


def _u8(array: np.ndarray[Any, Any]) -> Bytes:
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1)


def _bf16_scales(scales: Floats) -> Bytes:
    return _u8(to_bf16(np.ascontiguousarray(scales)))


def _packed(matrix: Affine) -> Iterator[Bytes]:
    """Codes side by side in int32 words, lowest bits first; scales; the shape."""
    per_word = 32 // matrix.bits
    rows, inputs = matrix.shape
    padded = np.zeros((rows, -(-inputs // per_word) * per_word), np.uint8)
    padded[:, :inputs] = matrix.codes
    if matrix.bits == 4:
        padded = padded[:, ::2] | (padded[:, 1::2] << np.uint8(4))
    yield _u8(padded)
    yield _bf16_scales(matrix.scales)
    yield _u8(np.array([rows, inputs], np.int64))


def _words(bits: int, inputs: int) -> int:
    return -(-inputs * bits // 32)


def _int8(rows: int, inputs: int, group: int) -> Parts:
    packed, scale = (rows, _words(8, inputs)), (rows, 1)
    return ((".weight_packed", "i32", packed), (".weight_scale", "bf16", scale), (".weight_shape", "i64", (2,)))


def _int4(rows: int, inputs: int, group: int) -> Parts:
    packed, scale = (rows, _words(4, inputs)), (rows, inputs // group)
    return ((".weight_packed", "i32", packed), (".weight_scale", "bf16", scale), (".weight_shape", "i64", (2,)))


def _fp8(rows: int, inputs: int, group: int) -> Parts:
    return ((".weight", "f8_e4m3", (rows, inputs)), (".weight_scale", "f32", (rows, 1)))


def _fp8_block(rows: int, inputs: int, group: int) -> Parts:
    scale = (-(-rows // _TILE), -(-inputs // _TILE))
    return ((".weight", "f8_e4m3", (rows, inputs)), (".weight_scale_inv", "f32", scale))


def _nvfp4(rows: int, inputs: int, group: int) -> Parts:
    return (
        (".weight_packed", "u8", (rows, inputs // 2)),
        (".weight_scale", "f8_e4m3", (rows, inputs // NVFP4_GROUP)),
        (".weight_global_scale", "f32", (1,)),
    )


_PARTS: dict[str, Callable[[int, int, int], Parts]] = {
    "int8": _int8,
    "int4": _int4,
    "fp8": _fp8,
    "fp8_block": _fp8_block,
    "nvfp4": _nvfp4,
}
_SIZES = {"i32": 4, "bf16": 2, "i64": 8, "f8_e4m3": 1, "f32": 4, "u8": 1}


def is_linear(info: TensorInfo) -> bool:
    """Whether a tensor is the weight of a linear layer inside a block."""
    return len(info.shape) == 2 and bool(_LINEAR.fullmatch(info.name)) and not _NOT_LINEAR.fullmatch(info.name)


def _tensors_of(values: Floats, format: str, group: int, importance: Floats | None) -> Iterator[Bytes]:
    if format == "int4":
        require_finite(values)
        matrix: Canonical = int4_groups(values, group, importance)
    else:
        matrix = quantize_matrix(format, values, importance)
    if isinstance(matrix, Affine):
        yield from _packed(matrix)
    elif isinstance(matrix, Codebook):
        codes, divisor = nvfp4_scales(values)
        yield _u8(matrix.codes[:, ::2] | (matrix.codes[:, 1::2] << np.uint8(4)))
        yield _u8(codes)
        yield _u8(np.array([divisor], np.float32))
    elif isinstance(matrix, Plain) and matrix.scales is not None:
        yield matrix.data
        yield _u8(matrix.scales)


def _make(
    checkpoint: Checkpoint, info: TensorInfo, format: str, group: int, importance: Floats | None
) -> Iterator[Bytes]:
    rows = rows_of(partial(checkpoint.read, info.name), info.shape, info.format)
    try:
        yield from _tensors_of(rows.floats(0, rows.shape[0]), format, group, importance)
    except ConfigError as error:
        raise ConfigError(f"tensor {info.name}: {error}") from None


def _copy(checkpoint: Checkpoint, name: str) -> Iterator[Bytes]:
    yield checkpoint.read(name).data


def plan_folder(
    checkpoint: Checkpoint,
    format: str,
    importance: ImportanceMatrix | None = None,
    gguf_name: Callable[[str], str | None] | None = None,
) -> tuple[dict[str, Any], list[OutputGroup], list[str]]:
    """What a quantised folder will hold.

    Args:
        checkpoint: an opened, unquantised model.
        format: one of `config.quantisation.SAFETENSORS_FORMATS`.
        importance: what squared errors of inputs weigh (int4), or None.
        gguf_name: Hugging Face name → the name under which `importance` knows it.

    Returns:
        The new config.json, the tensors, and remarks on those that stay as they are.

    Raises:
        ConfigError: nothing can be quantised.
    """
    if checkpoint.config.get("quantization_config"):
        raise ConfigError(f"{checkpoint.path} is quantised already; name the original model.")
    linear = [info for info in checkpoint.tensors.values() if is_linear(info) and info.format in FLOAT_FORMATS]
    group = _common_group(linear)
    groups: list[OutputGroup] = []
    ignored: list[str] = []
    remarks: list[str] = []
    chosen = {info.name for info in linear if _divides(format, info, group)}
    for name, info in checkpoint.tensors.items():
        if name in chosen:
            weights = None
            if importance is not None and gguf_name is not None:
                weights = importance.rows_of(gguf_name(name) or "", info.shape)[0]
            stem = name.removesuffix(".weight")
            parts = tuple(
                StoredOutput(stem + suffix, kind, shape, int(np.prod(shape)) * _SIZES[kind])
                for suffix, kind, shape in _PARTS[format](info.shape[0], info.shape[1], group)
            )
            groups.append(OutputGroup(parts, partial(_make, checkpoint, info, format, group, weights)))
            continue
        if len(info.shape) > 1 and name.endswith(".weight"):
            ignored.append(name.removesuffix(".weight"))
        if is_linear(info) or len(info.shape) > 2:
            remarks.append(f"{name} of shape {list(info.shape)} cannot take {format}; it stays {info.format}")
        output = StoredOutput(name, info.format, info.shape, info.nbytes)
        groups.append(OutputGroup((output,), partial(_copy, checkpoint, name)))
    if not chosen:
        raise ConfigError(f"{checkpoint.path} has no weight of a linear layer that can take {format}.")
    if checkpoint.config.get("tie_word_embeddings"):
        ignored.append("lm_head")
    config = dict(checkpoint.config)
    config["quantization_config"] = quantization_config(format, group, list(dict.fromkeys(ignored)))
    return config, groups, remarks


def _common_group(linear: list[TensorInfo]) -> int:
    """The int4 group that divides most rows: the smallest of the largest ones, where one does for all."""
    groups = [next((g for g in INT4_GROUPS if info.shape[1] % g == 0), None) for info in linear]
    return min((group for group in groups if group is not None), default=INT4_GROUPS[0])


def _divides(format: str, info: TensorInfo, group: int) -> bool:
    return info.shape[1] % {"int4": group, "nvfp4": NVFP4_GROUP}.get(format, 1) == 0


def quantization_config(format: str, group: int, ignored: list[str]) -> dict[str, Any]:
    """config.json's `quantization_config`, as transformers and vLLM read it."""
    if format == "fp8_block":
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [_TILE, _TILE],
            "modules_to_not_convert": ignored,
        }
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "int8": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "group_size": None}),
        "int4": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group}),
        "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None}),
        "nvfp4": (
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": NVFP4_GROUP},
        ),
    }
    layout, own = kinds[format]
    weights = own | {"symmetric": True, "dynamic": False, "actorder": None, "observer": "minmax"}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": scheme | {"format": layout}},
        "ignore": ignored,
    }
