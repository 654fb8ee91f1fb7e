"""StarCoder2 (arXiv:2402.19173): Mistral with layer norms, biases and an MLP without a gate."""

from __future__ import annotations

from penstock.layers.decoder import DecoderModel
from penstock.models.blueprint import Blueprint

RENAMES = ((r"\.mlp\.c_fc\.", ".mlp.up_proj."), (r"\.mlp\.c_proj\.", ".mlp.down_proj."))


def build(blueprint: Blueprint) -> DecoderModel:
    bias = blueprint.fields.flag("use_bias", True)
    return blueprint.decoder(
        windows=blueprint.windows(),
        norm=blueprint.layer_norm,
        activation=blueprint.activation(default="gelu_pytorch_tanh"),
        gated=False,
        mlp_bias=bias,
        model={"tie_default": True, "renames": RENAMES},
        qkv_bias=bias,
        output_bias=bias,
    )
