"""GLM-4.5 to 4.7 (arXiv:2508.06471) and dots.llm1 (arXiv:2506.05767): DeepSeek-V3's experts, ordinary attention."""

from __future__ import annotations

from penstock.layers.decoder import DecoderModel
from penstock.models.blueprint import Blueprint
from penstock.models.mixture import predictors, sigmoid_experts


def build(blueprint: Blueprint) -> DecoderModel:
    """GLM: half of a head is rotated, the larger models norm queries and keys."""
    return blueprint.decoder(
        feed_forward=sigmoid_experts(blueprint),
        output_bias=False,
        qk_norm=blueprint.fields.flag("use_qk_norm", False),
        ignorable=predictors(blueprint),
    )


def build_dots(blueprint: Blueprint) -> DecoderModel:
    """dots.llm1: Qwen 3's attention, layers from `max_window_layers` on slide."""
    return blueprint.decoder(
        windows=blueprint.windows(),
        feed_forward=sigmoid_experts(blueprint, renormalize=False),
        qk_norm=True,
    )
