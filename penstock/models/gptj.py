"""GPT-J (Wang & Komatsuzaki 2021): parallel blocks, rotated pairs side by side, biases in the MLP and the head."""

from __future__ import annotations

from penstock.layers.decoder import DecoderModel
from penstock.models.block_norms import PARALLEL
from penstock.models.blueprint import Blueprint
from penstock.models.gpt2 import MASKS, TRANSFORMER

RENAMES = (
    *TRANSFORMER,
    (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.attn\.", ".self_attn."),
    (r"\.mlp\.fc_in\.", ".mlp.up_proj."),
    (r"\.mlp\.fc_out\.", ".mlp.down_proj."),
)


def build(blueprint: Blueprint) -> DecoderModel:
    return blueprint.decoder(
        norm=blueprint.layer_norm,
        norms=PARALLEL,
        activation=blueprint.activation("activation_function", "gelu_new"),
        gated=False,
        mlp_bias=True,
        model={"renames": RENAMES, "head_bias": True},
        ignorable=(*MASKS, r".*\.self_attn\.(masked_)?bias"),
        interleaved=True,
    )
