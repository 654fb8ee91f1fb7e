"""Merges an adapter in PEFT's layout into the weights of a Hugging Face folder.

LoRA (arXiv:2106.09685): W + s B A, s = alpha / r, or alpha / sqrt(r) with rank stabilisation (arXiv:2312.03732). DoRA
(arXiv:2402.09353): each row of that sum is scaled to the length that the adapter states.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config.errors import CheckpointError, ConfigError, quoted
from penstock.quant.encode.blocks import to_bf16
from penstock.quant.formats import decode_to_float32
from penstock.quant.formats.record import Bytes, Floats
from penstock.quant.tensor import StoredTensor
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.open import open_checkpoint
from penstock.weights.readers.files import read_object
from penstock.weights.readers.safetensors import read_safetensors_file
from penstock.weights.writers.files import replacing
from penstock.weights.writers.safetensors import OutputGroup, StoredOutput, copy_side_files, write_safetensors

_PREFIX = "base_model.model."
_PARTS = (".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector")


@dataclass(frozen=True, slots=True)
class _Change:
    """What an adapter does to one weight: down [r, K], up [N, r], the scale, and DoRA's lengths [N] or None."""

    down: Floats
    up: Floats
    scale: float
    lengths: Floats | None

    def apply(self, weight: Floats) -> Floats:
        changed: Floats = weight + np.float32(self.scale) * (self.up @ self.down)
        if self.lengths is None:
            return changed
        norms = np.linalg.norm(changed, axis=1, keepdims=True)
        return np.asarray(changed * (self.lengths.reshape(-1, 1) / norms), np.float32)


def merge_adapter(model: Path, adapter: Path, output: Path) -> None:
    """Writes a folder with the model's weights changed by an adapter.

    Args:
        model: a Hugging Face folder with float weights.
        adapter: a folder with adapter_config.json and adapter_model.safetensors.
        output: the folder to write.

    Raises:
        ConfigError: the model is no such folder, or the adapter is of another model or kind.
        CheckpointError: one of them cannot be read.
    """
    if adapter.is_file():
        raise ConfigError(
            f"{adapter.name} is no adapter in PEFT's layout; GGUF adapters are not read. Give the folder that it was "
            "made from, with adapter_config.json and adapter_model.safetensors, or merge it with llama-export-lora "
            "and start FROM the .gguf file that comes out."
        )
    checkpoint = open_checkpoint(model)
    if checkpoint.metadata or checkpoint.config.get("quantization_config"):
        raise ConfigError(f"an adapter is merged into float weights in safetensors; {model} holds others.")
    if not (adapter / "adapter_config.json").is_file():
        raise ConfigError(f"{adapter} is no adapter in PEFT's layout: a folder with adapter_config.json is needed.")
    changes = _changes(read_object(adapter / "adapter_config.json"), adapter)
    unknown = sorted(changes.keys() - checkpoint.tensors.keys())
    if unknown:
        raise ConfigError(
            f"{adapter} changes {quoted(unknown[0])}, which {model} does not have; it is of another model."
        )
    groups = []
    for name, info in checkpoint.tensors.items():
        stored = StoredOutput(name, info.format, info.shape, info.nbytes)
        groups.append(OutputGroup((stored,), partial(_bytes, checkpoint, name, changes.get(name))))
    with replacing(output) as place:
        place.mkdir()
        write_safetensors(place, groups)
        copy_side_files(checkpoint.path, place)
        (place / "config.json").write_text(json.dumps(dict(checkpoint.config), indent=2) + "\n")


def _bytes(checkpoint: Checkpoint, name: str, change: _Change | None) -> Iterator[Bytes]:
    stored = checkpoint.read(name)
    if change is None:
        yield stored.data
        return
    info = stored.info
    weight = _floats(stored)
    if weight.shape != (change.up.shape[0], change.down.shape[1]):
        raise ConfigError(f"the adapter's change of {name} has another shape than the weight, {list(info.shape)}.")
    yield _stored(change.apply(weight), info.format)


def _floats(tensor: StoredTensor) -> Floats:
    return decode_to_float32(tensor.info.format, tensor.data).reshape(tensor.info.shape)


def _stored(values: Floats, format: str) -> Bytes:
    flat = np.ascontiguousarray(values).reshape(-1)
    if format == "bf16":
        return np.ascontiguousarray(to_bf16(flat)).view(np.uint8).reshape(-1)
    kind = {"f32": np.float32, "f16": np.float16}.get(format)
    if kind is None:
        raise ConfigError(f"an adapter changes a weight in {format}; f32, f16 and bf16 can be changed.")
    return flat.astype(kind).view(np.uint8)


def _changes(config: Mapping[str, Any], adapter: Path) -> dict[str, _Change]:
    """The changes by the name of their weights."""
    if config.get("peft_type") != "LORA" or config.get("modules_to_save") or config.get("fan_in_fan_out"):
        raise ConfigError(f"{adapter} is no plain LoRA or DoRA adapter; others are not merged.")
    stored = read_safetensors_file(adapter / "adapter_model.safetensors")
    tensors = {name.removeprefix(_PREFIX): _floats(tensor) for name, tensor in stored.items()}
    odd = [name for name in tensors if not name.endswith(_PARTS)]
    if odd:
        raise ConfigError(f"{adapter} holds {quoted(odd[0])}, which is no part of a LoRA adapter.")
    found: dict[str, _Change] = {}
    for stem in sorted({name.removesuffix(part) for name in tensors for part in _PARTS if name.endswith(part)}):
        down, up = tensors.get(stem + _PARTS[0]), tensors.get(stem + _PARTS[1])
        if down is None or up is None or down.ndim != 2 or up.ndim != 2 or up.shape[1] != down.shape[0]:
            raise CheckpointError(f"{adapter} has no fitting pair of matrices for {quoted(stem)}.")
        found[f"{stem}.weight"] = _Change(down, up, _scale(config, stem, down.shape[0]), tensors.get(stem + _PARTS[2]))
    return found


def _scale(config: Mapping[str, Any], stem: str, rank: int) -> float:
    alpha, patterns = config.get("lora_alpha", rank), config.get("alpha_pattern") or {}
    for pattern, value in patterns.items():
        alpha = value if stem.endswith(pattern) else alpha
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool):
        raise CheckpointError("adapter_config.json: lora_alpha is no number.")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
