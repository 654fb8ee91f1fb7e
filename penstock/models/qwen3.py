"""Qwen 3 dense models (arXiv:2505.09388): Qwen 2 with normalised query and key heads instead of biases."""

from __future__ import annotations

from penstock.layers.decoder import DecoderModel
from penstock.models.blueprint import Blueprint


def build(blueprint: Blueprint) -> DecoderModel:
    return blueprint.decoder(windows=blueprint.windows(), qk_norm=True)
