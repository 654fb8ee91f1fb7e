"""Cases of method_goldens.npz: tensors that other libraries quantised, and the weights they decode them to."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from penstock.quant.tensor import StoredTensor, TensorInfo
from tests.quant.stored import stored

PATH = Path(__file__).parent / "data" / "method_goldens.npz"


@dataclass(frozen=True)
class Golden:
    """One quantised matrix.

    Attributes:
        config: its `quantization_config`.
        tensors: as stored, by suffix.
        weights: [N, K] float32.
    """

    config: dict[str, Any]
    tensors: dict[str, StoredTensor]
    weights: np.ndarray


@cache
def goldens() -> dict[str, Golden]:
    """Every case by name."""
    cases: dict[str, Golden] = {}
    with np.load(PATH) as arrays:
        for entry in arrays.files:
            if entry.endswith("|config"):
                name = entry.removesuffix("|config")
                cases[name] = Golden(json.loads(str(arrays[entry])), {}, arrays[f"{name}|weights"])
        for entry in arrays.files:
            name, suffix, *rest = entry.split("|")
            if not rest:
                continue
            tensor = stored("w" + suffix, arrays[entry])
            if rest[0]:
                size = arrays[entry].size
                shape = arrays[entry].shape if rest[0] != "bf16" else (*arrays[entry].shape[:-1], -1)
                tensor = StoredTensor(TensorInfo("w" + suffix, shape, rest[0], size), tensor.data)
            cases[name].tensors[suffix] = tensor
    return cases
