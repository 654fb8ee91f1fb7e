"""LFM2 (Liquid AI, arXiv:2511.23404): gated short convolutions, attention in some layers, MLPs or experts."""

from __future__ import annotations

from collections.abc import Callable

from penstock.layers.decoder import DecoderModel, FeedForward
from penstock.layers.recurrent import ShortConvMixer
from penstock.models.blueprint import Blueprint
from penstock.models.mixture import expert_options, sparse_layer

RENAMES = (
    (r"\.operator_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"^(model\.)?embedding_norm\.", "model.norm."),
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.([qk])_layernorm\.", r".\1_norm."),
    (r"\.feed_forward\.", ".mlp."),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w2\.", ".down_proj."),
    (r"\.w3\.", ".up_proj."),
)


def build(blueprint: Blueprint) -> DecoderModel:
    """The dense models, whose MLPs are sized by a rule."""
    fields = blueprint.fields
    size = fields.integer("block_ff_dim", fields.integer("intermediate_size"))
    if fields.flag("block_auto_adjust_ff_dim", True):
        multiple = fields.integer("block_multiple_of", 256)
        size = int(fields.number("block_ffn_dim_multiplier", 1.0) * (2 * size // 3))
        size = multiple * -(-size // multiple)
    return _build(blueprint, lambda index: blueprint.mlp(index, size=size))


def build_moe(blueprint: Blueprint) -> DecoderModel:
    """Experts chosen by sigmoids, perhaps balanced by a bias, but in the first layers."""
    fields = blueprint.fields
    scale = fields.number("routed_scaling_factor", 1.0)
    options = expert_options(blueprint, routing="sigmoid_topk", renormalize=True, scale=scale)
    bias = "expert_bias" if fields.flag("use_expert_bias", True) else None
    dense = fields.integer("num_dense_layers", 2, minimum=0)

    def feed_forward(index: int) -> FeedForward:
        if index < dense:
            return blueprint.mlp(index)
        return sparse_layer(blueprint, (f"model.layers.{index}.mlp",), options, choice_bias=bias)

    return _build(blueprint, feed_forward)


def _build(blueprint: Blueprint, feed_forward: Callable[[int], FeedForward]) -> DecoderModel:
    fields = blueprint.fields
    recurrent = blueprint.recurrent()
    taps, bias = fields.integer("conv_L_cache", 3), fields.flag("conv_bias", False)

    def convolution(index: int) -> ShortConvMixer | None:
        prefix = f"model.layers.{index}.conv"
        return (
            ShortConvMixer(blueprint.kernels, prefix, index, blueprint.hidden_size, taps, bias=bias)
            if recurrent[index]
            else None
        )

    return blueprint.decoder(
        rotary=blueprint.rotary(theta=1_000_000.0),
        self_attention=convolution,
        feed_forward=feed_forward,
        model={"renames": RENAMES, "tie_default": fields.flag("tie_embedding", True)},
        qk_norm=True,
    )
