"""Qwen 3 dense models (arXiv:2505.09388): Qwen 2 with normalised query and key heads instead of biases."""

from __future__ import annotations

from penstock.layers.decoder import DecoderModel
from penstock.models.blueprint import Blueprint
from penstock.models.qwen2 import upper_windows


def build(blueprint: Blueprint) -> DecoderModel:
    bias = blueprint.fields.flag("attention_bias", False)
    return blueprint.uniform(windows=upper_windows(blueprint), qkv_bias=bias, output_bias=bias, qk_norm=True)
