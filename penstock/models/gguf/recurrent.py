"""GGUF metadata of recurrent families → their config.json. Layers that attend are those that have KV heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from penstock.config.errors import CheckpointError
from penstock.models.gguf.metadata import MAX_EXPERTS, MAX_LAYERS, Keys, Tensors


def _named(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, **fields}


def _layer_types(keys: Keys, recurrent: str = "linear_attention") -> list[str]:
    return ["full_attention" if heads else recurrent for heads in keys.per_layer("attention.head_count_kv", most=2**16)]


def _layers_with(keys: Keys, tensors: Tensors, stem: str) -> list[int]:
    """Layers that have a tensor of that name."""
    return [i for i in range(keys.integer("block_count", most=MAX_LAYERS)) if f"blk.{i}.{stem}" in tensors]


def _experts(keys: Keys) -> dict[str, Any]:
    count = keys.integer("expert_count", most=MAX_EXPERTS)
    return {"num_experts": count, "num_experts_per_tok": keys.integer("expert_used_count", most=count)}


def _lfm2(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    return _named(
        "Lfm2ForCausalLM",
        "lfm2",
        intermediate_size=keys.integer("feed_forward_length"),
        block_auto_adjust_ff_dim=False,
        conv_L_cache=keys.integer("shortconv.l_cache"),
        conv_bias=bool(_layers_with(keys, tensors, "shortconv.conv.bias")),
        layer_types=_layer_types(keys, "conv"),
    )


def _lfm2moe(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    return _lfm2(keys, tensors) | _named(
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        **_experts(keys),
        moe_intermediate_size=keys.integer("expert_feed_forward_length"),
        num_dense_layers=keys.integer("leading_dense_block_count", 0, least=0),
        use_expert_bias=bool(_layers_with(keys, tensors, "exp_probs_b.bias")),
        norm_topk_prob=True,
    )


def _delta(keys: Keys) -> dict[str, Any]:
    """Gated delta networks, and gated attention beside them."""
    heads, inner = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    if inner % heads:
        raise CheckpointError(f"metadata key {keys.arch}.ssm.inner_size is {inner}, no multiple of {heads} heads.")
    head_dim = keys.integer("attention.key_length", 256)
    return {
        "head_dim": head_dim,
        "partial_rotary_factor": keys.integer("rope.dimension_count", head_dim // 4) / head_dim,
        "full_attention_interval": keys.integer("full_attention_interval", 4),
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_num_key_heads": keys.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads,
    }


def _shared_expert(keys: Keys) -> dict[str, Any]:
    expert = keys.integer("expert_feed_forward_length")
    return {
        **_experts(keys),
        "intermediate_size": keys.integer("feed_forward_length", expert),
        "moe_intermediate_size": expert,
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length", expert),
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    }


def _qwen3next(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    return _named("Qwen3NextForCausalLM", "qwen3_next", **_delta(keys), **_shared_expert(keys))


def _qwen35(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    """Converters lay the value heads of one key head apart. Layers after the last predict further tokens."""
    layers = keys.integer("block_count", most=MAX_LAYERS) - keys.integer("nextn_predict_layers", 0, least=0)
    return _delta(keys) | {"num_hidden_layers": layers, "linear_value_heads_tiled": True}


def _qwen35_dense(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    size = keys.integer("feed_forward_length")
    return _named("Qwen3_5ForCausalLM", "qwen3_5_text", intermediate_size=size, **_qwen35(keys, tensors))


def _qwen35_moe(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    return _named("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", **_qwen35(keys, tensors), **_shared_expert(keys))


def _mamba(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    normed = keys.values.get("mamba.ssm.dt_b_c_rms") is True
    return _named(
        "FalconMambaForCausalLM" if normed else "MambaForCausalLM",
        "falcon_mamba" if normed else "mamba",
        intermediate_size=keys.integer("ssm.inner_size"),
        state_size=keys.integer("ssm.state_size"),
        conv_kernel=keys.integer("ssm.conv_kernel"),
        time_step_rank=keys.integer("ssm.time_step_rank"),
        use_bias=bool(_layers_with(keys, tensors, "ssm_in.bias")),
        use_conv_bias=bool(_layers_with(keys, tensors, "ssm_conv1d.bias")),
    )


def _scan(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    """What Mamba-2 layers are made of."""
    inner, heads = keys.integer("ssm.inner_size"), keys.integer("ssm.time_step_rank")
    return {
        "mamba_d_ssm": inner,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": keys.integer("ssm.group_count", 1),
        "mamba_d_state": keys.integer("ssm.state_size"),
        "mamba_d_conv": keys.integer("ssm.conv_kernel"),
        "mamba_conv_bias": bool(_layers_with(keys, tensors, "ssm_conv1d.bias")),
        "mamba_proj_bias": bool(_layers_with(keys, tensors, "ssm_in.bias")),
    }


def _mamba2(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    found = _scan(keys, tensors)
    return _named("Mamba2ForCausalLM", "mamba2", **found, n_groups=found["mamba_n_groups"])


def _granitehybrid(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    """Also what llama.cpp makes of a "BambaForCausalLM": one that turns queries and keys, and has no factors."""
    experts = keys.integer("expert_count", 0, most=MAX_EXPERTS, least=0)
    dense = tensors.get("blk.0.ffn_gate.weight")
    shared = keys.integer("expert_shared_feed_forward_length", dense.shape[0] if dense is not None else None)
    heads = keys.integer("attention.head_count", most=2**16)
    head_dim = keys.integer("attention.key_length", max(1, keys.integer("embedding_length") // heads))
    return _named(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        **_scan(keys, tensors),
        layer_types=_layer_types(keys),
        intermediate_size=keys.integer("feed_forward_length"),
        shared_intermediate_size=shared,
        num_local_experts=experts,
        num_experts_per_tok=keys.integer("expert_used_count", 0, most=MAX_EXPERTS, least=0),
        position_embedding_type="rope" if keys.values.get("granitehybrid.rope.scaling.finetuned") is True else "nope",
        partial_rotary_factor=keys.integer("rope.dimension_count", head_dim) / head_dim,
        attention_multiplier=keys.number("attention.scale", head_dim**-0.5),
        embedding_multiplier=keys.number("embedding_scale", 1.0),
        residual_multiplier=keys.number("residual_scale", 1.0),
        logits_scaling=keys.number("logit_scale", 1.0),
    )


def _falcon_h1(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    """Its factors are in the weights already."""
    return _named(
        "FalconH1ForCausalLM",
        "falcon_h1",
        **_scan(keys, tensors),
        intermediate_size=keys.integer("feed_forward_length"),
        mamba_rms_norm=bool(_layers_with(keys, tensors, "ssm_norm.weight")),
        mamba_norm_before_gate=False,
    )


def _jamba(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    layers = keys.integer("block_count", most=MAX_LAYERS)
    sparse = _layers_with(keys, tensors, "ffn_gate_inp.weight")
    period = sparse[1] - sparse[0] if len(sparse) > 1 else layers
    first = sparse[0] if sparse else 0
    if sparse != (list(range(first, layers, period)) if sparse else []):
        raise CheckpointError(f"layers {sparse} have experts; every n-th one is needed.")
    return _named(
        "JambaForCausalLM",
        "jamba",
        **(_experts(keys) if sparse else {"num_experts": 1, "num_experts_per_tok": 1}),
        layer_types=_layer_types(keys),
        intermediate_size=keys.integer("feed_forward_length"),
        expert_layer_period=period,
        expert_layer_offset=first,
        mamba_expand=max(1, keys.integer("ssm.inner_size") // keys.integer("embedding_length")),
        mamba_d_state=keys.integer("ssm.state_size"),
        mamba_d_conv=keys.integer("ssm.conv_kernel"),
        mamba_dt_rank=keys.integer("ssm.time_step_rank"),
        mamba_conv_bias=bool(_layers_with(keys, tensors, "ssm_conv1d.bias")),
    )


NEMOTRON_H = MappingProxyType(
    {
        "attn_norm": "norm",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        "ffn_gate_inp": "mixer.gate",
        "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
    }
)


def _nemotron_h(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    """A layer attends if it has KV heads, is an MLP or experts if it has a width, and else recurrent."""
    further = keys.integer("nextn_predict_layers", 0, most=MAX_LAYERS, least=0)
    layers = keys.integer("block_count", most=MAX_LAYERS) - further
    kv_heads, widths = keys.per_layer("attention.head_count_kv", most=2**16), keys.per_layer("feed_forward_length")
    sparse = set(_layers_with(keys, tensors, "ffn_gate_inp.weight"))
    kinds = [
        "full_attention" if heads else ("moe" if layer in sparse else "mlp") if width else "linear_attention"
        for layer, (heads, width) in enumerate(zip(kv_heads[:layers], widths[:layers], strict=True))
    ]
    inner, heads = keys.integer("ssm.inner_size"), keys.integer("ssm.time_step_rank")
    if inner % heads:
        raise CheckpointError(f"metadata key {keys.arch}.ssm.inner_size is {inner}, no multiple of {heads} heads.")
    dense = [width for kind, width in zip(kinds, widths[:layers], strict=True) if kind == "mlp"]
    biased = any(_layers_with(keys, tensors, f"{stem}.bias") for stem in ("ffn_up", "ffn_up_shexp"))
    found = _named(
        "NemotronHForCausalLM",
        "nemotron_h",
        layers_block_type=kinds,
        num_hidden_layers=layers,
        intermediate_size=max(dense, default=1),
        mlp_hidden_act="relu2",
        mlp_bias=biased,
        attention_bias=bool(_layers_with(keys, tensors, "attn_q.bias")),
        mamba_num_heads=heads,
        mamba_head_dim=inner // heads,
        n_groups=keys.integer("ssm.group_count", 1),
        ssm_state_size=keys.integer("ssm.state_size"),
        conv_kernel=keys.integer("ssm.conv_kernel"),
        use_conv_bias=bool(_layers_with(keys, tensors, "ssm_conv1d.bias")),
        use_bias=bool(_layers_with(keys, tensors, "ssm_in.bias")),
    )
    if further:
        found["num_nextn_predict_layers"] = further
    return found | (_ungated(keys) if sparse else {})


def _ungated(keys: Keys) -> dict[str, Any]:
    size = keys.integer("expert_feed_forward_length")
    return {
        **_experts(keys),
        "moe_intermediate_size": size,
        "moe_shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length", size),
        "moe_latent_size": keys.integer("moe_latent_size") if keys.has("moe_latent_size") else None,
        "norm_topk_prob": keys.flag("expert_weights_norm") is not False,
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "n_group": keys.integer("expert_group_count", 1),
        "topk_group": keys.integer("expert_group_used_count", 1),
    }


RECURRENT_BUILDERS: Mapping[str, Callable[[Keys, Tensors], dict[str, Any]]] = MappingProxyType(
    {
        "lfm2": _lfm2,
        "lfm2moe": _lfm2moe,
        "qwen3next": _qwen3next,
        "qwen35": _qwen35_dense,
        "qwen35moe": _qwen35_moe,
        "mamba": _mamba,
        "mamba2": _mamba2,
        "granitehybrid": _granitehybrid,
        "falcon-h1": _falcon_h1,
        "jamba": _jamba,
        "nemotron_h": _nemotron_h,
        "nemotron_h_moe": _nemotron_h,
    }
)
