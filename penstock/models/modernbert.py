"""ModernBERT (arXiv:2412.13663): a rotated pre-norm encoder, two sliding layers to one full layer."""

from __future__ import annotations

from functools import partial

from torch.nn import functional

from penstock.layers.batch import MaskKind
from penstock.layers.classifier import Classifier, Dense
from penstock.layers.decoder import DecoderModel
from penstock.models.block_norms import BlockNorms
from penstock.models.blueprint import Blueprint

NORMS = BlockNorms("attn_norm", None, "mlp_norm", first=False)
RENAMES = (
    (r"^model\.", ""),
    (r"^embeddings\.tok_embeddings\.", "model.embed_tokens."),
    (r"^embeddings\.norm\.", "model.embed_norm."),
    (r"^final_norm\.", "model.norm."),
    (r"^layers\.", "model.layers."),
    (r"\.attn\.Wqkv\.", ".self_attn.qkv_proj."),
    (r"\.attn\.Wo\.", ".self_attn.o_proj."),
    (r"\.mlp\.Wi\.", ".mlp.gate_up_proj."),
    (r"\.mlp\.Wo\.", ".mlp.down_proj."),
)


def build(blueprint: Blueprint) -> DecoderModel:
    fields = blueprint.fields
    norm = partial(blueprint.layer_norm, bias=fields.flag("norm_bias", False))
    windows = blueprint.windows()
    theta = fields.number("global_rope_theta", 160_000.0)
    full = blueprint.rotary(theta=theta, layer_type="full_attention")
    theta = fields.number("local_rope_theta", 10_000.0)
    local = blueprint.rotary(theta=theta, layer_type="sliding_attention", local=True)

    def classifier() -> Classifier:
        hidden, bias = blueprint.hidden_size, fields.flag("classifier_bias", False)
        fields.choice("classifier_activation", {"gelu": None}, "gelu")
        out = Dense("classifier", hidden, blueprint.num_labels(), bias=True)
        return Classifier(out, Dense("head.dense", hidden, hidden, bias=bias), functional.gelu, norm("head.norm"))

    return blueprint.decoder(
        rotaries=[full if window is None else local for window in windows],
        windows=windows,
        norm=norm,
        norms=NORMS,
        activation=blueprint.activation("hidden_activation", "gelu"),
        model={
            "renames": RENAMES,
            "mask": MaskKind.BIDIRECTIONAL,
            "embedding_norm": norm("model.embed_norm"),
            "classifier": classifier,
        },
        ignorable=(r"decoder\..*",) if blueprint.head == "labels" else (r"(head|decoder|classifier)\..*",),
    )
