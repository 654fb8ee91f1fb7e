"""Digests: what names a blob, and what its bytes are held against before they get that name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from penstock.config.errors import CheckpointError, quoted

_SHA256 = re.compile(r"sha256[:-]([0-9a-f]{64})")
_PIECE = 4 << 20


@dataclass(frozen=True, slots=True)
class Digest:
    """What bytes must hash to.

    Attributes:
        kind: "sha256", or "git": git's own digest of a small file, SHA-1 over a header and the bytes.
        hex: lower case.
    """

    kind: str
    hex: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.hex}"

    @property
    def file_name(self) -> str:
        """The name of its blob in a store, as Ollama has it too."""
        return f"{self.kind}-{self.hex}"


def sha256(text: str) -> Digest:
    """Reads "sha256:…" (or "sha256-…", as files are named).

    Raises:
        CheckpointError: it is anything else, such as a path.
    """
    match = _SHA256.fullmatch(text) if len(text) < 100 else None
    if match is None:
        raise CheckpointError(f"{quoted(text)} is no digest; sha256: and 64 lower-case hexadecimal digits are needed.")
    return Digest("sha256", match[1])


def digest_of(data: bytes) -> Digest:
    """The SHA-256 of bytes."""
    return Digest("sha256", hashlib.sha256(data).hexdigest())


def digest_of_file(path: Path, told: Callable[[int], None] = lambda count: None) -> Digest:
    """The SHA-256 of a file; `told` gets the bytes of each piece."""
    with path.open("rb") as file:
        return _hashed("sha256", file, path.stat().st_size, told)


def matches(path: Path, wanted: Digest, told: Callable[[int], None] = lambda count: None) -> bool:
    """Whether a file has that digest."""
    with path.open("rb") as file:
        return _hashed(wanted.kind, file, path.stat().st_size, told) == wanted


def _hashed(kind: str, file: BinaryIO, size: int, told: Callable[[int], None]) -> Digest:
    state = hashlib.sha256() if kind == "sha256" else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    while piece := file.read(_PIECE):
        state.update(piece)
        told(len(piece))
    return Digest(kind, state.hexdigest())
