"""SmolLM3 (Hugging Face, 2025): Llama whose every fourth layer does not rotate (NoPE, arXiv:2305.19466)."""

from __future__ import annotations

from penstock.layers.decoder import DecoderModel
from penstock.models.blueprint import UNTURNED, Blueprint


def build(blueprint: Blueprint) -> DecoderModel:
    fields = blueprint.fields
    rotary = blueprint.rotary(theta=2_000_000.0)
    turned = blueprint.turned()
    slides = fields.flag("use_sliding_window", False) and fields.has("sliding_window")
    return blueprint.uniform(
        rotary=rotary,
        rotaries=[rotary if turns else UNTURNED for turns in turned],
        windows=blueprint.windows(lambda index: not turned[index]) if slides else None,
        model={"tie_default": True},
    )
