"""Gemma 1 and 2 (arXiv:2403.08295, arXiv:2408.00118): scales stored less one, embeddings times sqrt(hidden_size)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from penstock.layers.batch import MaskKind
from penstock.layers.decoder import DecoderModel
from penstock.layers.rotary import Rotary
from penstock.models.blueprint import PRE_NORM, BlockNorms, Blueprint

AROUND = BlockNorms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


def build(blueprint: Blueprint) -> DecoderModel:
    """Gemma 1; its activation is the tanh form whatever an old file's `hidden_act` says."""
    return assemble(blueprint, PRE_NORM)


def build_gemma2(blueprint: Blueprint) -> DecoderModel:
    """Norms around both parts of a block, every other layer slides, scores and logits are capped."""
    return assemble(
        blueprint,
        AROUND,
        windows=blueprint.windows(lambda index: index % 2 == 0),
        scale=blueprint.fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        soft_cap=blueprint.fields.optional_number("attn_logit_softcapping"),
    )


def assemble(
    blueprint: Blueprint,
    norms: BlockNorms,
    rotaries: Sequence[Rotary] | None = None,
    rotary: Rotary | None = None,
    model: dict[str, Any] | None = None,
    **attention: Any,
) -> DecoderModel:
    """What all Gemma models share."""
    fields = blueprint.fields
    both_ways = fields.flag("use_bidirectional_attention", False)  # EmbeddingGemma, arXiv:2509.20354
    options = {
        "mask": MaskKind.BIDIRECTIONAL if both_ways else MaskKind.CAUSAL,
        "tie_default": True,
        "embedding_scale": blueprint.hidden_size**0.5,
        "soft_cap": fields.optional_number("final_logit_softcapping"),
    }
    bias = fields.flag("attention_bias", False)
    return blueprint.uniform(
        rotary=rotary,
        rotaries=rotaries,
        norm=partial(blueprint.norm, around_one=True),
        norms=norms,
        activation=blueprint.activation("hidden_activation", "gelu_pytorch_tanh"),
        model=options | (model or {}),
        qkv_bias=bias,
        output_bias=bias,
        **attention,
    )
