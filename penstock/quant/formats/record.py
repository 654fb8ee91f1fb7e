"""The record that describes a storage format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Format:
    """How values lie in bytes.

    Attributes:
        name: as in TensorInfo.format.
        block_size: values in one block (1 for plain types); rows are whole blocks.
        block_bytes: bytes of one block.
        decode: [n, block_bytes] contiguous uint8 → [n, block_size] float32.
    """

    name: str
    block_size: int
    block_bytes: int
    decode: Callable[[Bytes], Floats]
