"""Float tensors as canonical matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.canonical import Plain

FLOAT_FORMATS: dict[str, torch.dtype] = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8_e4m3": torch.float8_e4m3fn,
    "f8_e5m2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in FLOAT_FORMATS.items()}


def plain_matrix(tensor: Tensor) -> Plain:
    """A float tensor [..., K] as a canonical matrix that shares its memory where it is contiguous."""
    flat = tensor.detach().reshape(-1, tensor.shape[-1]).contiguous()
    data = flat.view(torch.uint8).reshape(-1).numpy()
    return Plain(_NAMES[flat.dtype], (flat.shape[0], flat.shape[1]), data)
