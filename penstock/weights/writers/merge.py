"""Merges an adapter in PEFT's layout into the weights of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from penstock.config.errors import ConfigError, quoted
from penstock.quant.encode.blocks import to_bf16
from penstock.quant.formats import decode_to_float32
from penstock.quant.formats.record import Bytes, Floats
from penstock.quant.tensor import StoredTensor
from penstock.weights.adapters.adapter import LowRankTensors
from penstock.weights.adapters.open import open_adapter
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.open import open_checkpoint
from penstock.weights.writers.files import replacing
from penstock.weights.writers.safetensors import OutputGroup, StoredOutput, copy_side_files, write_safetensors


def _changed(weight: Floats, change: LowRankTensors) -> Floats:
    product = np.float32(change.scale) * (_floats(change.up) @ _floats(change.down))
    changed: Floats = weight + product
    if change.magnitude is None:
        return changed
    norms = np.linalg.norm(changed, axis=1, keepdims=True)
    return np.asarray(changed * (_floats(change.magnitude).reshape(-1, 1) / norms), np.float32)


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
    changes = {f"{name}.weight": change for name, change in open_adapter(adapter).changes.items()}
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


def _bytes(checkpoint: Checkpoint, name: str, change: LowRankTensors | None) -> Iterator[Bytes]:
    stored = checkpoint.read(name)
    if change is None:
        yield stored.data
        return
    info = stored.info
    weight = _floats(stored)
    if weight.shape != (change.up.info.shape[0], change.down.info.shape[1]):
        raise ConfigError(f"the adapter's change of {name} has another shape than the weight, {list(info.shape)}.")
    yield _stored(_changed(weight, change), info.format)


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
