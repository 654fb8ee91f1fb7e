"""What mixture-of-experts families share: their experts' sizes and routing from the configuration, and the layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.layers.decoder import FeedForward
from penstock.layers.mlp import GatedMlp
from penstock.layers.moe import (
    ExpertOptions,
    ExpertWeights,
    Router,
    SharedExperts,
    SparseMoe,
    float_vector,
    gated_expert,
    router_weight,
    separate_experts,
)
from penstock.models.blueprint import Blueprint
from penstock.models.fields import Fields

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k")
GATED = ("gate_proj", "up_proj", "down_proj")


def expert_options(
    blueprint: Blueprint, *, size: str = "moe_intermediate_size", renormalize: bool = False, **more: Any
) -> ExpertOptions:
    """Sizes of the experts and how they are chosen.

    Args:
        blueprint: of the model.
        size: the field with an expert's intermediate size.
        renormalize: whether chosen weights are divided by their sum where the configuration does not say.
        more: other fields of ExpertOptions.

    Raises:
        CheckpointError: a field is missing, or more experts are to be chosen than there are.
    """
    fields = blueprint.fields
    inner = same_everywhere(fields, size)
    counted, chosen = (next(filter(fields.has, names), names[0]) for names in (COUNTS, CHOSEN))
    count, top_k = same_everywhere(fields, counted), same_everywhere(fields, chosen)
    if top_k > count:
        raise fields.error(chosen, f"is {top_k}; allowed: at most {counted}, {count}")
    groups = more.get("groups", (1, 1))
    if count % groups[0] or groups[1] > groups[0] or top_k > count // groups[0] * groups[1]:
        raise fields.error("n_group", f"is {groups[0]}: {top_k} of {count} experts cannot be in {groups[1]} groups")
    return ExpertOptions(
        blueprint.hidden_size,
        inner,
        count,
        top_k,
        renormalize=fields.flag("norm_topk_prob", renormalize),
        activation=blueprint.activation(),
        **more,
    )


def sparse_layer(
    blueprint: Blueprint,
    prefixes: Sequence[str],
    options: ExpertOptions,
    *,
    names: tuple[str, str, str] = GATED,
    router: str = "gate.weight",
    experts: ExpertWeights | None = None,
    choice_bias: str | None = None,
    bias_shape: tuple[int, ...] | None = None,
) -> SparseMoe:
    """Routed experts.

    Args:
        blueprint: of the model.
        prefixes: of the layer's weights; the first is the usual one, the others are accepted too.
        options: of the experts.
        names: of an expert's gate, up and down projections.
        router: key of the router's matrix below the prefix.
        experts: their weights, where they are not stored one by one or stacked under `experts`.
        choice_bias: key below the prefix of what is added to scores for the choice alone; None for nothing.
        bias_shape: as it is stored; None for a vector.
    """
    first, *others = prefixes
    experts = experts or separate_experts(
        tuple(f"{prefix}.experts" for prefix in prefixes), options, names[0], names[1], names[2]
    )
    matrix = router_weight(blueprint.kernels, f"{first}.{router}", options, *(f"{other}.{router}" for other in others))
    bias = None
    if choice_bias is not None:
        bias = float_vector(tuple(f"{prefix}.{choice_bias}" for prefix in prefixes), options.num_experts, bias_shape)
    return SparseMoe(blueprint.kernels, Router(matrix, choice_bias=bias), experts, options)


def with_shared(
    blueprint: Blueprint, prefix: str, routed: SparseMoe, size: int, *, gate: str | None = None, bias: bool = False
) -> FeedForward:
    """Routed experts beside an MLP of `size` under `prefix`, weighted by a sigmoid of `gate` (a key) if given."""
    if not size:
        return routed
    kernels, options = blueprint.kernels, routed.options
    if gate is not None:
        return SharedExperts(gated_expert(kernels, prefix, gate, options, size), routed)
    mlp = GatedMlp(kernels, prefix, blueprint.hidden_size, size, activation=options.activation, bias=bias)
    return SharedExperts(mlp, routed)


def same_everywhere(fields: Fields, name: str) -> int:
    """An integer, or a list of one a layer that are all the same."""
    if isinstance(fields.values.get(name), int):
        return fields.integer(name)
    values = set(fields.integers(name))
    if len(values) > 1:
        raise fields.error(name, f"differs from layer to layer ({sorted(values)}); allowed: one number for all layers")
    return values.pop() if values else fields.integer(name)


def first_dense(blueprint: Blueprint, experts: Callable[[int], FeedForward]) -> Callable[[int], FeedForward]:
    """Gated MLPs in the first layers, then experts in all, or every `moe_layer_freq`-th; or as `mlp_layer_types`."""
    fields = blueprint.fields
    if fields.has("mlp_layer_types"):
        types = fields.texts("mlp_layer_types", blueprint.num_layers)
        if unknown := sorted(set(types) - {"dense", "sparse"}):
            raise fields.error("mlp_layer_types", f"has {unknown}; allowed: dense, sparse")
        return lambda index: blueprint.mlp(index) if types[index] == "dense" else experts(index)
    dense, every = fields.integer("first_k_dense_replace", 0, minimum=0), fields.integer("moe_layer_freq", 1)
    return lambda index: blueprint.mlp(index) if index < dense or index % every else experts(index)


def grouped_experts(
    blueprint: Blueprint, *, grouped: bool = True, choice_bias: str | None = None, **more: Any
) -> Callable[[int], FeedForward]:
    """DeepSeek's feed-forward layers: experts within the best groups, unless not `grouped`, beside an MLP.

    The rest as of `sparse_layer` and `expert_options`.
    """
    fields = blueprint.fields
    groups = (fields.integer("n_group", 1), fields.integer("topk_group", 1)) if grouped else (1, 1)
    scale = fields.number("routed_scaling_factor", 1.0)
    options = expert_options(blueprint, groups=groups, scale=scale, **more)
    shared = fields.integer("n_shared_experts", 0, minimum=0) * options.intermediate_size

    def experts(index: int) -> FeedForward:
        prefix = f"model.layers.{index}.mlp"
        routed = sparse_layer(blueprint, (prefix,), options, choice_bias=choice_bias)
        return with_shared(blueprint, f"{prefix}.shared_experts", routed, shared)

    return first_dense(blueprint, experts)


def sigmoid_experts(blueprint: Blueprint, *, renormalize: bool = True) -> Callable[[int], FeedForward]:
    """DeepSeek-V3's (arXiv:2412.19437): sigmoids, balanced by a bias."""
    bias = "gate.e_score_correction_bias"
    return grouped_experts(blueprint, choice_bias=bias, routing="sigmoid_topk", renormalize=renormalize)


def predictors(blueprint: Blueprint) -> tuple[str, ...]:
    """Layers after the last, which predict further tokens and are not used."""
    count = blueprint.fields.integer("num_nextn_predict_layers", 0, minimum=0)
    return tuple(rf"model\.layers\.{blueprint.num_layers + extra}\..*" for extra in range(count))
