"""BLOOM (arXiv:2211.05100): scores that fall with distance, and embeddings that are normalised."""

from __future__ import annotations

from penstock.layers.decoder import DecoderModel
from penstock.models.alibi import slopes
from penstock.models.blueprint import NO_ROPE, Blueprint
from penstock.models.gpt2 import TRANSFORMER

# Falcon's too.
RENAMES = (
    *TRANSFORMER,
    (r"\.self_attention\.query_key_value\.", ".self_attn.qkv_proj."),
    (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.up_proj."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
)


def build(blueprint: Blueprint) -> DecoderModel:
    fields = blueprint.fields
    if fields.flag("apply_residual_connection_post_layernorm", False):
        raise fields.error("apply_residual_connection_post_layernorm", "is true; allowed: false")
    return blueprint.decoder(
        rotary=NO_ROPE,
        norm=blueprint.layer_norm,
        activation="gelu_tanh",
        gated=False,
        mlp_bias=True,
        model={
            "tie_default": True,
            "renames": RENAMES,
            "embedding_norm": blueprint.layer_norm("model.word_embeddings_layernorm"),
        },
        qkv_bias=True,
        output_bias=True,
        grouped=True,
        slopes=slopes(blueprint.num_heads),
    )
