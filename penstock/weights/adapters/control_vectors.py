"""Control vectors in GGUF files, as llama.cpp writes them (`cvector-generator`; repeng exports them too).

`general.architecture` is "controlvector"; a tensor `direction.N` [hidden] is added to what block N gives,
counted from 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from penstock.config.errors import CheckpointError, quoted
from penstock.quant.formats import decode_to_float32
from penstock.quant.formats.record import Floats
from penstock.weights.readers.gguf_file import read_gguf_file

_DIRECTION: Final = re.compile(r"direction\.([1-9]\d{0,4})")


def read_control_vector(path: Path) -> Mapping[int, Floats]:
    """The directions of a file by the number of the block, each [hidden] float32.

    Raises:
        CheckpointError: it is damaged, or no control vector.
    """
    if not path.is_file():
        raise CheckpointError(f"there is no control vector at {path}; give a .gguf file.")
    file = read_gguf_file(path)
    kind = file.metadata.get("general.architecture")
    if kind != "controlvector":
        raise CheckpointError(f"{path} is no control vector: its general.architecture is {quoted(str(kind))}.")
    found = {}
    for name, tensor in file.tensors.items():
        number = _DIRECTION.fullmatch(name)
        if number is None or len(tensor.shape) != 1:
            raise CheckpointError(f"{path} holds {quoted(name)} {list(tensor.shape)}; a control vector has directions.")
        direction = decode_to_float32(tensor.format, tensor.data)
        if not np.isfinite(direction).all():
            raise CheckpointError(f"{path}: {quoted(name)} has values that are no finite numbers.")
        found[int(number[1])] = direction
    if not found:
        raise CheckpointError(f"{path} holds no directions.")
    return found
