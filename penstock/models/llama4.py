"""Llama 4 text models (Meta, 2025): chunks of attention, layers without rotation, one expert a token."""

from __future__ import annotations

from collections.abc import Callable

from penstock.layers.decoder import DecoderModel, FeedForward
from penstock.layers.mlp import GatedMlp
from penstock.layers.moe import transposed_experts
from penstock.layers.rotary import Temperature
from penstock.models.blueprint import NO_ROPE, Blueprint
from penstock.models.mixture import expert_options, sparse_layer, with_shared

RENAMES = ((r"\.feed_forward\.", ".mlp."),)


def build(blueprint: Blueprint) -> DecoderModel:
    """Layers that rotate see chunks; those that do not see all, with queries that grow with the position."""
    fields = blueprint.fields
    rope_layers = blueprint.rope_layers()
    temperature = None
    if fields.flag("attn_temperature_tuning", True):
        temperature = Temperature(fields.number("floor_scale", 8192.0), fields.number("attn_scale", 0.1), 1)
    rotary = blueprint.rotary(theta=500_000.0)
    windows = blueprint.windows()
    feed_forward, normed = _feed_forward(blueprint), fields.flag("use_qk_norm", True)
    return blueprint.decoder(
        rotary=rotary,
        self_attention=lambda index: blueprint.attention(
            index,
            rotary if rope_layers[index] else NO_ROPE,
            window=windows[index],
            chunked=rope_layers[index],
            interleaved=rope_layers[index],
            unit_norm=normed and rope_layers[index],
            temperature=None if rope_layers[index] else temperature,
        ),
        feed_forward=feed_forward,
        model={"renames": RENAMES},
    )


def _feed_forward(blueprint: Blueprint) -> Callable[[int], FeedForward]:
    """Experts in `moe_layers`, beside an MLP for all tokens; an MLP elsewhere."""
    fields = blueprint.fields
    every = fields.integer("interleave_moe_layer_step", 1)
    usual = range(every - 1, blueprint.num_layers, every)
    sparse = fields.integers("moe_layers") if fields.has("moe_layers") else usual
    options = expert_options(blueprint, size="intermediate_size", routing="sigmoid_topk", scale_input=True)
    if options.top_k != 1:
        raise fields.error("num_experts_per_tok", f"is {options.top_k}; allowed: 1")
    activation, dense = blueprint.activation(), fields.integer("intermediate_size_mlp", options.intermediate_size)

    def feed_forward(index: int) -> FeedForward:
        prefix = f"model.layers.{index}.mlp"
        if index not in sparse:
            return GatedMlp(blueprint.kernels, prefix, blueprint.hidden_size, dense, activation=activation)
        experts = transposed_experts(f"{prefix}.experts", options)
        routed = sparse_layer(blueprint, (prefix,), options, router="router.weight", experts=experts)
        return with_shared(blueprint, f"{prefix}.shared_expert", routed, options.intermediate_size)

    return feed_forward
