"""Qwen 2 and 2.5 (arXiv:2407.10671): biases on the query, key and value projections, upper layers may slide."""

from __future__ import annotations

from penstock.layers.decoder import DecoderModel
from penstock.models.blueprint import Blueprint


def build(blueprint: Blueprint) -> DecoderModel:
    return blueprint.decoder(windows=blueprint.windows(), qkv_bias=True, output_bias=False)
