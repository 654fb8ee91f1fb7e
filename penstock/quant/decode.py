"""Stored bytes → torch tensors: the torch half of the quantised formats."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.config.errors import CheckpointError
from penstock.kernels.canonical import Blocks, Canonical, Plain, take_rows
from penstock.kernels.plain import FLOAT_FORMATS
from penstock.quant.canonical_decode import decode_canonical
from penstock.quant.formats import FORMATS, decode_to_float32
from penstock.quant.formats.record import Bytes
from penstock.quant.tensor import StoredTensor, TensorInfo

_TORCH_TYPES: dict[str, torch.dtype] = FLOAT_FORMATS | {
    "f64": torch.float64,
    "bool": torch.bool,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
    "u16": torch.uint16,
    "u32": torch.uint32,
    "u64": torch.uint64,
}
_CHUNK_ELEMENTS = 2**20  # decoded at a time, so that temporaries stay in cache and small beside the tensor

BlockDecoder = Callable[[str, Bytes, np.ndarray[Any, np.dtype[np.float32]]], None]


def native_block_decoder() -> BlockDecoder | None:
    """The native library's decoder (format, data, out), or None where the library cannot be loaded."""
    try:
        native = importlib.import_module("penstock.kernels.cpu.native")
    except ImportError:
        return None
    available: bool = native.available()
    decoder: BlockDecoder = native.dequantize_blocks
    return decoder if available else None


def _reference_decoder(name: str, data: Bytes, out: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    block = FORMATS[name]
    step = _CHUNK_ELEMENTS // block.block_size
    for start in range(0, data.size // block.block_bytes, step):
        piece = data[start * block.block_bytes : (start + step) * block.block_bytes]
        out[start * block.block_size : (start + step) * block.block_size] = decode_to_float32(name, piece)


def _check(info: TensorInfo, data: Bytes) -> int:
    """Number of elements; raises CheckpointError where format, shape and bytes do not agree."""
    block = FORMATS.get(info.format)
    if block is None:
        raise CheckpointError(
            f"tensor {info.name!r} is stored as {info.format}, which has no decoder; there are: {', '.join(FORMATS)}."
        )
    elements = 1
    for size in info.shape:
        elements *= size
    if elements % block.block_size or elements // block.block_size * block.block_bytes != data.size:
        raise CheckpointError(
            f"tensor {info.name!r} of shape {info.shape} in {info.format} does not match its {data.size} bytes."
        )
    return elements


def _decode_blocks(info: TensorInfo, data: Bytes, flat: Tensor) -> None:
    decoder = native_block_decoder() or _reference_decoder
    if flat.dtype == torch.float32:
        decoder(info.format, data, flat.numpy())
        return
    block = FORMATS[info.format]
    step = _CHUNK_ELEMENTS // block.block_size
    buffer = torch.empty(min(flat.numel(), step * block.block_size), dtype=torch.float32)
    for start in range(0, data.size // block.block_bytes, step):
        piece = data[start * block.block_bytes : (start + step) * block.block_bytes]
        elements = piece.size // block.block_bytes * block.block_size
        decoder(info.format, piece, buffer[:elements].numpy())
        first = start * block.block_size
        flat[first : first + elements].copy_(buffer[:elements])


def _decode_plain(info: TensorInfo, data: Bytes, flat: Tensor) -> None:
    source = _TORCH_TYPES[info.format]
    if source == flat.dtype:
        flat.view(torch.uint8).numpy()[:] = data
        return
    size = FORMATS[info.format].block_bytes
    buffer = torch.empty(min(flat.numel(), _CHUNK_ELEMENTS) * size, dtype=torch.uint8)
    for start in range(0, flat.numel(), _CHUNK_ELEMENTS):
        piece = data[start * size : (start + _CHUNK_ELEMENTS) * size]
        buffer[: piece.size].numpy()[:] = piece
        flat[start : start + piece.size // size].copy_(buffer[: piece.size].view(source))


def dequantize(stored: StoredTensor, dtype: torch.dtype) -> Tensor:
    """Decodes a stored tensor on the CPU.

    Args:
        stored: any format of `quant.formats.FORMATS`.
        dtype: type of the result; values are rounded to it from float32 (or from the plain stored type).

    Returns:
        A contiguous tensor of stored.info.shape that owns its memory.

    Raises:
        CheckpointError: the format cannot be decoded, or bytes and shape disagree.
    """
    info = stored.info
    flat = torch.empty(_check(info, stored.data), dtype=dtype)
    if flat.numel():
        (_decode_plain if info.format in _TORCH_TYPES else _decode_blocks)(info, stored.data, flat)
    return flat.reshape(info.shape)


def canonical_tensor(matrix: Canonical, dtype: torch.dtype) -> Tensor:
    """Decodes a canonical matrix on the CPU: [N, K] of type dtype, which owns its memory."""
    if isinstance(matrix, Blocks) or (isinstance(matrix, Plain) and matrix.scales is None):
        info = TensorInfo("", matrix.shape, matrix.format, matrix.data.size)
        return dequantize(StoredTensor(info, matrix.data), dtype)
    return torch.from_numpy(decode_canonical(matrix)).to(dtype)


def decoded_rows(matrix: Canonical) -> Iterator[Tensor]:
    """The rows of a canonical matrix in float32, some at a time, from the first to the last."""
    rows, inputs = matrix.shape
    step = max(1, _CHUNK_ELEMENTS // max(1, inputs))
    for begin in range(0, rows, step):
        some = np.arange(begin, min(begin + step, rows), dtype=np.int64)
        yield canonical_tensor(take_rows(matrix, some), torch.float32)


def stored_matrix(stored: StoredTensor, shape: tuple[int, int]) -> Canonical | None:
    """A tensor's bytes as a canonical matrix of that shape, without a copy; None where its format is none of one."""
    _check(stored.info, stored.data)
    return matrix_of(stored.info.format, shape, stored.data)


def matrix_of(format: str, shape: tuple[int, int], data: Bytes) -> Canonical | None:
    """The same of bytes of that format, which are not looked at."""
    if format in FLOAT_FORMATS:
        return Plain(format, shape, data)
    if format not in FORMATS or format in _TORCH_TYPES or shape[1] % FORMATS[format].block_size:
        return None
    return Blocks(format, shape, data)
