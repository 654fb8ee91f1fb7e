"""OLMo (arXiv:2402.00838), OLMoE (arXiv:2409.02060), OLMo 2 (arXiv:2501.00656) and OLMo 3."""

from __future__ import annotations

from functools import partial

from penstock.layers.decoder import DecoderModel
from penstock.models.block_norms import POST_NORM, PRE_NORM, BlockNorms
from penstock.models.blueprint import Blueprint
from penstock.models.mixture import expert_options, sparse_layer


def build(blueprint: Blueprint) -> DecoderModel:
    """The first: layer norms without weights, projections bounded where `clip_qkv` says so."""
    return blueprint.decoder(
        norm=partial(blueprint.layer_norm, scaled=False, bias=False),
        clip=blueprint.fields.optional_number("clip_qkv"),
    )


def build_flex(blueprint: Blueprint) -> DecoderModel:
    """FlexOlmo (arXiv:2507.07024): OLMo 2 with experts."""
    return build_olmoe(blueprint, POST_NORM)


def build_olmoe(blueprint: Blueprint, norms: BlockNorms = PRE_NORM) -> DecoderModel:
    """Experts in every layer; queries and keys are normalised over all heads."""
    fields = blueprint.fields
    if fields.has("clip_qkv"):
        raise fields.error("clip_qkv", f"is {fields.values['clip_qkv']}; only null is supported in OLMoE")
    options = expert_options(blueprint, size="intermediate_size")
    return blueprint.decoder(
        norms=norms,
        feed_forward=lambda index: sparse_layer(blueprint, (f"model.layers.{index}.mlp",), options),
        qk_norm=True,
        head_norm="all",
    )


def build_olmo2(blueprint: Blueprint) -> DecoderModel:
    """Norms after attention and MLP only; queries and keys are normalised over all heads."""
    return blueprint.decoder(norms=POST_NORM, qk_norm=True, head_norm="all")


def build_olmo3(blueprint: Blueprint) -> DecoderModel:
    """OLMo 2 with three sliding layers to one full layer, whose context alone is stretched."""
    fields = blueprint.fields
    windows = blueprint.windows()
    theta = fields.number("rope_theta", 500_000.0)
    full = blueprint.rotary(theta=theta, layer_type="full_attention")
    local = blueprint.rotary(theta=theta, layer_type="sliding_attention", local=True)
    return blueprint.decoder(
        rotary=full,
        rotaries=[full if window is None else local for window in windows],
        windows=windows,
        norms=POST_NORM,
        qk_norm=True,
        head_norm="all",
    )
