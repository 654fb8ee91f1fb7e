"""Llama 2 and 3.x (arXiv:2307.09288, arXiv:2407.21783)."""

from __future__ import annotations

from penstock.layers.decoder import DecoderModel
from penstock.models.blueprint import Blueprint


def build(blueprint: Blueprint) -> DecoderModel:
    """The plain pre-norm decoder; biases are optional."""
    bias = blueprint.fields.flag("attention_bias", False)
    return blueprint.uniform(qkv_bias=bias, output_bias=bias, mlp_bias=blueprint.fields.flag("mlp_bias", False))
