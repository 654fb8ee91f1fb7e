"""Adapters in PEFT's layout: a folder with adapter_config.json and adapter_model.safetensors.

LoRA (arXiv:2106.09685): W + s B A, s = alpha / r, or alpha / sqrt(r) with rank stabilisation (arXiv:2312.03732). DoRA
(arXiv:2402.09353): each row of that sum is scaled to the length that the adapter states.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from penstock.config.errors import CheckpointError, quoted
from penstock.quant.tensor import StoredTensor
from penstock.weights.adapters.adapter import Adapter, LowRankTensors, check_pair, invocation_of
from penstock.weights.readers.files import read_object
from penstock.weights.readers.safetensors import read_safetensors_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_PAIRS: Final = ((".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B"))
_TABLE: Final = ".base_layer.weight"  # what PEFT saves of embeddings and heads beside their adapters
_LENGTHS: Final = (".lora_magnitude_vector", ".lora_magnitude_vector.weight")
_CHANGE_BASE: Final = ("pissa", "corda", "olora", "loftq", "lora_ga")  # ways to begin, which PEFT repeats on loading
_MOST_ALPHA: Final = 1e30
_MOST_PARTS: Final = 64  # of a layer's name, from its end, that patterns are looked for in
_PLAIN_PATTERN: Final = re.compile(r"[\w.\-]+")
_NOT_READ: Final[Mapping[str, str]] = MappingProxyType(
    {
        "modules_to_save": "it brings whole layers besides",
        "trainable_token_indices": "it brings rows of the embedding besides",
        "layer_replication": "it repeats layers of its model",
        "target_parameters": "it changes stacked parameters, not layers",
        "lora_bias": "its matrices have biases",
        "use_qalora": "QALoRA groups inputs",
        "use_bdlora": "BD-LoRA's matrices are blocks",
        "arrow_config": "Arrow chooses among adapters",
    }
)


def is_peft(path: Path) -> bool:
    """Whether a folder is an adapter in this layout."""
    return (path / CONFIG).is_file()


def open_peft(folder: Path) -> Adapter:
    """Opens an adapter.

    Raises:
        CheckpointError: it is damaged, or of a kind that is not read; the message says which.
    """
    config = read_object(folder / CONFIG)
    if (kind := config.get("peft_type")) != "LORA":
        raise CheckpointError(f"{folder} is an adapter of type {quoted(str(kind))}; LoRA and DoRA are read.")
    for field, why in _NOT_READ.items():
        if config.get(field):
            raise CheckpointError(f"{folder} is not read: {why} ({field} in {CONFIG}). Merge it into its model.")
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGE_BASE):
        raise CheckpointError(
            f"{folder} is not read: its model's weights were changed when it was begun ({quoted(begun)} in "
            f"init_lora_weights of {CONFIG}), and it fits those alone. Convert it to plain LoRA when you save it: "
            "save_pretrained(…, path_initial_model_for_weight_conversion=…)."
        )
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"{folder} is not read: it changes biases (bias in {CONFIG}). Merge it into its model.")
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(
            f"{folder} has no {WEIGHTS}. Pickled adapters (.bin, .pt) can run code when they are read and are not; "
            "save it with PEFT's save_pretrained."
        )
    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in read_safetensors_file(folder / WEIGHTS).items()}
    changes = _changes(folder, config, tensors)
    tables = {name.removesuffix(_TABLE): tensor for name, tensor in tensors.items() if name.endswith(_TABLE)}
    invocation = invocation_of(folder, config.get("alora_invocation_tokens"))
    return Adapter(folder, changes, str(config.get("base_model_name_or_path") or ""), invocation, tables)


def _changes(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, LowRankTensors]:
    _check_patterns(folder, config.get("alpha_pattern") or {})
    suffixes = (*_PAIRS[0], *_PAIRS[1], *_LENGTHS)
    odd = next((name for name in tensors if not name.endswith((*suffixes, _TABLE))), None)
    if odd is not None:
        raise CheckpointError(
            f"{folder} holds {quoted(odd)}, which is no part of a LoRA adapter of linear layers and embeddings. "
            "Merge it into its model, or train it without that."
        )
    names = {name.removesuffix(suffix): None for name in tensors for suffix in suffixes if name.endswith(suffix)}
    if not names:
        raise CheckpointError(f"{folder} changes nothing: {WEIGHTS} holds no matrices. Save the adapter again.")
    found = {}
    for name in names:
        looked_up = any(name + suffix in tensors for suffix in _PAIRS[1])
        down, up = (tensors.get(name + suffix) for suffix in _PAIRS[looked_up])
        check_pair(folder, name, down, up)
        assert down is not None and up is not None
        lengths = next((tensors[name + suffix] for suffix in _LENGTHS if name + suffix in tensors), None)
        if lengths is not None and math.prod(lengths.info.shape) != up.info.shape[0]:
            raise CheckpointError(f"{folder}: {quoted(name)} has {list(lengths.info.shape)} lengths for its rows.")
        scale = _scale(folder, config, name, down.info.shape[0])
        found[name] = LowRankTensors(down, up, scale, lengths, looked_up)
    return found


def _check_patterns(folder: Path, patterns: Any) -> None:
    """Raises CheckpointError for patterns other than names of layers."""
    if not isinstance(patterns, Mapping):
        raise CheckpointError(f"{folder}: alpha_pattern in {CONFIG} is no object.")
    odd = next((pattern for pattern in patterns if not _PLAIN_PATTERN.fullmatch(pattern)), None)
    if odd is not None:
        raise CheckpointError(
            f"{folder}: alpha_pattern in {CONFIG} has {quoted(odd)}; names of layers are read, other patterns are not."
        )


def _scale(folder: Path, config: Mapping[str, Any], name: str, rank: int) -> float:
    alpha, patterns = config.get("lora_alpha", rank), config.get("alpha_pattern") or {}
    parts = name.split(".")[-_MOST_PARTS:]
    matching = [end for first in range(len(parts)) if (end := ".".join(parts[first:])) in patterns]
    if len(matching) > 1:
        matching = [next(pattern for pattern in patterns if pattern in matching)]
    if matching:
        alpha = patterns[matching[0]]
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not abs(alpha) < _MOST_ALPHA:
        raise CheckpointError(f"{folder}: lora_alpha in {CONFIG} is no number.")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
