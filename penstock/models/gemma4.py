"""Gemma 4 text models (Google 2026): wider heads in full layers, a layer's own inputs, experts beside an MLP."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from penstock.layers.attention import Attention
from penstock.layers.decoder import Block, DecoderModel, FeedForward
from penstock.layers.mlp import NormedFeedForward, SummedFeedForward
from penstock.layers.moe import Router, SparseMoe, float_vector, router_weight, separate_experts
from penstock.layers.norm import RmsNorm
from penstock.layers.per_layer_embeddings import PerLayerInputBlock
from penstock.layers.recurrent import constants
from penstock.models.blueprint import Blueprint
from penstock.models.gemma import AROUND, attention_of, both_rotations, shared_leftovers
from penstock.models.gemma3n import SOUND, per_layer_embeddings, per_layer_input
from penstock.models.mixture import expert_options


def build(blueprint: Blueprint) -> DecoderModel:
    """Five sliding layers to one full layer, of which only a part of the pairs turns; scores are not scaled."""
    fields, hidden = blueprint.fields, blueprint.hidden_size
    if fields.has("use_bidirectional_attention") and fields.values["use_bidirectional_attention"] != "vision":
        given = fields.values["use_bidirectional_attention"]
        raise fields.error("use_bidirectional_attention", f"is {given!r}; allowed for text: null, 'vision'")
    windows = blueprint.windows()
    slots, sized = blueprint.slots(windows), [_sized(blueprint, index) for index in range(blueprint.num_layers)]
    rotations = [both_rotations(one)[window is not None] for one, window in zip(sized, windows, strict=True)]
    same = fields.flag("attention_k_eq_v", False)
    width = 2 if fields.flag("use_double_wide_mlp", False) else 1
    inputs = fields.integer("hidden_size_per_layer_input", 0, minimum=0)
    activation = blueprint.activation("hidden_activation", "gelu_pytorch_tanh")
    experts = fields.flag("enable_moe_block", False)

    def attention(index: int) -> Attention:
        as_values = same and windows[index] is None
        return attention_of(
            sized[index], index, rotations[index], slots[index], window=windows[index], keys_as_values=as_values
        )

    def feed_forward(index: int) -> FeedForward:
        size = fields.integer("intermediate_size") * (1 if slots[index] == index else width)
        mlp = blueprint.mlp(index, activation=activation, size=size)
        return _with_experts(blueprint, index, mlp) if experts else mlp

    def around(index: int, block: Block) -> Block:
        own = per_layer_input(blueprint, index) if inputs else None

        def everywhere(scale: Tensor) -> Tensor:
            return scale.expand(hidden)

        scale = constants(f"model.layers.{index}.layer_scalar", hidden, stored=(1,), transform=everywhere)
        return PerLayerInputBlock(blueprint.kernels, block, own, scale)

    return blueprint.decoder(
        rotary=next((turn for turn, window in zip(rotations, windows, strict=True) if window is None), rotations[0]),
        self_attention=attention,
        feed_forward=feed_forward,
        around=around,
        norms=replace(AROUND, before_mlp=None) if experts else AROUND,
        model={
            "tie_default": True,
            "embedding_scale": hidden**0.5,
            "soft_cap": fields.optional_number("final_logit_softcapping"),
            "max_positions": fields.integer("max_position_embeddings"),
            "opening": (per_layer_embeddings(blueprint),) if inputs else (),
        },
        ignorable=(*SOUND, *shared_leftovers(slots)),
    )


def _sized(blueprint: Blueprint, index: int) -> Blueprint:
    """With layer `index`'s heads."""
    layers = blueprint.fields.below("per_layer_config")
    own = layers and layers.below(str(index))
    if own is None:
        return blueprint
    dim, kv_heads = (
        own.integer("head_dim", blueprint.head_dim),
        own.integer("num_key_value_heads", blueprint.num_kv_heads),
    )
    if blueprint.num_heads % kv_heads:
        raise own.error("num_key_value_heads", f"is {kv_heads}, which does not divide {blueprint.num_heads} heads")
    return replace(blueprint, head_dim=dim, num_kv_heads=kv_heads)


def _with_experts(blueprint: Blueprint, index: int, mlp: FeedForward) -> FeedForward:
    """The MLP beside experts: both read what attention left, each with norms of its own; so does the router."""
    prefix, fields = f"model.layers.{index}", blueprint.fields
    more = blueprint.with_defaults(num_experts_per_tok=fields.integer("top_k_experts"), norm_topk_prob=True)
    activation = blueprint.activation("hidden_activation", "gelu_pytorch_tanh")
    options = replace(expert_options(more), activation=activation)
    reads = blueprint.norm(f"{prefix}.{AROUND.before_mlp}_2")
    hidden, kernels = blueprint.hidden_size, blueprint.kernels
    router_norm = RmsNorm(kernels, f"{prefix}.router.scale", hidden, blueprint.norm_eps, factor=hidden**-0.5)
    routed = SparseMoe(
        kernels,
        Router(
            router_weight(kernels, f"{prefix}.router.proj.weight", options),
            factors=float_vector((f"{prefix}.router.per_expert_scale",), options.num_experts),
        ),
        separate_experts((f"{prefix}.experts",), options, "gate_proj", "up_proj", "down_proj"),
        options,
        norms=(router_norm, reads),
    )
    dense = NormedFeedForward(
        blueprint.norm(f"{prefix}.{AROUND.before_mlp}"), mlp, blueprint.norm(f"{prefix}.{AROUND.after_mlp}_1")
    )
    sparse = NormedFeedForward(None, routed, blueprint.norm(f"{prefix}.{AROUND.after_mlp}_2"))
    return SummedFeedForward(kernels, dense, sparse)
