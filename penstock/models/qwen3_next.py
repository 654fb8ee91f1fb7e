"""Qwen3-Next and the text models of Qwen 3.5 (Qwen, 2025 and 2026): gated delta networks, gated attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from penstock.layers.decoder import DecoderModel, FeedForward
from penstock.layers.delta_net import DeltaNet, DeltaOptions
from penstock.models.blueprint import Blueprint
from penstock.models.qwen3_moe import sparse

UNUSED = (r"(model\.)?mtp\..*", r"(model\.)?visual\..*")


def build_moe(blueprint: Blueprint) -> DecoderModel:
    """Experts, one of them for all tokens."""
    shared = blueprint.fields.integer("shared_expert_intermediate_size")
    return build(blueprint, sparse(blueprint, shared, renormalize=True))


def build(blueprint: Blueprint, feed_forward: Callable[[int], FeedForward] | None = None) -> DecoderModel:
    """Three layers with states to one that attends, unless told otherwise."""
    fields = blueprint.fields
    recurrent = blueprint.recurrent()
    keys, values = fields.integer("linear_num_key_heads", 16), fields.integer("linear_num_value_heads", 32)
    if values % keys:
        raise fields.error(
            "linear_num_value_heads", f"is {values}; allowed: a multiple of linear_num_key_heads, {keys}"
        )
    options = DeltaOptions(
        blueprint.hidden_size,
        keys,
        values,
        fields.integer("linear_key_head_dim", 128),
        fields.integer("linear_value_head_dim", 128),
        fields.integer("linear_conv_kernel_dim", 4),
        blueprint.norm_eps,
        tiled=fields.flag("linear_value_heads_tiled", False),
    )

    def delta(index: int) -> DeltaNet | None:
        prefix = f"model.layers.{index}.linear_attn"
        return DeltaNet(blueprint.kernels, prefix, index, options) if recurrent[index] else None

    return blueprint.decoder(
        self_attention=delta,
        feed_forward=feed_forward,
        norm=partial(blueprint.norm, around_one=True),
        ignorable=UNUSED,
        output_gate=True,
        qk_norm=True,
        around_one=True,
    )
