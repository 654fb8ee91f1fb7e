"""ERNIE 4.5 dense models (Baidu, 2025): Llama with interleaved pairs and biases everywhere or nowhere."""

from __future__ import annotations

from penstock.layers.decoder import DecoderModel
from penstock.models.blueprint import Blueprint


def build(blueprint: Blueprint) -> DecoderModel:
    bias = blueprint.fields.flag("use_bias", False)
    return blueprint.uniform(
        rotary=blueprint.rotary(theta=500_000.0),
        mlp_bias=bias,
        model={"tie_default": True},
        qkv_bias=bias,
        output_bias=bias,
        interleaved=True,
    )
