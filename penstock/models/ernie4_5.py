"""ERNIE 4.5 (Baidu, 2025), dense and of experts: Llama with interleaved pairs and biases everywhere or nowhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.layers.decoder import DecoderModel, FeedForward
from penstock.models.blueprint import Blueprint
from penstock.models.mixture import expert_options, sparse_layer, with_shared
from penstock.models.options import LastFields


def build_moe(blueprint: Blueprint) -> DecoderModel:
    """Experts in some layers, chosen by their probability and a bias that balances them."""
    fields = blueprint.fields
    bias = fields.flag("use_bias", False)
    options = expert_options(blueprint, renormalize=True)
    every, first = fields.integer("moe_layer_interval", 1), fields.integer("moe_layer_start_index", 1, minimum=0)
    last = fields.integer("moe_layer_end_index", -1, minimum=-1) % blueprint.num_layers
    shared = fields.integer("moe_num_shared_experts", 2, minimum=0) * options.intermediate_size
    choice: dict[str, Any] = {
        "choice_bias": "moe_statics.e_score_correction_bias",
        "bias_shape": (1, options.num_experts),
    }

    def feed_forward(index: int) -> FeedForward:
        if not first <= index <= last or (index + 1) % every:
            return blueprint.mlp(index, bias=bias)
        prefix = f"model.layers.{index}.mlp"
        routed = sparse_layer(blueprint, (prefix,), options, **choice)
        return with_shared(blueprint, f"{prefix}.shared_experts", routed, shared, bias=bias)

    return build(blueprint, feed_forward, {"head_bias": bias}, ignorable=(r"model\.mtp_.*",))


def build(
    blueprint: Blueprint,
    feed_forward: Callable[[int], FeedForward] | None = None,
    model: LastFields | None = None,
    ignorable: tuple[str, ...] = (),
) -> DecoderModel:
    bias = blueprint.fields.flag("use_bias", False)
    return blueprint.decoder(
        rotary=blueprint.rotary(theta=500_000.0),
        feed_forward=feed_forward,
        mlp_bias=bias,
        model={"tie_default": True, **(model or {})},
        ignorable=ignorable,
        qkv_bias=bias,
        output_bias=bias,
        interleaved=True,
    )
