"""GPT-OSS (arXiv:2508.10925): attention sinks, every other layer slides, experts with biases and a clamped SwiGLU."""

from __future__ import annotations

from penstock.layers.decoder import DecoderModel, FeedForward
from penstock.layers.moe import ExpertOptions, Router, SparseMoe, interleaved_experts, router_weight
from penstock.layers.weight import Weight, WeightPart
from penstock.models.blueprint import Blueprint


def build(blueprint: Blueprint) -> DecoderModel:
    fields = blueprint.fields
    options = ExpertOptions(
        blueprint.hidden_size,
        fields.integer("intermediate_size"),
        fields.integer("num_local_experts" if fields.has("num_local_experts") else "num_experts"),
        fields.integer("num_experts_per_tok" if fields.has("num_experts_per_tok") else "experts_per_token"),
        routing="topk_softmax",
        activation="swigluoai",
        alpha=fields.number("swiglu_alpha", 1.702),
        limit=fields.number("swiglu_limit", 7.0),
        bias=True,
    )

    def feed_forward(index: int) -> FeedForward:
        prefix = f"model.layers.{index}.mlp"
        router = router_weight(blueprint.kernels, f"{prefix}.router.weight", options)
        shape = (options.num_experts,)
        router_bias = Weight(shape, (WeightPart(f"{prefix}.router.bias", shape),))
        experts = interleaved_experts(f"{prefix}.experts", options)
        return SparseMoe(blueprint.kernels, Router(router, router_bias), experts, options)

    return blueprint.decoder(
        rotary=blueprint.rotary(theta=150_000.0),
        windows=blueprint.windows(),
        feed_forward=feed_forward,
        sinks=True,
    )
