"""Writes GGUF files, version 3 (ggml, docs/gguf.md), tensor by tensor: memory holds one piece of one tensor."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from penstock.quant.formats import format_bytes
from penstock.quant.formats.record import Bytes
from penstock.weights.readers.gguf_file import GGML_TYPES
from penstock.weights.writers.files import replacing

Progress = Callable[[int, int], None]
ALIGNMENT = 32
_NUMBERS = {stored.name: number for number, stored in GGML_TYPES.items()}
_STRING, _ARRAY = 8, 9
_ARRAY_KINDS = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": 7, "u8": 10, "i8": 11, "f8": 12}


@dataclass(frozen=True, slots=True)
class RawValue:
    """A metadata value as another file holds it: its type number and what follows, to be copied as it is."""

    data: bytes


Value = bool | int | float | str | Sequence[str] | npt.NDArray[np.generic] | RawValue
"""Integers are written as u32 (or i32, u64, i64 where they do not fit), floats as f32, arrays by their dtype."""


@dataclass(frozen=True, slots=True)
class TensorToWrite:
    """One tensor.

    Attributes:
        name: as in the file.
        shape: slowest axis first.
        format: name of the ggml type, lower case.
        pieces: its bytes, in order, made as they are asked for.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    pieces: Callable[[], Iterator[Bytes]]

    @property
    def nbytes(self) -> int:
        return format_bytes(self.format, int(np.prod(self.shape)))


def _text(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _value(value: Value) -> bytes:
    if isinstance(value, RawValue):
        return value.data
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        if value < 0:
            return struct.pack("<Ii", 5, value) if value >= -(2**31) else struct.pack("<Iq", 11, value)
        return struct.pack("<II", 4, value) if value < 2**32 else struct.pack("<IQ", 10, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, np.ndarray):
        kind = _ARRAY_KINDS[value.dtype.str[1:]]
        return struct.pack("<IIQ", _ARRAY, kind, value.size) + value.astype(value.dtype.newbyteorder("<")).tobytes()
    return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_text, value))


def _padding(size: int) -> int:
    return -size % ALIGNMENT


def _header(metadata: Mapping[str, Value], tensors: Sequence[TensorToWrite]) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    parts += [_text(key) + _value(value) for key, value in metadata.items()]
    offset = 0
    for tensor in tensors:
        dims = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        parts.append(_text(tensor.name) + dims + struct.pack("<IQ", _NUMBERS[tensor.format], offset))
        offset += tensor.nbytes + _padding(tensor.nbytes)
    header = b"".join(parts)
    return header + bytes(_padding(len(header)))


def _write_tensor(file: BinaryIO, tensor: TensorToWrite, told: Callable[[int], None]) -> None:
    written = 0
    for piece in tensor.pieces():
        file.write(piece.data)
        written += piece.size
        told(piece.size)
    if written != tensor.nbytes:
        raise RuntimeError(f"tensor {tensor.name} gave {written} bytes, {tensor.nbytes} were announced")
    file.write(bytes(_padding(written)))


def write_gguf(
    path: Path, metadata: Mapping[str, Value], tensors: Sequence[TensorToWrite], progress: Progress | None = None
) -> int:
    """Writes a file; it appears under its name when it is complete.

    Args:
        path: where; what lies there is replaced at the end.
        metadata: keys in order; `general.alignment` must not be among them.
        tensors: in file order.
        progress: called with (tensor bytes written, tensor bytes in all).

    Returns:
        The file's size in bytes.

    Raises:
        ConfigError: the file cannot be written.
    """
    total = sum(tensor.nbytes for tensor in tensors)
    done = 0

    def told(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(done, total)

    with replacing(path) as partial, partial.open("wb") as file:
        file.write(_header(metadata, tensors))
        for tensor in tensors:
            _write_tensor(file, tensor, told)
        return file.tell()
