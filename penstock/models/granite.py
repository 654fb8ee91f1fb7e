"""Granite 3 (IBM, 2024): Llama with constant factors on embeddings, attention scores, residual branches and logits."""

from __future__ import annotations

from dataclasses import replace

from penstock.layers.decoder import DecoderModel
from penstock.models.blueprint import Blueprint


def build(blueprint: Blueprint) -> DecoderModel:
    """The residual stream is kept divided by `residual_multiplier`, so that branches are added as they are.

    Norms undo a factor of what they read, if their epsilon is divided by its square.
    """
    fields = blueprint.fields
    branch = fields.number("residual_multiplier", 1.0)
    bias = fields.flag("attention_bias", False)
    return replace(blueprint, norm_eps=blueprint.norm_eps / branch**2).uniform(
        model={
            "embedding_scale": fields.number("embedding_multiplier", 1.0) / branch,
            "logit_scale": 1.0 / fields.number("logits_scaling", 1.0),
        },
        scale=fields.number("attention_multiplier", 1.0),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )
