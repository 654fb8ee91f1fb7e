"""BERT (arXiv:1810.04805) and RoBERTa (arXiv:1907.11692, XLM: arXiv:1911.02116): encoders with learned positions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.layers.batch import MaskKind
from penstock.layers.classifier import Classifier, Dense
from penstock.layers.decoder import DecoderModel
from penstock.layers.embedding import learned
from penstock.models.blueprint import SUM_NORM, UNTURNED, Blueprint

RENAMES = (
    (r"\.gamma$", ".weight"),
    (r"\.beta$", ".bias"),
    (r"^(bert|roberta|nomic_bert)\.", ""),
    (r"^embeddings\.word_embeddings\.", "model.embed_tokens."),
    (r"^embeddings\.position_embeddings\.", "model.embed_positions."),
    (r"^embeddings\.token_type_embeddings\.", "model.embed_types."),
    (r"^(embeddings\.LayerNorm|emb_ln)\.", "model.embed_norm."),
    (r"^(encoder\.)?layers?\.", "model.layers."),
    (r"\.attention\.self\.query\.", ".self_attn.q_proj."),
    (r"\.attention\.self\.key\.", ".self_attn.k_proj."),
    (r"\.attention\.self\.value\.", ".self_attn.v_proj."),
    (r"\.attention\.output\.dense\.", ".self_attn.o_proj."),
    (r"\.attention\.output\.LayerNorm\.", ".post_attention_layernorm."),
    (r"\.intermediate\.dense\.", ".mlp.up_proj."),
    (r"\.output\.dense\.", ".mlp.down_proj."),
    (r"\.output\.LayerNorm\.", ".post_feedforward_layernorm."),
)
UNUSED = (r"pooler\..*", r"cls\..*", r"lm_head\..*", r"embeddings\.position_ids")  # what vectors of texts do without


def build(blueprint: Blueprint) -> DecoderModel:
    return _assemble(blueprint, 0, lambda: pooled_classifier(blueprint))


def build_roberta(blueprint: Blueprint) -> DecoderModel:
    """BERT whose positions begin behind the padding token's number; its classifier has a dense layer of its own.

    That number is -1 where the table's unused rows are not stored.
    """
    first = blueprint.fields.integer("pad_token_id", 1, minimum=-1) + 1

    def classifier() -> Classifier:
        dense = Dense("classifier.dense", blueprint.hidden_size, blueprint.hidden_size, bias=True)
        out = Dense("classifier.out_proj", blueprint.hidden_size, blueprint.num_labels(), bias=True)
        return Classifier(out, dense, torch.tanh)

    return _assemble(blueprint, first, classifier)


def pooled_classifier(blueprint: Blueprint) -> Classifier:
    """BERT's pooler and what stands on it."""
    dense = Dense("pooler.dense", blueprint.hidden_size, blueprint.hidden_size, bias=True)
    out = Dense("classifier", blueprint.hidden_size, blueprint.num_labels(), bias=True)
    return Classifier(out, dense, torch.tanh)


def _assemble(blueprint: Blueprint, first: int, classifier: Callable[[], Classifier]) -> DecoderModel:
    fields, kernels, hidden = blueprint.fields, blueprint.kernels, blueprint.hidden_size
    fields.choice("position_embedding_type", {"absolute": None}, "absolute")
    length = fields.integer("max_position_embeddings", minimum=first + 1) - first
    return blueprint.uniform(
        rotary=UNTURNED,
        norm=blueprint.layer_norm,
        norms=SUM_NORM,
        final_norm=False,
        activation=blueprint.activation(default="gelu"),
        gated=False,
        mlp_bias=True,
        model={
            "renames": RENAMES,
            "mask": MaskKind.BIDIRECTIONAL,
            "max_positions": length,
            "positions": learned(kernels, "model.embed_positions.weight", length, hidden, first=first),
            "types": learned(kernels, "model.embed_types.weight", fields.integer("type_vocab_size"), hidden),
            "embedding_norm": blueprint.layer_norm("model.embed_norm"),
            "classifier": classifier,
        },
        ignorable=UNUSED,
        qkv_bias=True,
        output_bias=True,
    )
