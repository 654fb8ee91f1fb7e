"""Qwen 3 (arXiv:2505.09388) and Qwen 2 (arXiv:2407.10671) mixture-of-experts models."""

from __future__ import annotations

from collections.abc import Callable

from penstock.layers.decoder import DecoderModel, FeedForward
from penstock.models.blueprint import Blueprint
from penstock.models.mixture import expert_options, first_dense, sparse_layer, with_shared


def build(blueprint: Blueprint) -> DecoderModel:
    """Qwen 3 with experts in every layer but the configured dense ones."""
    return blueprint.decoder(
        windows=blueprint.windows(),
        feed_forward=sparse(blueprint),
        qk_norm=True,
    )


def build_mellum(blueprint: Blueprint) -> DecoderModel:
    """Mellum 2 (JetBrains, 2026): layers of two kinds, each with its own rotation, as `layer_types` says."""
    windows = blueprint.windows()
    full = blueprint.rotary(theta=500_000.0, layer_type="full_attention")
    local = blueprint.rotary(layer_type="sliding_attention", local=True)
    options = expert_options(blueprint, renormalize=True)
    return blueprint.decoder(
        rotary=full,
        rotaries=[full if window is None else local for window in windows],
        windows=windows,
        feed_forward=first_dense(
            blueprint, lambda index: sparse_layer(blueprint, (f"model.layers.{index}.mlp",), options)
        ),
        ignorable=(r"mtp\..*",),
        qk_norm=True,
    )


def build_qwen2(blueprint: Blueprint) -> DecoderModel:
    """Qwen 2 with experts, and one for all tokens that a gate weighs."""
    shared = blueprint.fields.integer("shared_expert_intermediate_size")
    return blueprint.decoder(
        windows=blueprint.windows(),
        feed_forward=sparse(blueprint, shared),
        qkv_bias=blueprint.fields.flag("qkv_bias", True),
        output_bias=False,
    )


def sparse(blueprint: Blueprint, shared: int = 0, *, renormalize: bool = False) -> Callable[[int], FeedForward]:
    """Experts, but in dense layers; beside them one of size `shared` for all tokens that a gate weighs, unless 0."""
    fields = blueprint.fields
    dense, sparse_step = fields.integers("mlp_only_layers"), fields.integer("decoder_sparse_step", 1)
    options = expert_options(blueprint, renormalize=renormalize)

    def feed_forward(index: int) -> FeedForward:
        if index in dense or (index + 1) % sparse_step:
            return blueprint.mlp(index)
        prefix = f"model.layers.{index}.mlp"
        routed, gate = sparse_layer(blueprint, (prefix,), options), f"{prefix}.shared_expert_gate.weight"
        return with_shared(blueprint, f"{prefix}.shared_expert", routed, shared, gate=gate)

    return feed_forward
