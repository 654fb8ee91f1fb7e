"""Command R and R+ (Cohere, 2024), R7B and A (arXiv:2504.00698): parallel blocks, layer norms without biases."""

from __future__ import annotations

from functools import partial
from typing import Unpack

from penstock.layers.decoder import DecoderModel
from penstock.models.block_norms import PARALLEL
from penstock.models.blueprint import NO_ROPE, Blueprint
from penstock.models.options import DecoderFields


def build(blueprint: Blueprint) -> DecoderModel:
    return _build(blueprint, qk_norm=blueprint.fields.flag("use_qk_norm", False), head_norm="layer")


def build_cohere2(blueprint: Blueprint) -> DecoderModel:
    """Three sliding layers to one full layer, which does not rotate."""
    windows, rotary = blueprint.windows(), blueprint.rotary()
    return _build(blueprint, windows=windows, rotaries=[NO_ROPE if window is None else rotary for window in windows])


def _build(blueprint: Blueprint, **options: Unpack[DecoderFields]) -> DecoderModel:
    usual: DecoderFields = {
        "rotary": blueprint.rotary(),
        "norm": partial(blueprint.layer_norm, bias=False),
        "norms": PARALLEL,
        "model": {"tie_default": True, "logit_scale": blueprint.fields.number("logit_scale", 0.0625)},
        "interleaved": True,
    }
    return blueprint.decoder(**(usual | options))
