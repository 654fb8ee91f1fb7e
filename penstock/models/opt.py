"""OPT (arXiv:2205.01068): learned positions from the third row of their table on; the 350M model has its norms last."""

from __future__ import annotations

from penstock.layers.decoder import DecoderModel
from penstock.layers.embedding import learned
from penstock.layers.linear import Linear
from penstock.layers.norm import Norm, Projected
from penstock.models.block_norms import BlockNorms
from penstock.models.blueprint import NO_ROPE, Blueprint

RENAMES = (
    (r"^(model\.)?decoder\.", "model."),
    (r"^model\.final_layer_norm\.", "model.norm."),
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.self_attn_layer_norm\.", ".input_layernorm."),
    (r"\.final_layer_norm\.", ".post_attention_layernorm."),
    (r"\.fc1\.", ".mlp.up_proj."),
    (r"\.fc2\.", ".mlp.down_proj."),
)
PRE = BlockNorms("input_layernorm", None, "post_attention_layernorm")
POST = BlockNorms(None, "input_layernorm", None, "post_attention_layernorm", sums=True)
UNUSED = 2  # rows of the table of positions


def build(blueprint: Blueprint) -> DecoderModel:
    fields = blueprint.fields
    kernels = blueprint.kernels
    hidden = blueprint.hidden_size
    bias, first = fields.flag("enable_bias", True), fields.flag("do_layer_norm_before", True)
    scaled = fields.flag("layer_norm_elementwise_affine", True)
    width, places = fields.integer("word_embed_proj_dim", hidden), fields.integer("max_position_embeddings")

    def norm(key: str) -> Norm:
        return blueprint.layer_norm(key, bias=scaled, scaled=scaled)

    def projection(name: str, outputs: int, inputs: int) -> Linear | None:
        return None if width == hidden else Linear(kernels, ((f"model.{name}", outputs),), inputs, bias=False)

    last = norm("model.norm") if first and not fields.flag("_remove_final_layer_norm", False) else None
    out = projection("project_out", width, hidden)
    return blueprint.decoder(
        rotary=NO_ROPE,
        norm=norm,
        norms=PRE if first else POST,
        activation=blueprint.activation("activation_function", "relu"),
        gated=False,
        mlp_bias=bias,
        model={
            "tie_default": True,
            "renames": RENAMES,
            "norm": last if out is None else Projected(last, out),
            "embedding_size": width,
            "projection": projection("project_in", hidden, width),
            "positions": learned(kernels, "model.embed_positions.weight", places, hidden, first=UNUSED),
        },
        qkv_bias=bias,
        output_bias=bias,
    )
