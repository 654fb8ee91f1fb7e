"""Fields that configurations of a model type leave out because they are the reference implementation's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# No heads attend, and no position is counted: what stands here bounds the length of a sequence alone.
_MAMBA = MappingProxyType(
    {
        "num_attention_heads": 1,
        "max_position_embeddings": 1_048_576,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    }
)
MODEL_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "gemma3_text": MappingProxyType(
            {
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "vocab_size": 262_208,
                "max_position_embeddings": 131_072,
                "sliding_window": 4096,
            }
        ),
        "glm4_moe": MappingProxyType({"partial_rotary_factor": 0.5}),
        "glm4_moe_lite": MappingProxyType({"first_k_dense_replace": 1}),
        "cohere": MappingProxyType({"layer_norm_eps": 1e-5}),
        "cohere2": MappingProxyType({"layer_norm_eps": 1e-5, "sliding_window": 4096}),
        "ernie4_5": MappingProxyType({"head_dim": 128, "rms_norm_eps": 1e-5}),
        "ernie4_5_moe": MappingProxyType({"rms_norm_eps": 1e-5}),
        "llama4": MappingProxyType({"rms_norm_eps": 1e-5, "head_dim": 128}),
        "phimoe": MappingProxyType({"rms_norm_eps": 1e-5}),
        "bert": MappingProxyType({"layer_norm_eps": 1e-12, "type_vocab_size": 2}),
        "roberta": MappingProxyType({"layer_norm_eps": 1e-12, "type_vocab_size": 2}),
        "nomic_bert": MappingProxyType({"layer_norm_eps": 1e-12, "max_position_embeddings": 2048}),
        "modernbert": MappingProxyType({"norm_eps": 1e-5}),
        "exaone4": MappingProxyType({"rms_norm_eps": 1e-5}),
        "gemma": MappingProxyType({"head_dim": 256}),
        "gemma2": MappingProxyType(
            {
                "head_dim": 256,
                "sliding_window": 4096,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            }
        ),
        "glm": MappingProxyType({"head_dim": 128, "rms_norm_eps": 1.5625e-07, "partial_rotary_factor": 0.5}),
        "gpt_neox": MappingProxyType({"layer_norm_eps": 1e-5}),
        "hunyuan": MappingProxyType({"rms_norm_eps": 1e-5}),
        "internlm3": MappingProxyType({"head_dim": 128, "rms_norm_eps": 1e-5}),
        "nemotron": MappingProxyType({"norm_eps": 1e-5, "partial_rotary_factor": 0.5}),
        "olmo": MappingProxyType({"rms_norm_eps": 1e-5}),
        "olmo3": MappingProxyType({"rms_norm_eps": 1e-5, "sliding_window": 4096}),
        "phi": MappingProxyType({"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5}),
        "phi3": MappingProxyType({"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}),
        "falcon_h1": MappingProxyType({"rms_norm_eps": 1e-5, "mamba_d_ssm": 1024, "mamba_d_state": 256}),
        "falcon_mamba": _MAMBA,
        "mamba": _MAMBA,
        "mamba2": MappingProxyType({**_MAMBA, "n_groups": 8, "tie_word_embeddings": False}),
        "jamba": MappingProxyType({"num_key_value_heads": 8, "num_experts": 16, "num_experts_per_tok": 2}),
        "granitemoehybrid": MappingProxyType({"mamba_n_heads": 128, "mamba_d_state": 256}),
        "lfm2": MappingProxyType({"norm_eps": 1e-5}),
        "qwen3_next": MappingProxyType({"head_dim": 256, "partial_rotary_factor": 0.25}),
        "qwen3_5": MappingProxyType({"head_dim": 256, "partial_rotary_factor": 0.25}),
        "seed_oss": MappingProxyType({"head_dim": 128, "attention_bias": True, "attention_out_bias": False}),
        "stablelm": MappingProxyType({"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25}),
        "starcoder2": MappingProxyType({"norm_epsilon": 1e-5}),
        "gpt_oss": MappingProxyType({"sliding_window": 128, "head_dim": 64}),
        "qwen3": MappingProxyType({"head_dim": 128}),
    }
)


# GPT-2's names of sizes, which some families have kept.
OLDER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
    }
)


def with_defaults(model_type: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the type's defaults where it says nothing; an explicit null says nothing too.

    Sizes under an older name are known under today's as well.
    """
    stated = {name: value for name, value in config.items() if value is not None}
    renamed = {name: stated[old] for old, name in OLDER_NAMES.items() if old in stated}
    return {**MODEL_DEFAULTS.get(model_type, {}), **renamed, **stated}
