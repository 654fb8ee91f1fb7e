"""Mixtral (arXiv:2401.04088): Mistral with two of eight experts a token."""

from __future__ import annotations

from penstock.layers.decoder import DecoderModel
from penstock.models.blueprint import Blueprint
from penstock.models.mixture import expert_options, sparse_layer

NAMES = ("w1", "w3", "w2")


def build(blueprint: Blueprint) -> DecoderModel:
    options = expert_options(blueprint, size="intermediate_size", renormalize=True)
    return blueprint.uniform(
        rotary=blueprint.rotary(theta=1_000_000.0),
        windows=[blueprint.sliding_window()] * blueprint.num_layers,
        feed_forward=lambda index: sparse_layer(blueprint, places(index), options, names=NAMES),
    )


def places(index: int) -> tuple[str, str]:
    """Where checkpoints hold layer `index`'s experts, in the usual spelling and another."""
    return f"model.layers.{index}.block_sparse_moe", f"model.layers.{index}.mlp"
