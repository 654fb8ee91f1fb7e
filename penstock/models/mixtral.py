"""Mixtral (arXiv:2401.04088), and what keeps its experts as it does: Phi-3.5-MoE (arXiv:2404.14219), MiniMax-M2."""

from __future__ import annotations

from penstock.layers.decoder import DecoderModel
from penstock.models.blueprint import Blueprint
from penstock.models.mixture import expert_options, sparse_layer

NAMES = ("w1", "w3", "w2")


def build(blueprint: Blueprint) -> DecoderModel:
    """Mistral with two of eight experts a token."""
    options = expert_options(blueprint, size="intermediate_size", renormalize=True)
    return blueprint.decoder(
        rotary=blueprint.rotary(theta=1_000_000.0),
        windows=blueprint.windows(),
        feed_forward=lambda index: sparse_layer(blueprint, places(index), options, names=NAMES),
    )


def build_phi(blueprint: Blueprint) -> DecoderModel:
    """Layer norms, biases, and experts weighted one after the other."""
    fields = blueprint.fields
    jitter = fields.number("router_jitter_noise", 0.01, minimum=-1.0)
    options = expert_options(blueprint, size="intermediate_size", routing="sparsemixer", jitter=jitter)
    return blueprint.decoder(
        rotary=blueprint.rotary(theta=1_000_000.0),
        windows=blueprint.windows(),
        norm=blueprint.layer_norm,
        feed_forward=lambda index: sparse_layer(blueprint, places(index), options, names=NAMES),
        model={"head_bias": fields.flag("lm_head_bias", False)},
    )


def build_minimax(blueprint: Blueprint) -> DecoderModel:
    """MiniMax-M2: part of a head is rotated, norms over all heads, sigmoids balanced by a bias."""
    options = expert_options(blueprint, size="intermediate_size", routing="sigmoid_topk", renormalize=True)
    bias = "e_score_correction_bias"
    return blueprint.decoder(
        rotary=blueprint.rotary(theta=5_000_000.0),
        feed_forward=lambda index: sparse_layer(blueprint, places(index), options, names=NAMES, choice_bias=bias),
        qk_norm=True,
        head_norm="all",
        ignorable=(r"model\.mtp.*",),
    )


def places(index: int) -> tuple[str, str]:
    """Where checkpoints hold layer `index`'s experts, in the usual spelling and another."""
    return f"model.layers.{index}.block_sparse_moe", f"model.layers.{index}.mlp"
