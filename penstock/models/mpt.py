"""MPT (MosaicML, 2023): scores that fall with distance, norms and projections without biases."""

from __future__ import annotations

from functools import partial

from penstock.layers.decoder import DecoderModel
from penstock.models.alibi import slopes
from penstock.models.blueprint import NO_ROPE, Blueprint
from penstock.models.fields import Fields

RENAMES = (
    (r"^transformer\.wte\.", "model.embed_tokens."),
    (r"^transformer\.norm_f\.", "model.norm."),
    (r"^transformer\.blocks\.", "model.layers."),
    (r"\.norm_1\.", ".input_layernorm."),
    (r"\.norm_2\.", ".post_attention_layernorm."),
    (r"\.attn\.Wqkv\.", ".self_attn.qkv_proj."),
    (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.ffn\.", ".mlp."),
)


def build(blueprint: Blueprint) -> DecoderModel:
    fields = blueprint.fields
    attention = fields.below("attn_config") or Fields({}, fields.where)
    for holder, name, allowed in ((attention, "alibi", True), (attention, "qk_ln", False), (fields, "no_bias", True)):
        if holder.flag(name, allowed) is not allowed:
            raise holder.error(name, f"is {str(not allowed).lower()}; allowed: {str(allowed).lower()}")
    return blueprint.decoder(
        rotary=NO_ROPE,
        norm=partial(blueprint.layer_norm, bias=False),
        activation="gelu",
        gated=False,
        model={"tie_default": True, "renames": RENAMES},
        clip=attention.optional_number("clip_qkv"),
        scale=attention.optional_number("softmax_scale"),
        slopes=slopes(blueprint.num_heads, attention.number("alibi_bias_max", 8.0)),
    )
