"""Names of blocks that others can compute: vLLM's hash chain over tokens, so that an outside indexer finds the same.

A block's hash is SHA-256 over (hash of the block before, its tokens, what tells it from others of equal tokens). These
are written as canonical CBOR (RFC 8949, 4.2.1), or as Python's pickle module writes them (protocol 5). The hash before
the first block is that of PYTHONHASHSEED's text; where that is not set it is drawn, and nobody else computes the same.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

Extra: TypeAlias = "tuple[Any, ...] | None"
"""What tells a block from others of the same tokens: names of adapters, (digest, offset) of media, the cache salt."""
_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY = range(5)  # major types of CBOR
_NULL: Final = b"\xf6"
_MEMOIZE: Final = b"\x94"


def cbor(value: Any) -> bytes:
    """Integers, texts, bytes, None and sequences of these in canonical CBOR.

    Raises:
        TypeError: it is something else.
    """
    out = bytearray()
    _write(out, value)
    return bytes(out)


def _write(out: bytearray, value: Any) -> None:
    if value is None:
        out += _NULL
    elif type(value) is int:
        _head(out, _UNSIGNED if value >= 0 else _NEGATIVE, value if value >= 0 else -1 - value)
    elif isinstance(value, bytes):
        _head(out, _BYTES, len(value))
        out += value
    elif isinstance(value, str):
        text = value.encode()
        _head(out, _TEXT, len(text))
        out += text
    elif isinstance(value, (tuple, list)):
        _head(out, _ARRAY, len(value))
        for one in value:
            _write(out, one)
    else:
        raise TypeError(f"{type(value).__name__} is not in the hash of a block")


def _head(out: bytearray, major: int, number: int) -> None:
    """A major type with its number in as few bytes as it takes."""
    if number < 24:
        out.append(major << 5 | number)
    elif number < 1 << 8:
        out += bytes((major << 5 | 24, number))
    elif number < 1 << 16:
        out += struct.pack(">BH", major << 5 | 25, number)
    elif number < 1 << 32:
        out += struct.pack(">BI", major << 5 | 26, number)
    else:
        out += struct.pack(">BQ", major << 5 | 27, number)


def as_pickle(value: Any) -> bytes:
    """Integers of 32 bits, texts, bytes, None and tuples of these as `pickle.dumps` writes them, in one frame.

    Raises:
        TypeError, struct.error: it is something else.
    """
    out = bytearray()
    _pickle(out, value)
    out += b"."
    return b"\x80\x05\x95" + struct.pack("<Q", len(out)) + bytes(out)


def _pickle(out: bytearray, value: Any) -> None:
    if value is None:
        out += b"N"
    elif type(value) is int:
        out += struct.pack("<cB", b"K", value) if 0 <= value < 1 << 8 else _wider(value)
    elif isinstance(value, bytes):
        out += _counted(b"C", b"B", value)
    elif isinstance(value, str):
        out += _counted(b"\x8c", b"X", value.encode())
    elif isinstance(value, tuple) and value:
        few = len(value) < 4
        out += b"" if few else b"("
        for one in value:
            _pickle(out, one)
        out += (b"", b"\x85", b"\x86", b"\x87")[len(value)] if few else b"t"
        out += _MEMOIZE
    else:
        raise TypeError(f"{type(value).__name__} is not in the hash of a block")


def _wider(value: int) -> bytes:
    return struct.pack("<cH", b"M", value) if 0 <= value < 1 << 16 else struct.pack("<ci", b"J", value)


def _counted(short: bytes, long: bytes, value: bytes) -> bytes:
    head = struct.pack("<cB", short, len(value)) if len(value) < 256 else struct.pack("<cI", long, len(value))
    return head + value + _MEMOIZE


_WRITERS: Final[dict[str, Callable[[Any], bytes]]] = {"sha256_cbor": cbor, "sha256": as_pickle}


class BlockHasher:
    """Hashes blocks by one of `config.kv_events.HASH_ALGORITHMS`.

    Attributes:
        none: what stands for the block before the first.
    """

    def __init__(self, algorithm: str, seed: str | None) -> None:
        """`seed` is PYTHONHASHSEED, None where that is not set."""
        self._write = _WRITERS[algorithm]
        self.none = os.urandom(32) if seed is None else self._hash(seed)

    def hash(self, before: bytes, tokens: Sequence[int], extra: Extra) -> bytes:
        """The hash of a block; `before` is that of the block before it, b"" for none."""
        return self._hash((before or self.none, tuple(tokens), extra))

    def _hash(self, value: Any) -> bytes:
        return hashlib.sha256(self._write(value)).digest()


def as_number(digest: bytes) -> int:
    """The last 64 bits of a hash, by which vLLM's events name it unless they are told otherwise."""
    return int.from_bytes(digest[-8:], "big")
