"""Vectors as JSON tells them: numbers, or base64 of their bytes."""

from __future__ import annotations

import base64
import sys
from array import array
from typing import Any

import numpy as np

_BFLOAT16_SHIFT = 16


def signs(values: array[float], *, signed: bool) -> list[int]:
    """One bit an element, set where it is above 0, eight a byte from the highest; `signed` bytes are less 128."""
    packed = np.packbits(np.frombuffer(values, np.float32) > 0).astype(int)
    told: list[int] = (packed - (128 if signed else 0)).tolist()
    return told


def written(values: array[float], encoding: str | None, kind: str | None = None, endianness: str | None = None) -> Any:
    """Numbers, or base64 of them.

    Args:
        values: float32.
        encoding: "base64"; "binary" or "ubinary", `signs`; else numbers.
        kind: of what base64 holds: "float32" (as without it), "float16" or "bfloat16", rounded to even.
        endianness: of its bytes: "big", "little" or "native" (the machine's); None is little, as OpenAI's clients read.
    """
    if encoding in ("binary", "ubinary"):
        return signs(values, signed=encoding == "binary")
    if encoding != "base64":
        return values.tolist()
    raw = np.frombuffer(values, np.float32)
    with np.errstate(over="ignore"):  # a number beyond float16 is infinite
        held = _bfloat16(raw) if kind == "bfloat16" else raw.astype(np.float16 if kind == "float16" else np.float32)
    order = sys.byteorder if endianness == "native" else endianness or "little"
    return base64.b64encode((held if order == sys.byteorder else held.byteswap()).tobytes()).decode()


def _bfloat16(values: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """The upper halves of float32 numbers, rounded to the nearest, of two as near the even one."""
    bits = values.view(np.uint32)
    odd = (bits >> _BFLOAT16_SHIFT) & 1
    rounded = (bits + np.uint32(0x7FFF) + odd) >> _BFLOAT16_SHIFT
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)
