"""NomicBERT (arXiv:2402.01613), GTE (arXiv:2407.19669), Jina v3 (arXiv:2409.10173): BERT with rotated positions."""

from __future__ import annotations

from typing import Unpack

from penstock.layers.batch import MaskKind
from penstock.layers.decoder import DecoderModel
from penstock.layers.embedding import learned
from penstock.layers.mlp import MlpVariant
from penstock.models import bert
from penstock.models.block_norms import SUM_NORM
from penstock.models.blueprint import Blueprint
from penstock.models.options import DecoderFields

RENAMES = (
    (r"^(new|gte)\.", ""),
    *bert.RENAMES,
    (r"\.(attn|mixer)\.Wqkv\.", ".self_attn.qkv_proj."),
    (r"\.(attn|mixer)\.out_proj\.", ".self_attn.o_proj."),
    (r"\.attention\.(qkv_proj|o_proj)\.", r".self_attn.\1."),
    (r"\.(norm1|attn_ln)\.", ".post_attention_layernorm."),
    (r"\.(norm2|post_mlp_layernorm|mlp_ln)\.", ".post_feedforward_layernorm."),
    (r"\.mlp\.(fc11|fc1)\.", ".mlp.up_proj."),
    (r"\.mlp\.fc12\.", ".mlp.gate_proj."),
    (r"\.mlp\.fc2\.", ".mlp.down_proj."),
    (r"\.mlp\.up_gate_proj\.", ".mlp.gate_up_proj."),
)


def build(blueprint: Blueprint) -> DecoderModel:
    """NomicBERT: gated MLPs, no biases."""
    fields = blueprint.fields
    for name in ("prenorm", "moe_every_n_layers"):
        if fields.values.get(name):
            raise fields.error(name, f"is {fields.values[name]}; only NomicBERT without is supported")
    if fields.has("activation_function"):
        fields.choice("activation_function", {"swiglu": None}, "swiglu")
    bias = fields.flag("qkv_proj_bias", False)
    mlp_bias = fields.flag("mlp_fc1_bias", False)
    return _assemble(blueprint, fields.number("rotary_emb_base", 1000.0), bias, mlp_bias=mlp_bias)


def build_gte(blueprint: Blueprint) -> DecoderModel:
    """GTE v1.5 and multilingual: gated MLPs with biases on their output alone."""
    gelu = blueprint.activation(default="gelu")
    return _assemble(
        blueprint,
        160_000.0,
        feed_forward=lambda index: blueprint.mlp(
            index, activation=gelu, bias=False, variant=MlpVariant(True, up_first=True)
        ),
    )


def build_jina(blueprint: Blueprint) -> DecoderModel:
    """Jina v3, as it is without the adapters of its tasks: BERT's own MLPs."""
    gelu = blueprint.activation(default="gelu")
    own = ("classifier.dense", "classifier.out_proj")
    return _assemble(blueprint, 20_000.0, classifier=own, activation=gelu, gated=False, mlp_bias=True)


def _assemble(
    blueprint: Blueprint,
    theta: float,
    bias: bool = True,
    classifier: tuple[str, str] = ("pooler.dense", "classifier"),
    **more: Unpack[DecoderFields],
) -> DecoderModel:
    kernels, types = blueprint.kernels, blueprint.fields.integer("type_vocab_size", 2, minimum=0)
    usual: DecoderFields = {
        "rotary": blueprint.rotary(theta=theta),
        "norm": blueprint.layer_norm,
        "norms": SUM_NORM,
        "final_norm": False,
        "model": {
            "renames": RENAMES,
            "mask": MaskKind.BIDIRECTIONAL,
            "types": learned(kernels, "model.embed_types.weight", types, blueprint.hidden_size) if types else None,
            "embedding_norm": blueprint.layer_norm("model.embed_norm"),
            "classifier": lambda: bert.classifier(blueprint, classifier[0], classifier[1]),
        },
        "ignorable": bert.UNUSED,
        "qkv_bias": bias,
        "output_bias": bias,
    }
    return blueprint.decoder(**(usual | more))
