"""DeepSeek-V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437): latent attention, shared and routed experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from penstock.layers.decoder import DecoderModel, FeedForward
from penstock.layers.latent_attention import LatentAttention, LatentOptions
from penstock.layers.mlp import GatedMlp
from penstock.layers.moe import ExpertOptions, SharedExperts, SparseMoe, router_weight, separate_experts
from penstock.layers.rotary import Rotary, yarn_mscale
from penstock.layers.weight import Weight, WeightPart
from penstock.models.blueprint import Blueprint

# Whether experts are chosen from the best groups.
METHODS = MappingProxyType({"greedy": False, "group_limited_greedy": True})


def build(blueprint: Blueprint) -> DecoderModel:
    """V2: softmax routing, for the larger models within the best groups of experts."""
    fields = blueprint.fields
    grouped = fields.choice("topk_method", METHODS, "greedy")
    return _build(blueprint, partial(_experts, blueprint, grouped=grouped), interleaved=True)


def build_v3(blueprint: Blueprint) -> DecoderModel:
    """V3: sigmoid routing, balanced by a bias on the choice."""
    interleaved = blueprint.fields.flag("rope_interleave", True)
    return _build(blueprint, partial(_experts, blueprint, grouped=True, biased=True), interleaved=interleaved)


def _build(blueprint: Blueprint, experts: Callable[[int], FeedForward], *, interleaved: bool) -> DecoderModel:
    fields = blueprint.fields
    rotated, unrotated = fields.integer("qk_rope_head_dim"), fields.integer("qk_nope_head_dim")
    blueprint = replace(blueprint, head_dim=rotated)
    rotary = blueprint.rotary()
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
    )
    dense, every = fields.integer("first_k_dense_replace", 0, minimum=0), fields.integer("moe_layer_freq", 1)
    return blueprint.uniform(
        rotary=rotary,
        self_attention=lambda index: LatentAttention(
            blueprint.kernels, f"model.layers.{index}.self_attn", index, options
        ),
        feed_forward=lambda index: blueprint.mlp(index) if index < dense or index % every else experts(index),
        ignorable=_predictors(blueprint),
    )


def _temperature(blueprint: Blueprint, rotary: Rotary) -> float:
    """YaRN's factor on scores, where the configuration puts it there instead of on cos and sin."""
    settings = blueprint.fields.below("rope_parameters") or blueprint.fields.below("rope_scaling")
    if settings is None or rotary.rope.kind == "default" or not settings.has("mscale_all_dim"):
        return 1.0
    return yarn_mscale(rotary.rope.factor, settings.number("mscale_all_dim", minimum=-1.0)) ** 2


def _predictors(blueprint: Blueprint) -> tuple[str, ...]:
    """Layers after the last, which predict further tokens and are not used."""
    count = blueprint.fields.integer("num_nextn_predict_layers", 0, minimum=0)
    return tuple(rf"model\.layers\.{blueprint.num_layers + extra}\..*" for extra in range(count))


def _experts(blueprint: Blueprint, index: int, *, grouped: bool, biased: bool = False) -> FeedForward:
    fields, kernels, prefix = blueprint.fields, blueprint.kernels, f"model.layers.{index}.mlp"
    count, size = fields.integer("n_routed_experts"), fields.integer("moe_intermediate_size")
    groups = (fields.integer("n_group", 1), fields.integer("topk_group", 1)) if grouped else (1, 1)
    top_k = fields.integer("num_experts_per_tok")
    if count % groups[0] or groups[1] > groups[0] or top_k > count // groups[0] * groups[1]:
        raise fields.error("n_group", f"is {groups[0]}: {top_k} of {count} experts cannot be in {groups[1]} groups")
    options = ExpertOptions(
        blueprint.hidden_size,
        size,
        count,
        top_k,
        routing="sigmoid_topk" if biased else "softmax_topk",
        renormalize=fields.flag("norm_topk_prob", biased),
        groups=groups,
        scale=fields.number("routed_scaling_factor", 1.0),
        activation=blueprint.activation(),
    )
    bias = WeightPart(f"{prefix}.gate.e_score_correction_bias", (count,))
    routed = SparseMoe(
        kernels,
        router_weight(kernels, f"{prefix}.gate.weight", options),
        separate_experts((f"{prefix}.experts",), options, "gate_proj", "up_proj", "down_proj"),
        options,
        choice_bias=Weight((count,), (bias,), keep_float32=True) if biased else None,
    )
    shared = fields.integer("n_shared_experts", 0, minimum=0)
    if not shared:
        return routed
    mlp = GatedMlp(
        kernels, f"{prefix}.shared_experts", blueprint.hidden_size, shared * size, activation=options.activation
    )
    return SharedExperts(mlp, routed)
