"""Opening model files: memory maps and JSON objects, every failure a CheckpointError."""

from __future__ import annotations

import json
import mmap
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config import limits
from penstock.config.errors import CheckpointError, quoted
from penstock.quant.formats.record import Bytes


def map_file(path: Path) -> tuple[mmap.mmap, Bytes]:
    """Maps a regular file read-only.

    Returns:
        The map, and the same bytes as a read-only [size] uint8 array.

    Raises:
        CheckpointError: the file cannot be opened or is empty.
    """
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is not a file.")
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:
        raise CheckpointError(f"{path} is empty; download it again.") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror or error}.") from error
    return mapped, np.frombuffer(mapped, dtype=np.uint8)


def let_go(data: Bytes) -> None:
    """Tells the system that bytes of a mapped file are not needed for now; looked at again, they are read again.

    Bytes that lie elsewhere stay as they are.
    """
    base: Any = data
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    mapped = base.obj if isinstance(base, memoryview) else base
    if not isinstance(mapped, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    begin = data.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    first, last = -(-begin // mmap.PAGESIZE), (begin + data.nbytes) // mmap.PAGESIZE
    if first < last:
        mapped.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {quoted(twice)} appears twice")
    return found


def parse_object(text: bytes, what: str) -> dict[str, Any]:
    """Parses JSON that must be an object without repeated keys.

    Raises:
        CheckpointError: it is not; `what` says in the message what was being read.
    """
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(f"{what} is not valid JSON: {reason[:200]}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} holds a {type(value).__name__}; it must be a JSON object.")
    return value


def read_object(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """Reads a JSON object from a file of at most limits.MAX_HEADER_JSON_BYTES; {} if absent and missing_ok.

    Raises:
        CheckpointError: absent, unreadable, too large or not a JSON object.
    """
    try:
        if missing_ok and not path.exists():
            return {}
        size = path.stat().st_size
        if size > limits.MAX_HEADER_JSON_BYTES:
            raise CheckpointError(f"{path} has {size} bytes; at most {limits.MAX_HEADER_JSON_BYTES} are read.")
        return parse_object(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
