"""Nemotron-H and Nemotron 3 (NVIDIA, arXiv:2504.03624): a layer is Mamba-2, attention, an MLP or experts alone."""

from __future__ import annotations

import math
from dataclasses import replace

from penstock.layers.decoder import DecoderModel, FeedForward, NoMixer, SelfAttention
from penstock.layers.linear import Linear
from penstock.layers.mlp import PlainMlp
from penstock.layers.moe import Router, SharedExperts, SparseMoe, float_vector, plain_experts, router_weight
from penstock.models.block_norms import MIXER_ALONE
from penstock.models.blueprint import NO_ROPE, Blueprint
from penstock.models.family_facts import layer_letters
from penstock.models.mamba import mamba2
from penstock.models.mixture import expert_options

RENAMES = (
    (r"^(backbone\.|model\.)?embeddings\.", "model.embed_tokens."),
    (r"^(backbone\.|model\.)?norm_f\.", "model.norm."),
    (r"^backbone\.", "model."),
    (r"\.mixer\.([qkvo]_proj)\.", r".self_attn.\1."),
)


def build(blueprint: Blueprint) -> DecoderModel:
    """Nothing is rotated; MLPs and experts have no gates."""
    fields = blueprint.fields
    kinds = layer_letters(fields, blueprint.num_layers)
    heads, dim = fields.integer("mamba_num_heads"), fields.integer("mamba_head_dim")
    states = fields.integer("ssm_state_size", 128)
    sizes = {"mamba_n_heads": heads, "mamba_d_head": dim, "mamba_d_ssm": heads * dim, "mamba_d_state": states}
    scan = blueprint.with_defaults(**sizes)
    limits = (fields.number("time_step_min", 0.001), math.inf)
    bias = fields.flag("attention_bias", False)

    def mixer(index: int) -> SelfAttention:
        slot = sum(kind in "M*" for kind in kinds[:index])
        if kinds[index] == "M":
            return mamba2(scan, index, "mixer", slot, step_limits=limits)
        if kinds[index] == "*":
            return blueprint.attention(index, NO_ROPE, slot, qkv_bias=bias, output_bias=bias)
        size = fields.integer("intermediate_size")
        return NoMixer(_mlp(blueprint, index, "", size) if kinds[index] == "-" else _experts(blueprint, index))

    further = fields.integer("num_nextn_predict_layers", 0, minimum=0)
    return blueprint.decoder(
        rotary=NO_ROPE,
        norms=MIXER_ALONE,
        self_attention=mixer,
        model={"renames": RENAMES},
        ignorable=(r"mtp\..*",) if further else (),
    )


def _mlp(blueprint: Blueprint, index: int, below: str, size: int) -> FeedForward:
    prefix, bias = f"model.layers.{index}.mixer{below}", blueprint.fields.flag("mlp_bias", False)
    activation = blueprint.activation("mlp_hidden_act", "relu2")
    return PlainMlp(blueprint.kernels, prefix, blueprint.hidden_size, size, activation=activation, bias=bias)


def _experts(blueprint: Blueprint, index: int) -> FeedForward:
    """Chosen as DeepSeek-V3's are; they may work in a smaller space. Beside them an MLP for all tokens."""
    fields = blueprint.fields
    kernels = blueprint.kernels
    hidden = blueprint.hidden_size
    prefix, bias = f"model.layers.{index}.mixer", fields.flag("mlp_bias", False)
    latent = fields.integer("moe_latent_size") if fields.has("moe_latent_size") else None
    options = replace(
        expert_options(
            blueprint,
            routing="sigmoid_topk",
            renormalize=True,
            groups=(fields.integer("n_group", 1), fields.integer("topk_group", 1)),
            scale=fields.number("routed_scaling_factor", 1.0),
            gated=False,
        ),
        activation=blueprint.activation("mlp_hidden_act", "relu2"),
    )
    inner = replace(options, hidden_size=latent or hidden)
    around = None
    if latent is not None:
        into = Linear(kernels, ((f"{prefix}.fc1_latent_proj", latent),), hidden, bias=bias)
        around = into, Linear(kernels, ((f"{prefix}.fc2_latent_proj", hidden),), latent, bias=bias)
    routed = SparseMoe(
        kernels,
        Router(
            router_weight(kernels, f"{prefix}.gate.weight", options),
            choice_bias=float_vector((f"{prefix}.gate.e_score_correction_bias",), options.num_experts),
        ),
        plain_experts(f"{prefix}.experts", inner),
        inner,
        latent=around,
    )
    size = fields.integer("moe_shared_expert_intermediate_size")
    return SharedExperts(_mlp(blueprint, index, ".shared_experts", size), routed)
