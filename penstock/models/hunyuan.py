"""Hunyuan dense models (Tencent, 2025): Llama whose queries and keys are normalised after their rotation."""

from __future__ import annotations

from penstock.layers.decoder import DecoderModel
from penstock.models.blueprint import Blueprint

RENAMES = (
    (r"\.self_attn\.query_layernorm\.", ".self_attn.q_norm."),
    (r"\.self_attn\.key_layernorm\.", ".self_attn.k_norm."),
)


def build(blueprint: Blueprint) -> DecoderModel:
    bias = blueprint.fields.flag("attention_bias", False)
    return blueprint.uniform(
        model={"renames": RENAMES}, qk_norm=True, head_norm="rotated", qkv_bias=bias, output_bias=bias
    )
