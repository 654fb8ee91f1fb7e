"""What every checkpoint reader offers, whatever the file format. No torch here."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from penstock.config.model_settings import overridden
from penstock.quant.tensor import StoredTensor, TensorInfo


class Checkpoint(Protocol):
    """An opened checkpoint. Names, shapes and config follow Hugging Face, also where the file is GGUF.

    Attributes:
        path: the folder or file.
        config: the model's config.json as a dict (translated from metadata for GGUF).
        generation_config: generation_config.json, {} if absent.
        tokenizer_config: tokenizer_config.json, {} if absent; `chat_template` is filled in from wherever it lies.
        metadata: raw GGUF metadata, {} for safetensors (the tokenizer of a GGUF file is built from it).
        tensors: every tensor by name.
    """

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tokenizer_config: Mapping[str, Any]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    def read(self, name: str) -> StoredTensor:
        """The tensor's bytes; cheap (a view of a memory map) unless a layout change forces a copy.

        Raises:
            CheckpointError: no such tensor, or its bytes lie outside the file.
        """


def with_overrides(checkpoint: Checkpoint, overrides: str | None) -> Checkpoint:
    """The same files with other values in their configuration (EngineOptions.hf_overrides)."""
    if overrides is None:
        return checkpoint
    changed = copy.copy(checkpoint)
    changed.config = overridden(checkpoint.config, overrides)
    return changed


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a multimodal config, else the config itself."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config
