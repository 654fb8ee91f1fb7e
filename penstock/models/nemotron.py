"""Nemotron-4 and Minitron (arXiv:2402.16819, arXiv:2407.14679): layer norms stored less one, squared ReLU, no gate.

And AFM (Arcee, 2025) and Jais 2 (Inception, 2025), with other norms.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from penstock.layers.decoder import DecoderModel
from penstock.layers.norm import Norm
from penstock.models.blueprint import Blueprint


def build(blueprint: Blueprint) -> DecoderModel:
    return _build(blueprint, partial(blueprint.layer_norm, around_one=True))


def build_arcee(blueprint: Blueprint) -> DecoderModel:
    """RMS norms."""
    return _build(blueprint, blueprint.norm)


def build_jais2(blueprint: Blueprint) -> DecoderModel:
    """Layer norms as they are."""
    return _build(blueprint, blueprint.layer_norm)


def _build(blueprint: Blueprint, norm: Callable[..., Norm]) -> DecoderModel:
    return blueprint.decoder(norm=norm, activation=blueprint.activation(default="relu2"), gated=False)
