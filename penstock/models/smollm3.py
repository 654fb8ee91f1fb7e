"""SmolLM3 (Hugging Face, 2025): Llama whose every fourth layer does not rotate (NoPE, arXiv:2305.19466)."""

from __future__ import annotations

from penstock.layers.decoder import DecoderModel
from penstock.models.blueprint import NO_ROPE, Blueprint


def build(blueprint: Blueprint) -> DecoderModel:
    rotary = blueprint.rotary(theta=2_000_000.0)
    rope_layers = blueprint.rope_layers()
    return blueprint.decoder(
        rotary=rotary,
        rotaries=[rotary if has_rope else NO_ROPE for has_rope in rope_layers],
        windows=blueprint.windows(),
        model={"tie_default": True},
    )
