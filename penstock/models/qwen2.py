"""Qwen 2 and 2.5 (arXiv:2407.10671), MiMo (arXiv:2505.07608): biases on the query, key and value projections."""

from __future__ import annotations

from penstock.layers.decoder import DecoderModel
from penstock.models.blueprint import Blueprint


def build(blueprint: Blueprint) -> DecoderModel:
    """Upper layers may slide. MiMo's layers for multi-token prediction are `models.mtp`'s."""
    further = (r"model\.mtp_layers\..*",)
    return blueprint.decoder(windows=blueprint.windows(), qkv_bias=True, output_bias=False, ignorable=further)
