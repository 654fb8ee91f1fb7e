"""The GGUF container, versions 2 and 3 (ggml, docs/gguf.md): header, metadata, tensor table. Little-endian.

    magic "GGUF" | version u32 | tensor count u64 | key count u64 | keys | tensor infos | padding | tensor data

Every count, length, offset and product is checked against the file's size before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.config import limits
from penstock.config.errors import CheckpointError, quoted
from penstock.quant.formats import decode_to_float32
from penstock.quant.formats.record import Bytes
from penstock.weights.readers.files import map_file

_MAX_KEY_BYTES = 65_535
_MAX_ARRAY_DEPTH = 4
_MAX_ELEMENTS = 2**63 - 1
_DEFAULT_ALIGNMENT = 32
_STRING = 8
_ARRAY = 9
_BOOL = 7
_SCALARS = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
)
_U64 = struct.Struct("<Q")


class GgmlType(NamedTuple):
    """How ggml stores values: the format's name, values a block, bytes a block."""

    name: str
    block_size: int
    block_bytes: int


GGML_TYPES: Mapping[int, GgmlType] = MappingProxyType(
    {
        0: GgmlType("f32", 1, 4),
        1: GgmlType("f16", 1, 2),
        2: GgmlType("q4_0", 32, 18),
        3: GgmlType("q4_1", 32, 20),
        6: GgmlType("q5_0", 32, 22),
        7: GgmlType("q5_1", 32, 24),
        8: GgmlType("q8_0", 32, 34),
        9: GgmlType("q8_1", 32, 40),
        10: GgmlType("q2_k", 256, 84),
        11: GgmlType("q3_k", 256, 110),
        12: GgmlType("q4_k", 256, 144),
        13: GgmlType("q5_k", 256, 176),
        14: GgmlType("q6_k", 256, 210),
        15: GgmlType("q8_k", 256, 292),
        16: GgmlType("iq2_xxs", 256, 66),
        17: GgmlType("iq2_xs", 256, 74),
        18: GgmlType("iq3_xxs", 256, 98),
        19: GgmlType("iq1_s", 256, 50),
        20: GgmlType("iq4_nl", 32, 18),
        21: GgmlType("iq3_s", 256, 110),
        22: GgmlType("iq2_s", 256, 82),
        23: GgmlType("iq4_xs", 256, 136),
        24: GgmlType("i8", 1, 1),
        25: GgmlType("i16", 1, 2),
        26: GgmlType("i32", 1, 4),
        27: GgmlType("i64", 1, 8),
        28: GgmlType("f64", 1, 8),
        29: GgmlType("iq1_m", 256, 56),
        30: GgmlType("bf16", 1, 2),
        34: GgmlType("tq1_0", 256, 54),
        35: GgmlType("tq2_0", 256, 66),
        39: GgmlType("mxfp4", 32, 17),
        40: GgmlType("nvfp4", 64, 36),
        41: GgmlType("q1_0", 128, 18),
        42: GgmlType("q2_0", 64, 18),
    }
)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the tensor table.

    Attributes:
        name: as in the file.
        shape: slowest axis first (the file lists the fastest first).
        format: name of the ggml type, lower case.
        data: [nbytes] uint8, a view of the memory map.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    data: Bytes

    @property
    def nbytes(self) -> int:
        return int(self.data.size)

    def decoded(self) -> npt.NDArray[np.float32]:
        """All values, one after the other."""
        return decode_to_float32(self.format, self.data)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An opened file.

    Attributes:
        path: the file.
        metadata: as plain Python values.
        tensors: by name.
        data: [file bytes] uint8, a view of the memory map.
        spans: where each key's type and value lie in `data`, first byte and last plus one.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    data: Bytes
    spans: Mapping[str, tuple[int, int]]


class _Cursor:
    """Reads forward through the header; refuses to pass the end."""

    __slots__ = ("_items", "_map", "_size", "offset", "path")

    def __init__(self, path: Path, mapped: Any, size: int) -> None:
        self.path = path
        self.offset = 0
        self._map = mapped
        self._size = size
        self._items = limits.MAX_GGUF_ARRAY_ITEMS  # left for all arrays of the file together

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}. The file is damaged or no GGUF model; download it again.")

    def take(self, count: int, what: str) -> bytes:
        start, end = self.offset, self.offset + count
        if end > self._size:
            raise self.fail(f"{what} needs {count} bytes at offset {start}, but the file ends at {self._size}")
        self.offset = end
        data: bytes = self._map[start:end]
        return data

    def number(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def string(self, most: int, what: str) -> str:
        length = self.number("Q", f"the length of {what}")
        if length > most:
            raise self.fail(f"{what} claims {length} bytes; at most {most} are allowed")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8 ({error.reason} at byte {error.start})") from error

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        code = _SCALARS.get(kind)
        if code is not None:
            return self.number(code, what)
        if kind == _STRING:
            return self.string(limits.MAX_GGUF_STRING_BYTES, what)
        if kind != _ARRAY:
            raise self.fail(f"{what} has the unknown value type {kind}; known are 0 to 12")
        if depth >= _MAX_ARRAY_DEPTH:
            raise self.fail(f"{what} nests arrays more than {_MAX_ARRAY_DEPTH} deep")
        item_kind, count = self.number("I", what), self.number("Q", what)
        if count > self._items:
            raise self.fail(
                f"{what} claims {count} items; of {limits.MAX_GGUF_ARRAY_ITEMS} a file may hold, {self._items} are left"
            )
        self._items -= count
        if item_kind == _STRING:
            return self._strings(count, what)
        if item_kind in _SCALARS:
            dtype = np.dtype("<u1" if item_kind == _BOOL else "<" + _SCALARS[item_kind])
            numbers = np.frombuffer(self.take(count * dtype.itemsize, what), dtype=dtype)
            return (numbers != 0 if item_kind == _BOOL else numbers).tolist()
        return [self.value(item_kind, what, depth + 1) for _ in range(count)]

    def _strings(self, count: int, what: str) -> list[str]:
        """A vocabulary is a few hundred thousand strings, so this loop has as little in it as it can."""
        mapped = self._map
        size = self._size
        offset = self.offset
        unpack = _U64.unpack_from
        out: list[str] = []
        append = out.append
        try:
            for _ in range(count):
                start = offset + 8
                offset = start + unpack(mapped, offset)[0]
                if offset > size:
                    raise self.fail(f"item {len(out)} of {what} claims {offset - start} bytes, past the end ({size})")
                append(mapped[start:offset].decode("utf-8"))
        except struct.error as error:
            raise self.fail(f"{what} ends after {len(out)} of {count} items") from error
        except UnicodeDecodeError as error:
            raise self.fail(f"item {len(out)} of {what} is not UTF-8 ({error.reason})") from error
        self.offset = offset
        return out


def _read_metadata(cursor: _Cursor, count: int) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    metadata: dict[str, Any] = {}
    spans: dict[str, tuple[int, int]] = {}
    for index in range(count):
        key = cursor.string(_MAX_KEY_BYTES, f"metadata key {index}")
        if key in metadata:
            raise cursor.fail(f"the metadata key {quoted(key)} appears twice")
        start = cursor.offset
        kind = cursor.number("I", f"the type of {quoted(key)}")
        metadata[key] = cursor.value(kind, f"the value of {quoted(key)}")
        spans[key] = start, cursor.offset
    return metadata, spans


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    shape: tuple[int, ...]
    format: str
    offset: int
    nbytes: int


def _read_entry(cursor: _Cursor, index: int) -> _Entry:
    name = cursor.string(limits.MAX_TENSOR_NAME_CHARS, f"the name of tensor {index}")
    what = f"tensor {quoted(name)}"
    rank = cursor.number("I", what)
    if not 1 <= rank <= limits.MAX_TENSOR_DIMS:
        raise cursor.fail(f"{what} has {rank} dimensions; 1 to {limits.MAX_TENSOR_DIMS} are allowed")
    dims = struct.unpack(f"<{rank}Q", cursor.take(8 * rank, f"the dimensions of {what}"))
    kind, offset = cursor.number("I", what), cursor.number("Q", what)
    if kind not in GGML_TYPES:
        known = ", ".join(sorted({stored.name for stored in GGML_TYPES.values()}))
        raise CheckpointError(
            f"{cursor.path}: {what} has the ggml type {kind}, which is not known here: the file is damaged, or "
            f"made for a newer reader. Take a file in one of: {known}."
        )
    stored = GGML_TYPES[kind]
    elements = 1
    for size in dims:
        elements *= size
    if not 0 < elements <= _MAX_ELEMENTS:
        raise cursor.fail(f"{what} of dimensions {dims} has {elements} elements; 1 to 2^63 - 1 are allowed")
    if dims[0] % stored.block_size:
        raise cursor.fail(
            f"{what} has rows of {dims[0]} values, no multiple of the {stored.name} block of {stored.block_size}"
        )
    return _Entry(name, dims[::-1], stored.name, offset, elements // stored.block_size * stored.block_bytes)


def _alignment(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(value) is not int or not 8 <= value <= 2**20 or value & (value - 1):
        raise cursor.fail(f"general.alignment is {str(value)[:40]}; a power of two from 8 to 2^20 is allowed")
    return value


def _place(cursor: _Cursor, entries: list[_Entry], alignment: int, data: Bytes) -> dict[str, GgufTensor]:
    """Checks that all tensors lie inside the file, aligned and apart, and makes their views."""
    start = -(-cursor.offset // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for entry in entries:
        first, last = start + entry.offset, start + entry.offset + entry.nbytes
        what = f"tensor {quoted(entry.name)}"
        if entry.name in tensors:
            raise cursor.fail(f"{what} appears twice")
        if entry.offset % alignment:
            raise cursor.fail(f"{what} starts at offset {entry.offset}, no multiple of the alignment {alignment}")
        if last > data.size:
            raise cursor.fail(f"{what} lies at bytes {first} to {last}, but the file ends at {data.size}")
        tensors[entry.name] = GgufTensor(entry.name, entry.shape, entry.format, data[first:last])
    ordered = sorted(entries, key=lambda entry: entry.offset)
    for before, after in pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise cursor.fail(
                f"tensors {quoted(before.name)} and {quoted(after.name)} overlap: the first has {before.nbytes} "
                f"bytes from offset {before.offset}, the second starts at {after.offset}"
            )
    return tensors


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    magic = cursor.take(4, "the magic number")
    if magic != b"GGUF":
        raise CheckpointError(f"{cursor.path} is no GGUF file: it starts with {magic!r} instead of b'GGUF'.")
    version = cursor.number("I", "the version")
    if version not in (2, 3):
        if version and version & 0xFFFF == 0:
            raise CheckpointError(f"{cursor.path} is big-endian; convert the model again for little-endian machines.")
        raise CheckpointError(f"{cursor.path} is GGUF version {version}; versions 2 and 3 are read. Convert it again.")
    tensors, keys = cursor.number("Q", "the tensor count"), cursor.number("Q", "the key count")
    if tensors > limits.MAX_TENSORS:
        raise cursor.fail(f"the header claims {tensors} tensors; at most {limits.MAX_TENSORS} are allowed")
    if keys > limits.MAX_GGUF_KEYS:
        raise cursor.fail(f"the header claims {keys} metadata keys; at most {limits.MAX_GGUF_KEYS} are allowed")
    return tensors, keys


def read_gguf_file(path: Path) -> GgufFile:
    """Opens one GGUF file (one shard of a split model).

    Raises:
        CheckpointError: not a readable GGUF file; the message names the key or tensor and the numbers.
    """
    mapped, data = map_file(path)
    cursor = _Cursor(path, mapped, data.size)
    tensor_count, key_count = _read_counts(cursor)
    metadata, spans = _read_metadata(cursor, key_count)
    alignment = _alignment(cursor, metadata)
    entries = [_read_entry(cursor, index) for index in range(tensor_count)]
    return GgufFile(path, metadata, _place(cursor, entries, alignment, data), data, spans)
