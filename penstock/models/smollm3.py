"""SmolLM3 (Hugging Face, 2025): Llama whose every fourth layer does not rotate (NoPE, arXiv:2305.19466)."""

from __future__ import annotations

from penstock.layers.decoder import DecoderModel
from penstock.models.blueprint import UNTURNED, Blueprint


def build(blueprint: Blueprint) -> DecoderModel:
    rotary = blueprint.rotary(theta=2_000_000.0)
    turned = blueprint.turned()
    return blueprint.uniform(
        rotary=rotary,
        rotaries=[rotary if turns else UNTURNED for turns in turned],
        windows=blueprint.windows(),
        model={"tie_default": True},
    )
