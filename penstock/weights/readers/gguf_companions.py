"""GGUF metadata → what a Hugging Face folder has beside config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.models.gguf.metadata import MAX_NUMBER, shortest, token_id


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
