"""Qwen 3 mixture-of-experts models (arXiv:2505.09388)."""

from __future__ import annotations

from penstock.layers.decoder import DecoderModel, FeedForward
from penstock.layers.moe import ExpertOptions, SparseMoe, router_weight, separate_experts
from penstock.models.blueprint import Blueprint


def build(blueprint: Blueprint) -> DecoderModel:
    """Qwen 3 with experts in every layer but the configured dense ones."""
    fields = blueprint.fields
    bias = fields.flag("attention_bias", False)
    window = blueprint.sliding_window() if fields.flag("use_sliding_window", False) else None
    dense, sparse_step = fields.integers("mlp_only_layers"), fields.integer("decoder_sparse_step", 1)
    options = ExpertOptions(
        blueprint.hidden_size,
        fields.integer("moe_intermediate_size"),
        fields.integer("num_experts" if fields.has("num_experts") else "num_local_experts"),
        fields.integer("num_experts_per_tok"),
        renormalize=fields.flag("norm_topk_prob", False),
        activation=blueprint.activation(),
    )

    def feed_forward(index: int) -> FeedForward:
        if index in dense or (index + 1) % sparse_step:
            return blueprint.mlp(index)
        prefix = f"model.layers.{index}.mlp"
        experts = separate_experts((f"{prefix}.experts",), options, "gate_proj", "up_proj", "down_proj")
        router = router_weight(blueprint.kernels, f"{prefix}.gate.weight", options)
        return SparseMoe(blueprint.kernels, router, experts, options)

    return blueprint.uniform(
        windows=[window] * blueprint.num_layers,
        feed_forward=feed_forward,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
    )
