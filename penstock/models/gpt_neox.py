"""GPT-NeoX and Pythia (arXiv:2204.06745, arXiv:2304.01373): parallel blocks whose MLP has a norm of its own."""

from __future__ import annotations

from dataclasses import replace

from penstock.layers.decoder import DecoderModel
from penstock.models.block_norms import PRE_NORM
from penstock.models.blueprint import Blueprint

RENAMES = (
    (r"^gpt_neox\.embed_in\.", "model.embed_tokens."),
    (r"^gpt_neox\.final_layer_norm\.", "model.norm."),
    (r"^embed_out\.", "lm_head."),
    (r"^gpt_neox\.", "model."),
    (r"\.attention\.query_key_value\.", ".self_attn.qkv_proj."),
    (r"\.attention\.dense\.", ".self_attn.o_proj."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.up_proj."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
)
MASKS = (r".*\.attention\.(masked_)?bias", r".*\.attention\.rotary_emb\.inv_freq")


def build(blueprint: Blueprint) -> DecoderModel:
    fields = blueprint.fields
    blueprint = blueprint.with_defaults(partial_rotary_factor=fields.number("rotary_pct", 0.25))
    return blueprint.decoder(
        rotary=blueprint.rotary(theta=fields.number("rotary_emb_base", 10_000.0)),
        norm=blueprint.layer_norm,
        norms=replace(PRE_NORM, parallel=fields.flag("use_parallel_residual", True)),
        activation=blueprint.activation(default="gelu"),
        gated=False,
        mlp_bias=True,
        model={"renames": RENAMES},
        ignorable=MASKS,
        grouped=True,
    )
