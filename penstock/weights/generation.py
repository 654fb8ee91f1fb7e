"""What a checkpoint says of generating text: chat template, tokens that end an answer, default sampling. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from penstock.config.errors import ParameterError
from penstock.config.sampling import SamplingParams
from penstock.text.mistral import mistral_template
from penstock.weights.checkpoint import Checkpoint, text_config

_DEFAULT_FIELDS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


def eos_ids(checkpoint: Checkpoint, end_ids: Collection[int]) -> tuple[int, ...]:
    """generation_config's ids (the ones chat models mean), then config's, then the tokenizer's."""
    found: dict[int, None] = {}
    configured = (checkpoint.generation_config, text_config(checkpoint.config))
    for value in [*(config.get("eos_token_id") for config in configured), sorted(end_ids)]:
        for token in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(token, int) and not isinstance(token, bool) and token >= 0:
                found[token] = None
    return tuple(found)


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Those of generation_config's values that SamplingParams accepts."""
    defaults: dict[str, Any] = {}
    found = {name: generation_config.get(name) for name in _DEFAULT_FIELDS}
    if generation_config.get("stop_strings"):
        found["stop"] = generation_config["stop_strings"]
    for name, given in found.items():
        value: dict[str, Any] = {name: given}
        with suppress(ParameterError):
            SamplingParams(**value)
            defaults |= value
    return defaults


def template_config(
    checkpoint: Checkpoint, piece: Callable[[int], str | None], **special: int | None
) -> dict[str, Any]:
    """tokenizer_config.json with the special tokens a template writes, which GGUF metadata names by id alone.

    A folder with tekken.json and no template gets Mistral's own format.

    Raises:
        CheckpointError: tekken.json cannot be read.
    """
    config = dict(checkpoint.tokenizer_config)
    tekken = checkpoint.path / "tekken.json"
    if not config.get("chat_template") and tekken.is_file():
        config["chat_template"] = mistral_template(tekken)
    return {name: piece(token) for name, token in special.items() if token is not None} | config
