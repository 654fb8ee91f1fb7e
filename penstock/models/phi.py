"""Phi-1, 1.5 and 2 (arXiv:2306.11644, arXiv:2309.05463): parallel blocks of layer norms, biases everywhere."""

from __future__ import annotations

from penstock.layers.decoder import DecoderModel
from penstock.models.block_norms import PARALLEL
from penstock.models.blueprint import Blueprint

RENAMES = (
    (r"^model\.final_layernorm\.", "model.norm."),
    (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
    (r"\.mlp\.fc1\.", ".mlp.up_proj."),
    (r"\.mlp\.fc2\.", ".mlp.down_proj."),
)


def build(blueprint: Blueprint) -> DecoderModel:
    if blueprint.fields.flag("qk_layernorm", False):
        raise blueprint.fields.error("qk_layernorm", "is true; no published Phi has it, and it is not supported")
    return blueprint.decoder(
        norm=blueprint.layer_norm,
        norms=PARALLEL,
        activation=blueprint.activation(default="gelu_new"),
        gated=False,
        mlp_bias=True,
        model={"renames": RENAMES, "head_bias": True},
        qkv_bias=True,
        output_bias=True,
    )
