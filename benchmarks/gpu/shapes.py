"""Configurations of published models, as their config.json have them, and tiny ones of the same architectures."""

from __future__ import annotations

from typing import Any

_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "vocab_size": 128_256, "max_position_embeddings": 131_072, "num_attention_heads": 32,
    "num_key_value_heads": 8, "rope_theta": 500_000.0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "Llama-3.2-1B": {
        **_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "tie_word_embeddings": True,
    },
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "vocab_size": 151_936, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
    },
    "DeepSeek-V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "dtype": "bfloat16",
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10_944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax",
        "norm_topk_prob": False, "routed_scaling_factor": 1.0, "vocab_size": 102_400,
        "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False,
    },
}  # fmt: skip
_TINY = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 120, "max_position_embeddings": 512,
    "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "kv_lora_rank": 16,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 0, "dtype": "float32",
}  # fmt: skip


def config(name: str, tiny: bool = False, layers: int | None = None) -> dict[str, Any]:
    """The configuration of a model of MODELS; the fields that make it small instead if `tiny`."""
    found = dict(MODELS[name])
    if tiny:
        found |= {field: value for field, value in _TINY.items() if field in found}
        found["num_key_value_heads"] = 4 if "kv_lora_rank" in found else 2
    if layers is not None:
        found["num_hidden_layers"] = layers
        found["first_k_dense_replace"] = 0
    return found
