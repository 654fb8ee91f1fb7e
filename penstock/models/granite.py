"""Granite 3 and 4 (IBM): Llama, experts or Mamba-2; factors on embeddings, scores, residual branches and logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Unpack

from penstock.layers.decoder import DecoderModel, FeedForward
from penstock.layers.rotary import Rotary
from penstock.models.blueprint import NO_ROPE, Blueprint
from penstock.models.mamba import mamba2
from penstock.models.mixture import expert_options, sparse_layer, with_shared
from penstock.models.options import DecoderFields

RENAMES = (
    (r"\.block_sparse_moe\.input_linear\.weight$", ".block_sparse_moe.experts.gate_up_proj"),
    (r"\.block_sparse_moe\.output_linear\.weight$", ".block_sparse_moe.experts.down_proj"),
    (r"\.router\.layer\.weight$", ".gate.weight"),
    (r"\.shared_mlp\.input_linear\.", ".shared_mlp.gate_up_proj."),
    (r"\.shared_mlp\.output_linear\.", ".shared_mlp.down_proj."),
)


def build_moe(blueprint: Blueprint) -> DecoderModel:
    """Fused experts, perhaps beside an MLP for all tokens."""
    return build(blueprint, feed_forward=_experts(blueprint))


def build_hybrid(blueprint: Blueprint) -> DecoderModel:
    """Granite 4: most layers are Mamba-2, the others rotate nothing unless told; experts, or only the shared MLP."""
    fields = blueprint.fields
    recurrent = blueprint.recurrent()
    shared = fields.integer("shared_intermediate_size")
    mlp = partial(blueprint.mlp, size=shared, name="shared_mlp")
    rotary = blueprint.rotary() if fields.values.get("position_embedding_type") == "rope" else NO_ROPE
    return build(
        blueprint,
        feed_forward=_experts(blueprint) if fields.integer("num_local_experts", 0, minimum=0) else mlp,
        rotary=rotary,
        self_attention=lambda index: mamba2(blueprint, index) if recurrent[index] else None,
    )


def build_sliding(blueprint: Blueprint) -> DecoderModel:
    """Most layers slide, all have sinks; `layer_rope_theta` gives each layer's base, 0 for no rotation."""
    fields, count = blueprint.fields, blueprint.num_layers
    rotary = blueprint.rotary()
    bases = fields.values.get("layer_rope_theta") or (rotary.rope.theta,) * count
    if len(bases) != count or not all(type(base) in (int, float) and base >= 0 for base in bases):
        raise fields.error("layer_rope_theta", f"is {bases}; allowed: {count} numbers of at least 0")
    longest = fields.integer("max_position_embeddings")
    own = {base: Rotary(replace(rotary.rope, theta=float(base)), longest) for base in bases if base}
    return build(
        blueprint,
        rotary=rotary,
        rotaries=[own.get(base, NO_ROPE) for base in bases],
        windows=blueprint.windows(),
        sinks=True,
    )


def _experts(blueprint: Blueprint) -> Callable[[int], FeedForward]:
    options = expert_options(blueprint, size="intermediate_size", routing="topk_softmax")
    shared = blueprint.fields.integer("shared_intermediate_size", 0, minimum=0)

    def feed_forward(index: int) -> FeedForward:
        prefix = f"model.layers.{index}"
        routed = sparse_layer(blueprint, (f"{prefix}.block_sparse_moe",), options)
        return with_shared(blueprint, f"{prefix}.shared_mlp", routed, shared)

    return feed_forward


def build(blueprint: Blueprint, **more: Unpack[DecoderFields]) -> DecoderModel:
    """The residual stream is kept divided by `residual_multiplier`, so that branches are added as they are.

    Norms undo a factor of what they read, if their epsilon is divided by its square.
    """
    fields = blueprint.fields
    branch = fields.number("residual_multiplier", 1.0)
    usual: DecoderFields = {
        "model": {
            "renames": RENAMES if "feed_forward" in more else (),
            "embedding_scale": fields.number("embedding_multiplier", 1.0) / branch,
            "embedding_multiplies": True,
            "logit_scale": 1.0 / fields.number("logits_scaling", 1.0),
        },
        "scale": fields.number("attention_multiplier", 1.0),
    }
    return replace(blueprint, norm_eps=blueprint.norm_eps / branch**2).decoder(**(usual | more))
