"""Rows of a model's embedding that a request brings itself, in the place of tokens of its prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

import numpy as np
import numpy.typing as npt

NO_TOKEN: Final = -1  # in the place of a row, where a prompt's tokens are listed
ROW_TYPES: Final = ("float32", "bfloat16", "float16")
PIECE: Final = 16
"""Rows that are computed together and found again together: of the size of a KV block, so that a prefix of rows is
shared about as finely as one of tokens, and a step may end behind any piece."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class GivenRows:
    """Hidden states [rows, width] as an embedding gives them.

    Attributes:
        dtype: one of ROW_TYPES.
        width: values of a row.
        data: row after row, little endian.

    Raises:
        ValueError: the type is another, or the data are no whole rows, of which there is one at least.
    """

    dtype: str
    width: int
    data: bytes

    def __post_init__(self) -> None:
        if self.dtype not in ROW_TYPES:
            raise ValueError(f"rows of {self.dtype}; allowed are {', '.join(ROW_TYPES)}")
        if self.width < 1 or not self.data or len(self.data) % self._row_bytes:
            raise ValueError(f"{len(self.data)} bytes are no rows of {self.width} values of {self.dtype}")

    @property
    def _row_bytes(self) -> int:
        return self.width * _BYTES[self.dtype]

    def __len__(self) -> int:
        return len(self.data) // self._row_bytes

    def floats(self) -> npt.NDArray[np.float32]:
        """[rows, width], each value as it is."""
        if self.dtype == "bfloat16":
            found = (np.frombuffer(self.data, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            found = np.frombuffer(self.data, "<f4" if self.dtype == "float32" else "<f2").astype(np.float32)
        return found.reshape(-1, self.width)

    @property
    def finite(self) -> bool:
        """Whether no value is infinite or no number."""
        return bool(np.isfinite(self.floats()).all())

    def pieces(self) -> Iterator[GivenRows]:
        """PIECE rows after another; the last one has what is left."""
        step = PIECE * self._row_bytes
        for begin in range(0, len(self.data), step):
            yield GivenRows(self.dtype, self.width, self.data[begin : begin + step])

    @property
    def digest(self) -> str:
        """Names type, width and values."""
        return sha256(f"{self.dtype} {self.width} ".encode() + self.data).hexdigest()


def places(ids: Sequence[int], rows: Sequence[GivenRows]) -> list[tuple[str, int, int, GivenRows]]:
    """Where rows stand in a prompt that has NO_TOKEN in their places, piece by piece: digest, start, length, rows."""
    found = []
    at = 0
    for given in rows:
        at = ids.index(NO_TOKEN, at)
        for piece in given.pieces():
            found.append((piece.digest, at, len(piece), piece))
            at += len(piece)
    return found
