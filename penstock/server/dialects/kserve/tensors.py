"""Tensors of the Open Inference Protocol: as JSON, or in binary behind it (Triton's binary tensor data extension)."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from penstock.config import limits
from penstock.server.dialects.kserve.schema import Tensor
from penstock.server.errors import bad_value

_CODES: Mapping[str, str] = MappingProxyType(
    {
        "BOOL": "?",
        "UINT8": "B",
        "UINT16": "H",
        "UINT32": "I",
        "UINT64": "Q",
        "INT8": "b",
        "INT16": "h",
        "INT32": "i",
        "INT64": "q",
        "FP32": "f",
        "FP64": "d",
    }
)
_LENGTH = struct.Struct("<I")


class BinaryTensors:
    """The bytes behind a body's JSON, of which every tensor takes its own, one after the other."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self._at = 0

    def values(self, tensor: Tensor) -> list[Any]:
        """The elements of a tensor.

        Raises:
            RequestError: they are not as many, or not such, as the tensor says.
        """
        where, size = f"inputs.{tensor.name}", (tensor.parameters or {}).get("binary_data_size")
        count = math.prod(tensor.shape)
        if count > limits.MAX_PROMPTS_PER_CALL:
            raise bad_value(f"{where}.shape", tensor.shape, f"at most {limits.MAX_PROMPTS_PER_CALL} elements")
        if size is None:
            found = _flat(tensor.data or [])
            if not all(_fits(value, tensor.datatype) for value in found):
                raise bad_value(f"{where}.data", tensor.data, f"elements of {tensor.datatype}")
        else:
            if not isinstance(size, int) or not 0 <= size <= len(self._data) - self._at:
                raise bad_value(f"{where}.parameters.binary_data_size", size, "the bytes that follow the JSON")
            raw, self._at = bytes(self._data[self._at : self._at + size]), self._at + size
            found = _texts(raw, count, where) if tensor.datatype == "BYTES" else _numbers(raw, count, tensor, where)
        if len(found) != count:
            raise bad_value(f"{where}.shape", tensor.shape, f"that of its {len(found)} elements")
        return found


def binary_texts(texts: Sequence[str]) -> bytes:
    """Texts as a tensor of BYTES."""
    raw = [text.encode("utf-8", "replace") for text in texts]
    return b"".join(_LENGTH.pack(len(one)) + one for one in raw)


def _flat(data: list[Any]) -> list[Any]:
    """The elements of nested lists, in their order."""
    while any(isinstance(item, list) for item in data):
        data = [inner for item in data for inner in (item if isinstance(item, list) else [item])]
    return data


def _fits(value: Any, datatype: str) -> bool:
    if datatype == "BYTES":
        return isinstance(value, str)
    if datatype == "BOOL":
        return isinstance(value, bool)
    return isinstance(value, int if "INT" in datatype else (int, float)) and not isinstance(value, bool)


def _texts(raw: bytes, count: int, where: str) -> list[str]:
    """Elements that each begin with their length, 4 bytes; no more are unpacked than there may be."""
    found: list[str] = []
    at = 0
    while at < len(raw):
        if len(found) == count:
            raise bad_value(where, f"{len(raw)} bytes", f"those of the {count} elements of its shape")
        end = at + _LENGTH.size
        end += _LENGTH.unpack_from(raw, at)[0] if end <= len(raw) else 0
        if end > len(raw):
            raise bad_value(where, f"{len(raw)} bytes", "elements of BYTES, each behind its length in 4 bytes")
        try:
            found.append(raw[at + _LENGTH.size : end].decode())
        except UnicodeDecodeError:
            raise bad_value(where, "bytes that are no text", "UTF-8") from None
        at = end
    return found


def _numbers(raw: bytes, count: int, tensor: Tensor, where: str) -> list[Any]:
    code = f"<{_CODES[tensor.datatype]}"
    if len(raw) != count * struct.calcsize(code):
        raise bad_value(where, f"{len(raw)} bytes", f"{count} whole elements of {tensor.datatype}")
    return [value for (value,) in struct.iter_unpack(code, raw)]
