"""Memory that the native library computes on: packed weights, and blocks of keys and values. No torch here."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.kernels.cpu import native

PACKING = "penstock-packed-3"  # changes whenever packed bytes do; PackedHeader's version in packing/packed.h


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight in native packing: matrices of equally many inputs, one below the other."""

    parts: tuple[Any, ...]

    def matrices(self) -> list[tuple[bytes, memoryview]]:
        """Header and data of every matrix, for a file."""
        return [(part.header, memoryview(part.data)) for part in self.parts]

    @classmethod
    def of_memory(cls, matrices: Iterable[tuple[bytes, int, Any]]) -> Packed:
        """Matrices that lie in memory as `matrices` gave them: (header, address of the data, what keeps it there).

        Raises:
            ValueError: a header is damaged or of another version.
        """
        make = native.library().PackedMatrix.from_memory
        return cls(tuple(make(header, address, owner) for header, address, owner in matrices))

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def kv_layout(kv_type: str, block_size: int, heads: int, key_dim: int, value_dim: int, latent: bool = False) -> Any:
    """How keys and values of these sizes lie in a block."""
    return native.library().KvLayout(kv_type, block_size, heads, key_dim, value_dim, latent)


def block_bytes(layout: Any) -> int:
    """Bytes of one layer's block."""
    return int(layout.key_block_bytes + layout.value_block_bytes)


def zero_pages(num_blocks: int, block_bytes: int) -> npt.NDArray[np.uint8]:
    """[num_blocks, block_bytes] of zeros, in huge pages if there are; untouched ones take no memory."""
    kind = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    memory = mmap.mmap(-1, max(1, num_blocks * block_bytes), **kind)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)[: num_blocks * block_bytes].reshape(num_blocks, block_bytes)
