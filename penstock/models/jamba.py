"""Jamba (AI21, arXiv:2403.19887): Mamba with attention in one layer of eight, experts in every other. And Bamba."""

from __future__ import annotations

from penstock.layers.decoder import DecoderModel, FeedForward
from penstock.models.block_norms import BlockNorms
from penstock.models.blueprint import NO_ROPE, Blueprint
from penstock.models.mamba import mamba, mamba2
from penstock.models.mixture import expert_options, sparse_layer

NORMS = BlockNorms(before_mlp="pre_ff_layernorm")
RENAMES = ((r"^(model\.)?final_layernorm\.", "model.norm."),)


def build(blueprint: Blueprint) -> DecoderModel:
    """Nothing is rotated; steps and what states are read and written with have norms."""
    fields = blueprint.fields
    sparse, first = fields.integer("expert_layer_period", 2), fields.integer("expert_layer_offset", 1, minimum=0)
    options = expert_options(blueprint, size="intermediate_size") if fields.integer("num_experts", 16) > 1 else None

    def feed_forward(index: int) -> FeedForward:
        if options is None or index % sparse != first:
            return blueprint.mlp(index, name="feed_forward")
        return sparse_layer(blueprint, (f"model.layers.{index}.feed_forward",), options, router="router.weight")

    recurrent = blueprint.recurrent()
    return blueprint.decoder(
        rotary=NO_ROPE,
        self_attention=lambda index: (
            mamba(blueprint, index, "mamba", norms="scaled", eps=blueprint.norm_eps) if recurrent[index] else None
        ),
        feed_forward=feed_forward,
        norms=NORMS,
        model={"renames": RENAMES},
    )


def build_bamba(blueprint: Blueprint) -> DecoderModel:
    """Bamba (IBM, 2024): Mamba-2 with MLPs, and some layers that attend."""
    recurrent = blueprint.recurrent()
    return blueprint.decoder(
        self_attention=lambda index: mamba2(blueprint, index) if recurrent[index] else None,
        feed_forward=lambda index: blueprint.mlp(index, name="feed_forward"),
        norms=NORMS,
        model={"renames": RENAMES},
    )
