"""Nemotron-4 and Minitron (arXiv:2402.16819, arXiv:2407.14679): layer norms stored less one, squared ReLU, no gate."""

from __future__ import annotations

from functools import partial

from penstock.layers.decoder import DecoderModel
from penstock.models.blueprint import Blueprint


def build(blueprint: Blueprint) -> DecoderModel:
    return blueprint.uniform(
        norm=partial(blueprint.layer_norm, around_one=True),
        activation=blueprint.activation(default="relu2"),
        gated=False,
    )
