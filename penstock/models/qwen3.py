"""Qwen 3 dense models (arXiv:2505.09388): Qwen 2 with normalised query and key heads instead of biases."""

from __future__ import annotations

from penstock.layers.decoder import DecoderModel
from penstock.models.blueprint import Blueprint
from penstock.models.qwen2 import upper_windows


def build(blueprint: Blueprint) -> DecoderModel:
    return blueprint.uniform(windows=upper_windows(blueprint), qk_norm=True)
