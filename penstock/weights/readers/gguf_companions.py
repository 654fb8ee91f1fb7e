"""What a Hugging Face folder has beside config.json, of a GGUF file: its metadata, and an overlay beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.config.errors import CheckpointError
from penstock.models.gguf.metadata import MAX_NUMBER, shortest, token_id
from penstock.weights.readers.files import read_object


def gguf_generation_config(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json: the end-of-sequence ids and the sampling defaults a converter recorded."""
    vocab_size = config["vocab_size"]
    ends = [token_id(metadata, name, vocab_size) for name in ("eos", "eot", "eom")]
    found: dict[str, Any] = {}
    if any(end is not None for end in ends):
        found["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None))
    for ours, key in (("temperature", "temp"), ("top_k", "top_k"), ("top_p", "top_p"), ("min_p", "min_p")):
        value = metadata.get(f"general.sampling.{key}")
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= MAX_NUMBER:
            found[ours] = shortest(value) if isinstance(value, float) else value
    if config["bos_token_id"] is not None:
        found["bos_token_id"] = config["bos_token_id"]
    return found


def gguf_tokenizer_config(metadata: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """tokenizer_config.json: special tokens as text, and the chat template (a mapping by name if several)."""
    tokens: Sequence[Any] = metadata.get("tokenizer.ggml.tokens", ())
    found: dict[str, Any] = {}
    names = (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"), ("unk_token", "unknown"))
    for ours, name in names:
        token = token_id(metadata, name, vocab_size)
        if token is not None and isinstance(tokens, list) and token < len(tokens) and isinstance(tokens[token], str):
            found[ours] = tokens[token]
    for name in ("add_bos_token", "add_eos_token"):
        if type(metadata.get(f"tokenizer.ggml.{name}")) is bool:
            found[name] = metadata[f"tokenizer.ggml.{name}"]
    prefix = "tokenizer.chat_template"
    named = {key[len(prefix) + 1 :]: text for key, text in metadata.items() if key.startswith(prefix + ".")}
    named["default"] = metadata.get(prefix)
    templates = {name: text for name, text in named.items() if isinstance(text, str)}
    if templates:
        found["chat_template"] = templates["default"] if set(templates) == {"default"} else templates
    return found


def overlay_path(path: Path) -> Path:
    """The file beside a .gguf file that says what comes before its metadata: the library writes it for a model that was
    made with a template, or sampling parameters, of its own.
    """
    return path.with_suffix(".overlay.json")


def read_overlay(path: Path) -> dict[str, dict[str, Any]]:
    """Fields of tokenizer_config.json and generation_config.json that come before a file's metadata; {} for each if
    there is no overlay.

    Raises:
        CheckpointError: it is damaged.
    """
    found = read_object(overlay_path(path), missing_ok=True)
    told = {name: found.get(name, {}) for name in ("tokenizer_config", "generation_config")}
    if not all(isinstance(fields, dict) for fields in told.values()):
        raise CheckpointError(f"{overlay_path(path)} is damaged; remove its folder, and it is made again.")
    return told
