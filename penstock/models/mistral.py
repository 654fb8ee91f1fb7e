"""Mistral (arXiv:2310.06825): Llama with a sliding window on every layer, where the configuration sets one."""

from __future__ import annotations

from penstock.layers.decoder import DecoderModel
from penstock.models.blueprint import Blueprint


def build(blueprint: Blueprint) -> DecoderModel:
    """All layers slide, or none does."""
    return blueprint.uniform(windows=[blueprint.sliding_window()] * blueprint.num_layers)
