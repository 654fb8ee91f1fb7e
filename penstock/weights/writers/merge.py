"""Merges adapters into the weights of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from penstock.config.errors import ConfigError, quoted
from penstock.models.defaults import STORED_TURNED
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

_HEAD: Final = "lm_head.weight"
_TABLE: Final = "embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Merged:
    """An adapter to merge: a folder or .gguf file, and how much of it counts."""

    path: Path
    weight: float = 1.0


Changes = Sequence[tuple[float, LowRankTensors]]


def merge_adapters(
    model: Path, adapters: Sequence[Merged], output: Path, progress: Callable[[int, int], None] | None = None
) -> int:
    """Writes a folder with the model's weights changed by adapters; gives how many matrices are.

    A head that has the embedding's table gets one of its own where only one of them is changed.

    Args:
        model: a Hugging Face folder with float weights.
        adapters: each of this model; they are added together as where they are served together.
        output: the folder to write.
        progress: called with (bytes written, bytes in all).

    Raises:
        ConfigError: the model is no such folder, or an adapter is of another model or kind.
        CheckpointError: one of them cannot be read.
    """
    checkpoint = open_checkpoint(model)
    if checkpoint.metadata or checkpoint.config.get("quantization_config"):
        raise ConfigError(f"an adapter is merged into float weights in safetensors; {model} holds others.")
    changes = _all_changes(checkpoint, adapters)
    sources = {name: name for name in checkpoint.tensors}  # each weight, and of which of the model's it is made
    table = next((name for name in sources if name.endswith(_TABLE)), None)
    apart = table is not None and _HEAD not in sources and bool({table, _HEAD} & changes.keys())
    if apart and table is not None:
        sources[_HEAD] = table
    for name, (adapter, _) in _first(changes):
        if name not in sources:
            raise ConfigError(f"{adapter} changes {quoted(name)}, which {model} does not have; it is of another model.")
    groups = []
    for name, source in sources.items():
        info = checkpoint.tensors[source]
        stored = StoredOutput(name, info.format, info.shape, info.nbytes)
        own = [(adapter.weight, change) for adapter, change in changes.get(name, ())]
        groups.append(OutputGroup((stored,), partial(_bytes, checkpoint, source, own)))
    with replacing(output) as place:
        place.mkdir()
        write_safetensors(place, groups, progress)
        copy_side_files(checkpoint.path, place)
        config = {**checkpoint.config, **({"tie_word_embeddings": False} if apart else {})}
        (place / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return len(changes)


def _all_changes(checkpoint: Checkpoint, adapters: Sequence[Merged]) -> dict[str, list[tuple[Merged, LowRankTensors]]]:
    """What changes each weight, by its name."""
    found: dict[str, list[tuple[Merged, LowRankTensors]]] = {}
    for merged in adapters:
        adapter = open_adapter(merged.path, checkpoint.config)
        if adapter.invocation:
            raise ConfigError(f"{merged.path} is an activated adapter: it counts from its invocation on, not always.")
        for name, theirs in adapter.tables.items():
            own = checkpoint.tensors.get(f"{name}.weight") or checkpoint.tensors.get(f"model.{_TABLE}")
            if own is not None and own.shape != theirs.info.shape:
                told = f"{list(theirs.info.shape)} where the model has {list(own.shape)}"
                raise ConfigError(f"{merged.path} brings {quoted(name)} of {told}; it is of another model.")
        for name, change in adapter.changes.items():
            found.setdefault(f"{name}.weight", []).append((merged, change))
    return found


def _first(changes: Mapping[str, list[tuple[Merged, LowRankTensors]]]) -> Iterator[tuple[str, tuple[Path, float]]]:
    for name in sorted(changes):
        merged, _ = changes[name][0]
        yield name, (merged.path, merged.weight)


def _bytes(checkpoint: Checkpoint, name: str, changes: Changes) -> Iterator[Bytes]:
    stored = checkpoint.read(name)
    if not changes:
        yield stored.data
        return
    info, weight = stored.info, _floats(stored)
    total = weight
    turned = name.endswith(STORED_TURNED.get(str(checkpoint.config.get("model_type")), ()))
    for share, change in changes:
        other_way = turned or change.looked_up
        own = weight.T if other_way else weight
        if own.shape != (change.up.info.shape[0], change.down.info.shape[1]):
            raise ConfigError(f"the adapter's change of {name} has another shape than the weight, {list(info.shape)}.")
        more = np.float32(share) * (_changed(own, change) - own)
        total = total + (more.T if other_way else more)
    changed = _stored(total, info.format)
    if not np.isfinite(decode_to_float32(info.format, changed)).all():
        raise ConfigError(f"the adapter's change of {name} gives values that {info.format} does not hold.")
    yield changed


def _changed(weight: Floats, change: LowRankTensors) -> Floats:
    product = np.float32(change.scale) * (_floats(change.up) @ _floats(change.down))
    changed: Floats = weight + product
    if change.magnitude is None:
        return changed
    norms = np.linalg.norm(changed, axis=1, keepdims=True)
    lengths = _floats(change.magnitude).reshape(-1, 1)
    return np.asarray(np.divide(changed * lengths, norms, out=changed, where=norms > 0), np.float32)


def _floats(tensor: StoredTensor) -> Floats:
    return decode_to_float32(tensor.info.format, tensor.data).reshape(tensor.info.shape)


def _stored(values: Floats, format: str) -> Bytes:
    flat = np.ascontiguousarray(values).reshape(-1)
    if format == "bf16":
        return np.ascontiguousarray(to_bf16(flat)).view(np.uint8).reshape(-1)
    kind = {"f32": np.float32, "f16": np.float16}.get(format)
    if kind is None:
        raise ConfigError(f"an adapter changes a weight in {format}; f32, f16 and bf16 can be changed.")
    with np.errstate(over="ignore"):  # whoever calls looks at it
        return flat.astype(kind).view(np.uint8)
