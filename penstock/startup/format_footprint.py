"""What a weight of each stored format takes in memory, found out by packing one matrix of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.kernels.canonical import Blocks, Canonical, Plain
from penstock.kernels.cpu import packing
from penstock.quant.canonical_decode import decode_canonical
from penstock.quant.formats import FORMATS, format_bytes
from penstock.quant.methods import checkpoint_method
from penstock.quant.tensor import StoredTensor, TensorInfo

SIZE = 1024  # rows and inputs of the matrices
LARGEST_RATIO = 1.1  # of resident to stored bytes; a format with more counts as converted
GROUP = 128
FLOATS = ("f32", "f16", "bf16", "f8_e4m3", "f8_e5m2")
Tensors = Mapping[str, tuple[str, tuple[int, ...]] | npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class FormatFootprint:
    """How matrices of a format lie in memory.

    Attributes:
        format: its name, with what it depends on.
        packed: the packing, for people, or why there is none.
        ratio: resident bytes over stored bytes.
    """

    format: str
    packed: str
    ratio: float

    @property
    def runs(self) -> bool:
        """Whether it takes about as much memory as in the file; else it is converted."""
        return self.ratio <= LARGEST_RATIO


def format_footprints() -> list[FormatFootprint]:
    """Every format that loads. Needs the native library.

    Raises:
        ConfigError: the library cannot be loaded.
    """
    found = [_footprint(name, matrix, matrix.data.size) for name, matrix in _file_formats()]
    for name, config, tensors in _methods():
        stored = {suffix: _fill("w" + suffix, spec) for suffix, spec in tensors.items()}
        method = checkpoint_method({"quantization_config": config}, {t.info.name: t.info for t in stored.values()})
        key = "w_blocks" if "_blocks" in tensors else "w.weight"
        matrix = method.canonical(key, stored, (SIZE, SIZE))
        found.append(_footprint(name, matrix, sum(tensor.data.size for tensor in stored.values())))
    return found


def _footprint(name: str, matrix: Canonical, stored_bytes: int) -> FormatFootprint:
    """As the loader does it: packed as it is, or decoded to float32 where it cannot be."""
    refused = packing.packable(matrix)
    if refused is not None:
        values = decode_canonical(matrix)
        matrix = Plain("f32", (SIZE, SIZE), values.reshape(-1).view(np.uint8))
    packed = packing.pack(matrix)
    kind = packed.kind if refused is None else f"{packed.kind}: {refused}"
    return FormatFootprint(name, kind, packed.nbytes / stored_bytes)


def _file_formats() -> Iterator[tuple[str, Blocks | Plain]]:
    for name, stored in FORMATS.items():
        data = np.zeros(format_bytes(name, SIZE * SIZE), dtype=np.uint8)
        if stored.block_size > 1:
            yield name, Blocks(name, (SIZE, SIZE), data)
        elif name in FLOATS:
            yield name, Plain(name, (SIZE, SIZE), data)


def _fill(name: str, spec: tuple[str, tuple[int, ...]] | npt.NDArray[Any]) -> StoredTensor:
    """Random codes, and scales that are ordinary numbers; or the bytes given."""
    if isinstance(spec, np.ndarray):
        kind = {"u1": "u8", "i2": "i16", "i4": "i32"}[spec.dtype.str[1:]]
        data = np.ascontiguousarray(spec).reshape(-1).view(np.uint8)
        return StoredTensor(TensorInfo(name, spec.shape, kind, data.size), data)
    fmt, shape = spec
    rng, count = np.random.default_rng(0), math.prod(shape)
    if fmt in ("f16", "f32"):
        values = rng.uniform(0.5, 2, count).astype(np.float16)
        data = (values if fmt == "f16" else values.astype(np.float32)).view(np.uint8)
    else:
        data = rng.integers(0, 256, format_bytes(fmt, count), dtype=np.uint8)
        if fmt == "f8_e4m3":
            data &= 0x77  # finite and positive
    return StoredTensor(TensorInfo(name, shape, fmt, data.size), data)


def _gptq(bits: int, order: npt.NDArray[np.int32]) -> Tensors:
    groups = SIZE // GROUP
    return {
        ".qweight": ("i32", (SIZE * bits // 32, SIZE)),
        ".qzeros": ("i32", (groups, SIZE * bits // 32)),
        ".scales": ("f16", (groups, SIZE)),
        ".g_idx": order,
    }


def _compressed(kind: str, bits: int, strategy: str, group: int | None, packing: str) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "group_size": group, "strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = [GROUP, GROUP]
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": packing, "config_groups": groups}


def _methods() -> Iterator[tuple[str, dict[str, Any], Tensors]]:
    """(name, quantization_config, tensors of one matrix) of the methods of Hugging Face folders."""
    sorted_inputs = (np.arange(SIZE) // GROUP).astype(np.int32)
    shuffled = np.random.default_rng(0).permutation(sorted_inputs)
    for bits in (2, 3, 4, 8):
        config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP}
        yield f"gptq, auto-round {bits} bits, group {GROUP}", config, _gptq(bits, sorted_inputs)
    yield "gptq 4 bits, activation order", {"quant_method": "gptq", "bits": 4}, _gptq(4, shuffled)
    groups = SIZE // GROUP
    awq: Tensors = {
        ".qweight": ("i32", (SIZE, SIZE // 8)),
        ".qzeros": ("i32", (groups, SIZE // 8)),
        ".scales": ("f16", (groups, SIZE)),
    }
    yield f"awq 4 bits, group {GROUP}", {"quant_method": "awq", "bits": 4, "group_size": GROUP}, awq
    yield from _compressed_tensors()
    yield from _float_methods()
    yield from _other_methods()


def _compressed_tensors() -> Iterator[tuple[str, dict[str, Any], Tensors]]:
    name = "compressed-tensors"
    packed: Tensors = {
        ".weight_packed": ("i32", (SIZE, SIZE // 8)),
        ".weight_scale": ("f16", (SIZE, SIZE // GROUP)),
        ".weight_shape": np.array([SIZE, SIZE], dtype=np.int32),
    }
    yield f"{name} W4A16, group {GROUP}", _compressed("int", 4, "group", GROUP, "pack-quantized"), packed
    rows: Tensors = {".weight": ("i8", (SIZE, SIZE)), ".weight_scale": ("f16", (SIZE, 1))}
    yield f"{name} W8A8 int8", _compressed("int", 8, "channel", None, "int-quantized"), rows
    for strategy, shape in (("channel", (SIZE, 1)), ("tensor", (1,)), ("block", (SIZE // GROUP, SIZE // GROUP))):
        floats: Tensors = {".weight": ("f8_e4m3", (SIZE, SIZE)), ".weight_scale": ("f32", shape)}
        yield f"{name} fp8, {strategy}", _compressed("float", 8, strategy, None, "float-quantized"), floats


def _float_methods() -> Iterator[tuple[str, dict[str, Any], Tensors]]:
    scales = ("f32", (SIZE // GROUP, SIZE // GROUP))
    blocks: Tensors = {".weight": ("f8_e4m3", (SIZE, SIZE)), ".weight_scale_inv": scales}
    yield f"fp8, blocks of {GROUP}", {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}, blocks
    four: Tensors = {
        ".weight": ("u8", (SIZE, SIZE // 2)),
        ".weight_scale": ("f8_e4m3", (SIZE, SIZE // 16)),
        ".weight_scale_2": ("f32", ()),
    }
    yield "modelopt nvfp4", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, four
    mx: Tensors = {
        "_blocks": ("u8", (SIZE, SIZE // 32, 16)),
        "_scales": np.full((SIZE, SIZE // 32), 127, dtype=np.uint8),
    }
    yield "mxfp4 (gpt-oss)", {"quant_method": "mxfp4"}, mx


def _other_methods() -> Iterator[tuple[str, dict[str, Any], Tensors]]:
    count = SIZE * SIZE
    state = np.frombuffer(json.dumps({"quant_type": "nf4", "blocksize": 64}).encode(), dtype=np.uint8)
    four: Tensors = {
        ".weight": ("u8", (count // 2, 1)),
        ".weight.absmax": ("f32", (count // 64,)),
        ".weight.quant_map": ("f32", (16,)),
        ".weight.quant_state.bitsandbytes__nf4": state,
    }
    yield "bitsandbytes nf4, fp4", {"quant_method": "bitsandbytes"}, four
    nested = {"quant_type": "nf4", "blocksize": 64, "nested_blocksize": 256, "nested_offset": 0.5}
    twice: Tensors = {
        **four,
        ".weight.absmax": ("u8", (count // 64,)),
        ".weight.nested_absmax": ("f32", (count // 64 // 256,)),
        ".weight.nested_quant_map": ("f32", (256,)),
        ".weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(nested).encode(), dtype=np.uint8),
    }
    yield "bitsandbytes nf4, double quantised", {"quant_method": "bitsandbytes"}, twice
    eight: Tensors = {".weight": ("i8", (SIZE, SIZE)), ".SCB": ("f32", (SIZE,))}
    yield "bitsandbytes int8", {"quant_method": "bitsandbytes"}, eight
    eetq: Tensors = {".weight": ("i8", (SIZE, SIZE)), ".weight_scales": ("f16", (SIZE,))}
    yield "eetq", {"quant_method": "eetq"}, eetq
    for bits in (1, 2, 4, 8):
        hqq: Tensors = {
            ".W_q": ("u8", (count * bits // 8 // 64, 64)),
            ".nbits": np.array([bits], dtype=np.int32),
            ".scale": ("f16", (count // 64, 1)),
            ".zero": ("f16", (count // 64, 1)),
        }
        yield f"hqq {bits} bits, group 64", {"quant_method": "hqq"}, hqq
    for bits in (2, 3, 4, 5, 6, 8):
        mlx: Tensors = {
            ".weight": ("u32", (SIZE, SIZE * bits // 32)),
            ".scales": ("f16", (SIZE, SIZE // 64)),
            ".biases": ("f16", (SIZE, SIZE // 64)),
        }
        yield f"mlx affine {bits} bits, group 64", {"bits": bits, "group_size": 64, "mode": "affine"}, mlx
    ternary: Tensors = {
        ".weight": np.random.default_rng(0).integers(0, 3, (SIZE // 4, SIZE), dtype=np.uint8) * np.uint8(0b1010101),
        ".weight_scale": ("f32", (1,)),
    }
    yield "bitnet", {"quant_method": "bitnet"}, ternary
    for widths in ((4, 4), (4, 3)):
        yield f"exl2 {' and '.join(map(str, sorted(set(widths))))} bits", {"quant_method": "exl2"}, _exl2(widths)
    aqlm: Tensors = {
        ".codes": ("i16", (SIZE, SIZE // 8, 1)),
        ".codebooks": ("f16", (1, 2**16, 1, 8)),
        ".scales": ("f16", (SIZE, 1, 1, 1)),
    }
    yield "aqlm 1x16", {"quant_method": "aqlm"}, aqlm
    trellis: Tensors = {
        ".trellis": ("i16", (SIZE // 16, SIZE // 16, 16 * 4)),
        ".suh": ("f16", (SIZE,)),
        ".svh": ("f16", (SIZE,)),
    }
    yield "exl3 4 bits", {"quant_method": "exl3"}, trellis


def _exl2(bits: tuple[int, int]) -> Tensors:
    """Half of the groups in each width."""
    groups = SIZE // GROUP
    widths = np.repeat(bits, groups // 2)
    words = widths * GROUP // 32
    starts = np.cumsum(words) - words
    return {
        ".q_weight": ("i32", (int(words.sum()), SIZE)),
        ".q_scale": ("i32", (groups, SIZE // 8)),
        ".q_scale_max": ("f16", (groups,)),
        ".q_groups": np.stack([widths, starts], axis=1).reshape(-1).astype(np.int16),
        ".q_invperm": np.random.default_rng(0).permutation(SIZE).astype(np.int32),
    }
