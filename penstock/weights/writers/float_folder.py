"""Writes a model as a Hugging Face folder with float weights, from whatever form it is in: a GGUF file, say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from penstock.config.errors import ConfigError
from penstock.quant.encode.blocks import to_bf16
from penstock.quant.formats import decode_to_float32
from penstock.quant.formats.record import Bytes
from penstock.text.tokenizer import Tokenizer
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.open import open_checkpoint
from penstock.weights.writers.files import replacing
from penstock.weights.writers.safetensors import OutputGroup, StoredOutput, copy_side_files, write_safetensors

FLOATS = {"bf16": ("bfloat16", 2), "f16": ("float16", 2), "f32": ("float32", 4)}
"""Formats that can be written → the type in config.json, and bytes a value."""


def write_float_folder(
    checkpoint: Checkpoint, format: str, path: Path, progress: Callable[[int, int], None] | None = None
) -> int:
    """Writes a folder whose weights are floats; gives the bytes of the weights.

    Args:
        checkpoint: an opened model.
        format: one of FLOATS.
        path: the folder, which is not there yet.
        progress: called with (bytes written, bytes in all).

    Raises:
        ConfigError: an unknown format, the folder exists or cannot be written, or weights cannot be decoded here.
        CheckpointError: a tensor cannot be read.
    """
    if format not in FLOATS:
        raise ConfigError(f"--to is {format!r}; a folder of floats is written in {', '.join(FLOATS)}.")
    if path.exists():
        raise ConfigError(f"{path} exists already; choose another --output.")
    if checkpoint.config.get("quantization_config"):
        raise ConfigError(f"{checkpoint.path} is quantised in a layout of folders; name the original model.")
    dtype, size = FLOATS[format]
    groups = []
    for name, info in checkpoint.tensors.items():
        kept = info.format in ("i8", "i16", "i32", "i64", "u8", "bool")
        stored = StoredOutput(name, info.format if kept else format, info.shape, int(np.prod(info.shape)) * size)
        stored = StoredOutput(name, info.format, info.shape, info.nbytes) if kept else stored
        groups.append(OutputGroup((stored,), partial(_bytes, checkpoint, name, None if kept else format)))
    with replacing(path) as place:
        place.mkdir()
        written = write_safetensors(place, groups, progress)
        _write_side_files(checkpoint, place)
        config = {**checkpoint.config, "dtype": dtype, "torch_dtype": dtype}
        (place / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return written


def float_base(path: Path, folder: Path, progress: Callable[[int, int], None] | None = None) -> Path:
    """A model whose weights adapters can be merged into: the one at `path`, or of a .gguf file a new `folder`, bf16.

    Raises:
        As write_float_folder.
    """
    checkpoint = open_checkpoint(path)
    if not checkpoint.metadata:
        return path
    write_float_folder(checkpoint, "bf16", folder, progress)
    return folder


def _write_side_files(checkpoint: Checkpoint, place: Path) -> None:
    if not checkpoint.metadata:
        copy_side_files(checkpoint.path, place)
        return
    Tokenizer.from_gguf(checkpoint.metadata).backend.save(str(place / "tokenizer.json"))
    told = dict(checkpoint.tokenizer_config)
    template = told.pop("chat_template", None)
    if isinstance(template, str):
        (place / "chat_template.jinja").write_text(template, encoding="utf-8")
    elif template:
        told["chat_template"] = [{"name": name, "template": text} for name, text in template.items()]
    told["tokenizer_class"] = "PreTrainedTokenizerFast"
    for name, value in (("tokenizer_config", told), ("generation_config", dict(checkpoint.generation_config))):
        (place / f"{name}.json").write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _bytes(checkpoint: Checkpoint, name: str, format: str | None) -> Iterator[Bytes]:
    stored = checkpoint.read(name)
    if format is None or format == stored.info.format:
        yield np.ascontiguousarray(stored.data).reshape(-1)
        return
    values = decode_to_float32(stored.info.format, stored.data).reshape(-1)
    if format == "bf16":
        yield np.ascontiguousarray(to_bf16(values)).view(np.uint8).reshape(-1)
    else:
        yield values.astype(np.float16 if format == "f16" else np.float32).view(np.uint8)
