"""EXAONE 4 (arXiv:2507.11407): norms after attention and MLP; where layers slide, full ones do not rotate."""

from __future__ import annotations

from penstock.layers.decoder import DecoderModel
from penstock.models.blueprint import POST_NORM, UNTURNED, Blueprint


def build(blueprint: Blueprint) -> DecoderModel:
    fields, rotary = blueprint.fields, blueprint.rotary()
    pattern = fields.values.get("sliding_window_pattern")  # a number, or spelled out as in "LLLG"
    every = len(pattern) if isinstance(pattern, str) else fields.integer("sliding_window_pattern", 4, minimum=0)
    slides = fields.has("sliding_window")
    windows = blueprint.windows(lambda index: slides and every > 0 and (index + 1) % every != 0)
    return blueprint.uniform(
        rotary=rotary,
        rotaries=[UNTURNED if slides and window is None else rotary for window in windows],
        windows=windows,
        norms=POST_NORM,
        qk_norm=True,
    )
