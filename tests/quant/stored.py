"""Arrays as a checkpoint reader would hand them over."""

from __future__ import annotations

import numpy as np
import torch

from penstock.quant.tensor import StoredTensor, TensorInfo

_KINDS = {"float32": "f32", "float16": "f16", "bool": "bool"}
_TORCH = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "f8_e4m3", torch.float8_e5m2: "f8_e5m2"}


def stored(name: str, values: np.ndarray | torch.Tensor) -> StoredTensor:
    """A read-only stored tensor of the values' own type."""
    if isinstance(values, torch.Tensor):
        fmt = _TORCH.get(values.dtype)
        shape = tuple(values.shape)
        array = values.contiguous().reshape(-1)
        raw = (array.view(torch.uint8) if fmt else array).numpy()
        fmt = fmt or _format(raw)
    else:
        fmt, shape, raw = _format(values), values.shape, np.ascontiguousarray(values).reshape(-1)
    data = raw.view(np.uint8).copy()
    data.flags.writeable = False
    return StoredTensor(TensorInfo(name, shape, fmt, data.size), data)


def _format(values: np.ndarray) -> str:
    return _KINDS.get(values.dtype.name) or f"{values.dtype.kind}{8 * values.dtype.itemsize}"
