"""Mixtral (arXiv:2401.04088): Mistral with two of eight experts a token."""

from __future__ import annotations

from penstock.layers.decoder import DecoderModel, FeedForward
from penstock.layers.moe import ExpertOptions, SparseMoe, router_weight, separate_experts
from penstock.models.blueprint import Blueprint


def build(blueprint: Blueprint) -> DecoderModel:
    fields = blueprint.fields
    options = ExpertOptions(
        blueprint.hidden_size,
        fields.integer("intermediate_size"),
        fields.integer("num_local_experts"),
        fields.integer("num_experts_per_tok", 2),
        activation=blueprint.activation(),
    )

    def feed_forward(index: int) -> FeedForward:
        usual, other = f"model.layers.{index}.block_sparse_moe", f"model.layers.{index}.mlp"
        router = router_weight(blueprint.kernels, f"{usual}.gate.weight", options, f"{other}.gate.weight")
        experts = separate_experts((f"{usual}.experts", f"{other}.experts"), options, "w1", "w3", "w2")
        return SparseMoe(blueprint.kernels, router, experts, options)

    return blueprint.uniform(
        rotary=blueprint.rotary(theta=1_000_000.0),
        windows=[blueprint.sliding_window()] * blueprint.num_layers,
        feed_forward=feed_forward,
    )
