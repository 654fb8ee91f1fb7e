"""Mistral (arXiv:2310.06825), Ministral 3: Llama with a window on every layer, where the configuration sets one."""

from __future__ import annotations

from penstock.layers.decoder import DecoderModel
from penstock.models import deepseek
from penstock.models.blueprint import Blueprint


def build(blueprint: Blueprint) -> DecoderModel:
    """All layers slide, or none, or as `layer_types` says; in a model that sees, the text may be Mistral 4's."""
    if blueprint.fields.values.get("model_type") == "mistral4":
        return deepseek.build_mistral4(blueprint)
    windows = blueprint.windows()
    return blueprint.decoder(windows=windows, temperature=blueprint.temperature())
