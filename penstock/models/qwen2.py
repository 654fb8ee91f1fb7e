"""Qwen 2 and 2.5 (arXiv:2407.10671): biases on the query, key and value projections, upper layers may slide."""

from __future__ import annotations

from penstock.layers.decoder import DecoderModel
from penstock.models.blueprint import Blueprint


def upper_windows(blueprint: Blueprint) -> tuple[int | None, ...]:
    """Layers from max_window_layers on slide, where use_sliding_window is set."""
    slides = blueprint.sliding_window() is not None and blueprint.fields.flag("use_sliding_window", False)
    first = blueprint.fields.integer("max_window_layers", 28, minimum=0)
    return blueprint.windows(lambda index: slides and index >= first)


def build(blueprint: Blueprint) -> DecoderModel:
    return blueprint.uniform(windows=upper_windows(blueprint), qkv_bias=True, output_bias=False)
