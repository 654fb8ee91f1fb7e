"""DeepSeek-V2 (arXiv:2405.04434), V3 (arXiv:2412.19437), Mistral 4: latent attention, shared and routed experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

from penstock.layers.decoder import DecoderModel, FeedForward
from penstock.layers.latent_attention import LatentAttention, LatentOptions
from penstock.layers.rotary import Rotary, yarn_mscale
from penstock.models.blueprint import Blueprint
from penstock.models.mixture import grouped_experts, predictors, sigmoid_experts

# Whether experts are chosen from the best groups.
METHODS = MappingProxyType({"greedy": False, "group_limited_greedy": True})


def build(blueprint: Blueprint) -> DecoderModel:
    """V2: softmax routing, for the larger models within the best groups of experts."""
    fields = blueprint.fields
    grouped = fields.choice("topk_method", METHODS, "greedy")
    return _build(blueprint, grouped_experts(blueprint, grouped=grouped), interleaved=True)


def build_v3(blueprint: Blueprint) -> DecoderModel:
    """V3: sigmoid routing, balanced by a bias on the choice."""
    interleaved = blueprint.fields.flag("rope_interleave", True)
    return _build(blueprint, sigmoid_experts(blueprint), interleaved=interleaved)


def build_youtu(blueprint: Blueprint) -> DecoderModel:
    """Youtu-LLM (Tencent, 2025): V3's attention, no experts."""
    return _build(blueprint, blueprint.mlp, interleaved=blueprint.fields.flag("rope_interleave", True))


def build_mistral4(blueprint: Blueprint) -> DecoderModel:
    """V3's attention with V2's routing, and queries that grow with the position."""
    fields = blueprint.fields
    if fields.integer("n_group", 1) != 1:
        raise fields.error("n_group", f"is {fields.integer('n_group')}; allowed: 1")
    experts = grouped_experts(blueprint, renormalize=True)
    return _build(blueprint, experts, interleaved=fields.flag("rope_interleave", True))


def _build(blueprint: Blueprint, feed_forward: Callable[[int], FeedForward], *, interleaved: bool) -> DecoderModel:
    fields = blueprint.fields
    rotated, unrotated = fields.integer("qk_rope_head_dim"), fields.integer("qk_nope_head_dim")
    blueprint = replace(blueprint, head_dim=rotated)
    rotary = blueprint.rotary(partial=False)
    options = LatentOptions(
        blueprint.hidden_size,
        blueprint.num_heads,
        fields.integer("q_lora_rank") if fields.has("q_lora_rank") else None,
        fields.integer("kv_lora_rank"),
        rotated,
        unrotated,
        fields.integer("v_head_dim"),
        rotary,
        scale=(rotated + unrotated) ** -0.5 * _temperature(blueprint, rotary),
        interleaved=interleaved,
        bias=fields.flag("attention_bias", False),
        temperature=blueprint.temperature(),
    )
    return blueprint.decoder(
        rotary=rotary,
        self_attention=lambda index: LatentAttention(
            blueprint.kernels, f"model.layers.{index}.self_attn", index, options
        ),
        feed_forward=feed_forward,
        ignorable=predictors(blueprint),
    )


def _temperature(blueprint: Blueprint, rotary: Rotary) -> float:
    """YaRN's factor on scores, where the configuration puts it there instead of on cos and sin."""
    settings = blueprint.fields.below("rope_parameters") or blueprint.fields.below("rope_scaling")
    if settings is None or rotary.rope.kind == "default" or not settings.has("mscale_all_dim"):
        return 1.0
    return yarn_mscale(rotary.rope.factor, settings.number("mscale_all_dim", minimum=-1.0)) ** 2
