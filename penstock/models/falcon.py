"""Falcon (arXiv:2311.16867): 7B with one key and value, 40B and later with groups of them, RW with ALiBi."""

from __future__ import annotations

from dataclasses import replace

from penstock.layers.decoder import DecoderModel
from penstock.models.alibi import slopes
from penstock.models.block_norms import PARALLEL, PRE_NORM, BlockNorms
from penstock.models.bloom import RENAMES
from penstock.models.blueprint import NO_ROPE, Blueprint

TWO_NORMS = BlockNorms("ln_attn", None, "ln_mlp", parallel=True)


def build(blueprint: Blueprint) -> DecoderModel:
    fields = blueprint.fields
    new = fields.flag("new_decoder_architecture", False)
    bias = fields.flag("bias", False)
    alibi = fields.flag("alibi", False)
    if not new:
        shared = fields.flag("multi_query", True)
        blueprint = replace(blueprint, num_kv_heads=1 if shared else blueprint.num_heads)
    two = fields.integer("num_ln_in_parallel_attn", 2 if new else 1) == 2
    parallel = TWO_NORMS if two else PARALLEL
    scale = blueprint.head_dim**-0.5
    return blueprint.decoder(
        rotary=NO_ROPE if alibi else blueprint.rotary(),
        norm=blueprint.layer_norm,
        norms=parallel if new or fields.flag("parallel_attn", True) else PRE_NORM,
        activation=blueprint.activation("activation", "gelu"),
        gated=False,
        mlp_bias=bias,
        model={"tie_default": True, "renames": RENAMES},
        qkv_bias=bias,
        output_bias=bias,
        grouped=True,
        scale=scale,
        slopes=slopes(blueprint.num_heads, scale=scale) if alibi else None,
    )
