"""GLM-4 (arXiv:2406.12793): half of each head rotates in interleaved pairs, gate and up are one projection."""

from __future__ import annotations

from penstock.layers.decoder import DecoderModel
from penstock.models.block_norms import PRE_NORM, BlockNorms
from penstock.models.blueprint import Blueprint

AROUND = BlockNorms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def build(blueprint: Blueprint, norms: BlockNorms = PRE_NORM) -> DecoderModel:
    return blueprint.decoder(norms=norms, output_bias=False, interleaved=True)


def build_glm4(blueprint: Blueprint) -> DecoderModel:
    """The models of 2025 have norms after attention and MLP, too."""
    return build(blueprint, AROUND)
