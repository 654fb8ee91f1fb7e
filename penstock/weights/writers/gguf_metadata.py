"""Metadata of a GGUF file that is written: the model's, the tokenizer's, and what samplers are to start from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.config.names import served_name
from penstock.models.defaults import with_defaults
from penstock.models.gguf.written import model_metadata
from penstock.text.gguf_export import gguf_tokenizer_metadata
from penstock.weights.checkpoint import Checkpoint, text_config

_SAMPLING = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def resolved_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The text model's configuration with the defaults of its type."""
    config = text_config(checkpoint.config)
    return with_defaults(str(config.get("model_type")), config)


def file_metadata(checkpoint: Checkpoint, arch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """All metadata of a Hugging Face folder's model but the file type.

    Raises:
        CheckpointError: something of it cannot be expressed.
    """
    found: dict[str, Any] = {
        "general.architecture": arch,
        "general.type": "model",
        "general.name": served_name(str(checkpoint.path)),
    }
    for name, key in _SAMPLING.items():
        value = checkpoint.generation_config.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found[f"general.sampling.{key}"] = int(value) if name == "top_k" else float(value)
    found |= model_metadata(arch, config)
    return found | gguf_tokenizer_metadata(
        Path(checkpoint.path),
        int(config["vocab_size"]),
        checkpoint.tokenizer_config,
        config,
        checkpoint.generation_config,
    )
