"""NomicBERT (arXiv:2402.01613): BERT with rotated positions and gated MLPs."""

from __future__ import annotations

from penstock.layers.batch import MaskKind
from penstock.layers.decoder import DecoderModel
from penstock.layers.embedding import learned
from penstock.models import bert
from penstock.models.blueprint import SUM_NORM, Blueprint

RENAMES = (
    *bert.RENAMES,
    (r"\.attn\.Wqkv\.", ".self_attn.qkv_proj."),
    (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.norm1\.", ".post_attention_layernorm."),
    (r"\.(norm2|post_mlp_layernorm)\.", ".post_feedforward_layernorm."),
    (r"\.mlp\.fc11\.", ".mlp.up_proj."),
    (r"\.mlp\.fc12\.", ".mlp.gate_proj."),
    (r"\.mlp\.fc2\.", ".mlp.down_proj."),
)


def build(blueprint: Blueprint) -> DecoderModel:
    fields = blueprint.fields
    for name in ("prenorm", "moe_every_n_layers"):
        if fields.values.get(name):
            raise fields.error(name, f"is {fields.values[name]}; only NomicBERT without is supported")
    if fields.has("activation_function"):
        fields.choice("activation_function", {"swiglu": None}, "swiglu")
    types = fields.integer("type_vocab_size", 2)
    bias = fields.flag("qkv_proj_bias", False)
    return blueprint.uniform(
        rotary=blueprint.rotary(theta=fields.number("rotary_emb_base", 1000.0)),
        norm=blueprint.layer_norm,
        norms=SUM_NORM,
        final_norm=False,
        mlp_bias=fields.flag("mlp_fc1_bias", False),
        model={
            "renames": RENAMES,
            "mask": MaskKind.BIDIRECTIONAL,
            "types": learned(blueprint.kernels, "model.embed_types.weight", types, blueprint.hidden_size),
            "embedding_norm": blueprint.layer_norm("model.embed_norm"),
            "classifier": lambda: bert.pooled_classifier(blueprint),
        },
        ignorable=bert.UNUSED,
        qkv_bias=bias,
        output_bias=bias,
    )
