"""Matrices of an opened checkpoint as rows of float32, read a piece at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.config.errors import ConfigError
from penstock.quant.encode import encode_blocks
from penstock.quant.formats import FORMATS, decode_to_float32
from penstock.quant.formats.record import Bytes, Floats
from penstock.quant.tensor import StoredTensor

PIECE_VALUES = 2**23  # values decoded at a time: 32 MiB of float32
FLOAT_FORMATS = ("f32", "f16", "bf16", "f64")


@dataclass(frozen=True, slots=True)
class MatrixToWrite:
    """A matrix, or one of several that are written one after the other.

    Attributes:
        shape: (N, K).
        format: storage format of the rows.
        read: gives the bytes of all rows; called when a piece is needed.
        order: [N] which stored row comes where, or None for the stored order.
        plus: added to every value (norms that are stored less one).
    """

    shape: tuple[int, int]
    format: str
    read: Callable[[], Bytes]
    order: npt.NDArray[np.int64] | None = None
    plus: float = 0.0

    def floats(self, start: int, stop: int) -> Floats:
        """Rows start … stop - 1, [stop - start, K] float32."""
        stored = self.read().reshape(self.shape[0], -1)
        part = stored[start:stop] if self.order is None else stored[self.order[start:stop]]
        values = decode_to_float32(self.format, np.ascontiguousarray(part).reshape(-1)).reshape(-1, self.shape[1])
        return values + np.float32(self.plus) if self.plus else values

    def steps(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows of at most PIECE_VALUES values."""
        step = max(1, PIECE_VALUES // self.shape[1])
        for start in range(0, self.shape[0], step):
            yield start, min(self.shape[0], start + step)


def rows_of(
    stored: Callable[[], StoredTensor], shape: Sequence[int], format: str, order: npt.NDArray[np.int64] | None = None
) -> MatrixToWrite:
    """The rows of one stored tensor; all axes but the last are rows.

    Raises:
        ConfigError: it is no float format: quantising what is quantised would lose twice.
    """
    if format not in FLOAT_FORMATS:
        info = stored().info
        raise ConfigError(
            f"tensor {info.name} is stored as {format}; only {', '.join(FLOAT_FORMATS)} can be quantised. "
            "Name the original, unquantised model."
        )
    columns = shape[-1] if len(shape) > 1 else int(np.prod(shape))
    return MatrixToWrite((int(np.prod(shape)) // columns, columns), format, lambda: stored().data, order)


def encoded(rows: MatrixToWrite, format: str, importance: Floats | None = None) -> Iterator[Bytes]:
    """The rows' bytes in another format, piece by piece; where it is the stored one, bytes are copied.

    Raises:
        ConfigError: a value is not finite.
    """
    copied = format == rows.format and not rows.plus
    for start, stop in rows.steps():
        if copied:
            size = rows.shape[1] // FORMATS[format].block_size * FORMATS[format].block_bytes
            stored = rows.read().reshape(rows.shape[0], size)
            part = stored[start:stop] if rows.order is None else stored[rows.order[start:stop]]
            yield np.ascontiguousarray(part).reshape(-1)
        else:
            yield encode_blocks(format, rows.floats(start, stop), importance)
