"""Hunyuan (Tencent, 2025): Llama, dense or of experts, that normalises queries and keys after their rotation."""

from __future__ import annotations

from collections.abc import Callable

from penstock.layers.decoder import DecoderModel, FeedForward
from penstock.models.blueprint import Blueprint
from penstock.models.mixture import expert_options, same_everywhere, sparse_layer, with_shared

RENAMES = (
    (r"\.self_attn\.query_layernorm\.", ".self_attn.q_norm."),
    (r"\.self_attn\.key_layernorm\.", ".self_attn.k_norm."),
)


def build_moe(blueprint: Blueprint) -> DecoderModel:
    """Experts in every layer, beside an MLP for all tokens."""
    fields = blueprint.fields
    size = "moe_intermediate_size" if fields.has("moe_intermediate_size") else "intermediate_size"
    inner = same_everywhere(fields, size)
    options = expert_options(blueprint, size=size, renormalize=True)
    shared = inner * (same_everywhere(fields, "num_shared_expert") if fields.has("num_shared_expert") else 1)
    shared = shared if fields.flag("use_mixed_mlp_moe", True) else 0

    def feed_forward(index: int) -> FeedForward:
        prefix = f"model.layers.{index}.mlp"
        routed = sparse_layer(blueprint, (prefix,), options, router="gate.wg.weight")
        return with_shared(blueprint, f"{prefix}.shared_mlp", routed, shared)

    return build(blueprint, feed_forward)


def build(blueprint: Blueprint, feed_forward: Callable[[int], FeedForward] | None = None) -> DecoderModel:
    return blueprint.decoder(
        feed_forward=feed_forward,
        model={"renames": RENAMES},
        qk_norm=True,
        head_norm="rotated",
    )
