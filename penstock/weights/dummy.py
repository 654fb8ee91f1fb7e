"""Random weights for a model of which there is a configuration only: what a machine can hold, and how fast.

A weight that layers pack is made where it will lie, or as a quantised matrix of few rows that repeat. The same options
give the same weights on the same kind of device.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.config.errors import CheckpointError, ConfigError
from penstock.kernels.api import Matrix, resolve_kernels
from penstock.kernels.canonical import Canonical, Floats, take_rows
from penstock.kernels.registry import KernelContext
from penstock.layers.weight import Weight
from penstock.models.registry import build_model
from penstock.quant.decode import canonical_tensor
from penstock.quant.encode import quantize_matrix
from penstock.quant.tensor import StoredTensor, TensorInfo
from penstock.weights.open import open_description

ROWS = 256  # rows of a quantised matrix before they repeat
_BYTES = {"float32": ("f32", 4), "float16": ("f16", 2)}


@dataclass(slots=True)
class DummyCheckpoint:
    """Implements `weights.checkpoint.Checkpoint`: the tensors that a model declares, stored nowhere."""

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tokenizer_config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def read(self, name: str) -> StoredTensor:
        """Random values: vectors about 1, others with the spread that keeps the size of what they multiply."""
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.path} declares no tensor {name}.")
        dice = np.random.default_rng(zlib.crc32(name.encode()))
        drawn = dice.standard_normal(info.shape, dtype=np.float32)
        spread = drawn / 16 + 1 if len(info.shape) == 1 else drawn / math.sqrt(info.shape[-1])
        values: Floats = spread.astype(np.float32)
        if info.format == "bf16":
            stored: npt.NDArray[Any] = (values.view(np.uint32) >> 16).astype(np.uint16)
        else:
            stored = values.astype(np.float16 if info.format == "f16" else np.float32)
        return StoredTensor(info, stored.reshape(-1).view(np.uint8))


def open_dummy(path: str | Path, overrides: str | None = None) -> DummyCheckpoint:
    """Opens a Hugging Face folder, of which config.json is enough; whatever weights it has are left alone.

    Raises:
        CheckpointError: no config.json, or no model can be built of it.
        ConfigError: transformers' code is to run the model.
    """
    found = open_description(path, overrides)
    hidden = ("quantization_config", "quantization")
    config = {name: value for name, value in found.config.items() if name not in hidden}
    kernels = resolve_kernels(KernelContext("cpu", "float32", prefer_reference=True))
    model = build_model(config, kernels, dtype=torch.float32)
    if model.runs:
        raise ConfigError(f"--load-format dummy is not possible: {model.runs}. Leave the option out.")
    stated = config.get("dtype") or config.get("torch_dtype")
    kind, size = _BYTES.get(str(stated), ("bf16", 2))
    parts = {part.key: part for weight in model.weights() for part in weight.parts}
    tensors = {key: TensorInfo(key, part.shape, kind, size * math.prod(part.shape)) for key, part in parts.items()}
    return DummyCheckpoint(
        found.path, config, found.generation_config, found.tokenizer_config, MappingProxyType(tensors)
    )


def random_matrices(weight: Weight, dtype: torch.dtype, device: str, format: str | None) -> list[Matrix]:
    """What a packed weight is made of: tensors on the device, or, with a format, quantised matrices.

    What the packing does not take quantised is decoded.
    """
    rows, inputs = math.prod(weight.shape[:-1]), weight.shape[-1]
    heights = _heights(weight)
    seed = zlib.crc32(weight.parts[0].key.encode())
    matrices: list[Matrix] = []
    for number, height in enumerate(heights):
        shape = rows // sum(heights) * height, inputs
        if format is None:
            matrices.append(random_tensor(shape, dtype, device, seed + number))
            continue
        matrix = random_canonical(format, shape, seed + number)
        taken = weight.packable is not None and weight.packable(matrix) is None
        matrices.append(matrix if taken else canonical_tensor(matrix, dtype))
    return matrices


def _heights(weight: Weight) -> list[int]:
    """Rows of the matrices that lie one below the other, of one expert."""
    height = weight.shape[-2]
    starts = sorted({part.offset for part in weight.parts})
    if weight.gate_up and len(starts) == 1:
        return [height // 2, height // 2]
    return [end - begin for begin, end in zip(starts, (*starts[1:], height), strict=True)]


def random_tensor(shape: tuple[int, int], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Normally distributed values [N, K] that keep the size of what they multiply."""
    dice = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, dtype=dtype, device=device, generator=dice).mul_(shape[1] ** -0.5)


def random_canonical(format: str, shape: tuple[int, int], seed: int) -> Canonical:
    """The same, quantised: ROWS rows of which all others are copies. Seeds differ in which of them is the first."""
    count = min(shape[0], ROWS)
    rows = np.arange(seed, seed + shape[0], dtype=np.int64) % count
    return take_rows(_quantized_rows(format, count, shape[1]), rows)


@functools.lru_cache(maxsize=16)
def _quantized_rows(format: str, count: int, inputs: int) -> Canonical:
    """Kept, as quantising takes long beside copying and a model's layers are alike."""
    values = np.random.default_rng(inputs).standard_normal((count, inputs), dtype=np.float32)
    return quantize_matrix(format, values / np.float32(math.sqrt(inputs)))
