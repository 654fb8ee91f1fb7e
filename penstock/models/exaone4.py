"""EXAONE 4 (arXiv:2507.11407): norms after attention and MLP; where layers slide, full ones do not rotate."""

from __future__ import annotations

from typing import Unpack

from penstock.layers.decoder import DecoderModel
from penstock.models.block_norms import POST_NORM, PRE_NORM
from penstock.models.blueprint import NO_ROPE, Blueprint
from penstock.models.mixture import sigmoid_experts
from penstock.models.options import DecoderFields, LastFields


def build_moe(blueprint: Blueprint) -> DecoderModel:
    """K-EXAONE (LG, 2026): DeepSeek-V3's experts, norms before attention and MLP."""
    shared = blueprint.fields.integer("num_shared_experts", 1, minimum=0)
    experts = sigmoid_experts(blueprint.with_defaults(n_shared_experts=shared))
    model: LastFields = {"renames": ((r"\.mlp\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"),)}
    return build(blueprint, norms=PRE_NORM, feed_forward=experts, model=model, ignorable=(r"mtp\..*",))


def build(blueprint: Blueprint, **more: Unpack[DecoderFields]) -> DecoderModel:
    fields, rotary = blueprint.fields, blueprint.rotary()
    slides, windows = fields.has("sliding_window"), blueprint.windows()
    usual: DecoderFields = {
        "rotary": rotary,
        "rotaries": [NO_ROPE if slides and window is None else rotary for window in windows],
        "windows": windows,
        "norms": POST_NORM,
        "qk_norm": True,
    }
    return blueprint.decoder(**(usual | more))
