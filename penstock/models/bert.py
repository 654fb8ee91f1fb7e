"""BERT (arXiv:1810.04805), RoBERTa (arXiv:1907.11692, XLM: arXiv:1911.02116) and DistilBERT (arXiv:1910.01108)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.layers.batch import MaskKind
from penstock.layers.classifier import Classifier, Dense
from penstock.layers.decoder import DecoderModel
from penstock.layers.embedding import learned
from penstock.models.block_norms import SUM_NORM
from penstock.models.blueprint import NO_ROPE, Blueprint

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
DISTILBERT = (
    (r"^distilbert\.", ""),
    (r"^transformer\.layer\.", "model.layers."),
    (r"\.attention\.([qkv])_lin\.", r".self_attn.\1_proj."),
    (r"\.attention\.out_lin\.", ".self_attn.o_proj."),
    (r"\.sa_layer_norm\.", ".post_attention_layernorm."),
    (r"\.ffn\.lin1\.", ".mlp.up_proj."),
    (r"\.ffn\.lin2\.", ".mlp.down_proj."),
    (r"\.output_layer_norm\.", ".post_feedforward_layernorm."),
)
UNUSED = (
    r"pooler\..*",
    r"cls\..*",
    r"lm_head\..*",
    r"vocab_.*",
    r"embeddings\.position_ids",
)  # not needed for embeddings


def build(blueprint: Blueprint) -> DecoderModel:
    return _assemble(blueprint, 0, lambda: pooled_classifier(blueprint))


def build_roberta(blueprint: Blueprint) -> DecoderModel:
    """BERT whose positions begin behind the padding token's number; its classifier has a dense layer of its own.

    That number is -1 where the table's unused rows are not stored.
    """
    first = blueprint.fields.integer("pad_token_id", 1, minimum=-1) + 1
    return _assemble(blueprint, first, lambda: classifier(blueprint, "classifier.dense", "classifier.out_proj"))


def build_distilbert(blueprint: Blueprint) -> DecoderModel:
    """BERT without token types and pooler."""
    return _assemble(
        blueprint,
        0,
        lambda: classifier(blueprint, "pre_classifier", "classifier", torch.relu),
        field="activation",
        renames=(*DISTILBERT, *RENAMES),
    )


def pooled_classifier(blueprint: Blueprint) -> Classifier:
    """BERT's pooler and what stands on it."""
    return classifier(blueprint, "pooler.dense", "classifier")


def classifier(
    blueprint: Blueprint, dense: str, output: str, activation: Callable[[Tensor], Tensor] = torch.tanh
) -> Classifier:
    """A dense layer of the hidden size, its activation, and the labels' projection, of these names."""
    first = Dense(dense, blueprint.hidden_size, blueprint.hidden_size, bias=True)
    return Classifier(Dense(output, blueprint.hidden_size, blueprint.num_labels(), bias=True), first, activation)


def _assemble(
    blueprint: Blueprint,
    first: int,
    head: Callable[[], Classifier],
    field: str = "hidden_act",
    renames: tuple[tuple[str, str], ...] = RENAMES,
) -> DecoderModel:
    fields = blueprint.fields
    kernels = blueprint.kernels
    hidden = blueprint.hidden_size
    types = fields.integer("type_vocab_size", 0, minimum=0)
    fields.choice("position_embedding_type", {"absolute": None}, "absolute")
    length = fields.integer("max_position_embeddings", minimum=first + 1) - first
    return blueprint.decoder(
        rotary=NO_ROPE,
        norm=blueprint.layer_norm,
        norms=SUM_NORM,
        final_norm=False,
        activation=blueprint.activation(field, "gelu"),
        gated=False,
        mlp_bias=True,
        model={
            "renames": renames,
            "mask": MaskKind.BIDIRECTIONAL,
            "max_positions": length,
            "positions": learned(kernels, "model.embed_positions.weight", length, hidden, first=first),
            "types": learned(kernels, "model.embed_types.weight", types, hidden) if types else None,
            "embedding_norm": blueprint.layer_norm("model.embed_norm"),
            "classifier": head,
        },
        ignorable=UNUSED,
        qkv_bias=True,
        output_bias=True,
    )
