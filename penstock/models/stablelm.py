"""StableLM 2 (arXiv:2402.17834): Llama with layer norms and a partial rotation; larger ones have parallel blocks."""

from __future__ import annotations

from penstock.layers.decoder import DecoderModel
from penstock.models.block_norms import PARALLEL, PRE_NORM
from penstock.models.blueprint import Blueprint

RENAMES = ((r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),)


def build(blueprint: Blueprint) -> DecoderModel:
    fields = blueprint.fields
    return blueprint.decoder(
        norm=blueprint.layer_norm,
        norms=PARALLEL if fields.flag("use_parallel_residual", False) else PRE_NORM,
        model={"renames": RENAMES},
        qkv_bias=fields.flag("use_qkv_bias", False),
        output_bias=False,
        qk_norm=fields.flag("qk_layernorm", False),
        head_norm="layer",
    )
