"""Gemma 3 text models (arXiv:2503.19786): five sliding layers to one full layer, each kind with its own rope."""

from __future__ import annotations

from penstock.layers.decoder import DecoderModel
from penstock.models.blueprint import Blueprint
from penstock.models.gemma import AROUND, assemble, both_rotations


def build(blueprint: Blueprint) -> DecoderModel:
    """Gemma 2 without caps on scores, with normalised queries and keys."""
    fields = blueprint.fields
    windows = blueprint.windows()
    full, local = both_rotations(blueprint)
    return assemble(
        blueprint,
        norms=AROUND,
        rotary=full,
        rotaries=[full if window is None else local for window in windows],
        model={
            "max_positions": fields.integer("max_position_embeddings"),  # stated after stretching
        },
        windows=windows,
        scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        qk_norm=True,
        around_one=True,
    )
