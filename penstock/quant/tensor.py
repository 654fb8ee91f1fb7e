"""A tensor as it lies in a checkpoint: bytes, a format name, a logical shape. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a header says of a tensor.

    Attributes:
        name: key, Hugging Face spelling.
        shape: logical shape, slowest axis first (as torch prints it).
        format: storage format: "f32", "f16", "bf16", "f64", "i8" … "u8", "bool", "f8_e4m3", "f8_e5m2", or a block
            format named as in GGUF, lower case: "q4_0", "q4_k", "mxfp4", …
        nbytes: bytes in the file.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """TensorInfo with its bytes: a read-only, usually memory-mapped, one-dimensional uint8 array."""

    info: TensorInfo
    data: npt.NDArray[np.uint8]
