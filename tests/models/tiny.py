"""Tiny random models of every family, made by transformers, and the logits it computes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

SIZES = {
    "vocab_size": 101,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

LATENT = {
    "num_key_value_heads": 6,
    "head_dim": None,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 7,
    "first_k_dense_replace": 1,
    "n_routed_experts": 5,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 14,
}

# Experts beside ordinary attention, and balanced by a bias on the choice.
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 14}
ROUTED = {"num_experts": 5, "num_experts_per_tok": 3}
CHOSEN = {"num_local_experts": 5, "num_experts_per_tok": 3}
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.015,
    "logits_scaling": 8.0,
}
BALANCED = {
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 14,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}

# The last layers read what earlier ones of their kind keep.
SHARED_KV = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 7,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 101,
    "tie_word_embeddings": True,
}

# Recurrent layers.
DELTA = {
    "head_dim": 12,
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
UNGATED = {
    **BALANCED,
    "num_hidden_layers": None,
    "first_k_dense_replace": None,
    "moe_shared_expert_intermediate_size": 22,
    "ssm_state_size": 7,
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "chunk_size": 8,
}
STATES = {"num_attention_heads": None, "num_key_value_heads": None, "head_dim": None, "state_size": 7}
SCAN = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 7, "mamba_expand": 2, "mamba_chunk_size": 8}
MIXED = ["linear_attention", "full_attention", "linear_attention"]

# Families whose norms store their scale less one.
AROUND_ONE = ("Gemma", "Gemma2", "Gemma3", "Nemotron", "VaultGemma")
OLD = {"head_dim": None, "num_key_value_heads": None, "intermediate_size": None}  # families before those fields
OWN_HEADS = {"head_dim": None}  # the hidden size over the heads: 6
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 4,  # fewer than any prompt has: shorter ones rotate otherwise in transformers
    "short_factor": [1.0, 1.1, 1.2, 1.4],
    "long_factor": [1.0, 1.9, 3.1, 6.0],
    "partial_rotary_factor": 0.8,
}

# name → (architecture without "ForCausalLM", fields that differ from SIZES)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-plain-heads": ("Llama", {"num_key_value_heads": 6, "head_dim": None, "tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-yarn-scaled": (
        "Llama",
        {"rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.3, "truncate": False}},
    ),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-sliding": ("Mistral", {"sliding_window": 9}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {}),
    "qwen3-biases": ("Qwen3", {"attention_bias": True}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 14,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe-unnormalised": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 14, "decoder_sparse_step": 2},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-sliding": ("Mixtral", {"num_local_experts": 3, "sliding_window": 7}),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 4,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 17,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "gemma3-cap": ("Gemma3", {"sliding_window": 5, "final_logit_softcapping": 2.0}),
    "deepseek-v2": ("DeepseekV2", LATENT),
    "deepseek-v2-groups": (
        "DeepseekV2",
        {
            **LATENT,
            "q_lora_rank": 24,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "n_routed_experts": 6,
            "routed_scaling_factor": 1.7,
            "attention_bias": True,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **LATENT,
            "q_lora_rank": 24,
            "n_group": 3,
            "topk_group": 2,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    "deepseek-v3-halves": (
        "DeepseekV3",
        {**LATENT, "n_group": 1, "topk_group": 1, "rope_interleave": False, "norm_topk_prob": False},
    ),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 22}),
    "qwen2-moe-mixed": (
        "Qwen2Moe",
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "shared_expert_intermediate_size": 10,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 2,
        },
    ),
    "glm4-moe": ("Glm4Moe", {**BALANCED, "head_dim": 12, "n_group": 3, "topk_group": 2, "attention_bias": True}),
    "glm4-moe-normed": ("Glm4Moe", {**BALANCED, "head_dim": 12, "use_qk_norm": True, "norm_topk_prob": False}),
    "glm4-moe-lite": ("Glm4MoeLite", {**LATENT, "q_lora_rank": 24}),
    "dots1": ("Dots1", {**BALANCED, "n_shared_experts": 2}),
    "dots1-upper": ("Dots1", {**BALANCED, "sliding_window": 7, "max_window_layers": 1}),
    "dots1-types": (
        "Dots1",
        {
            **BALANCED,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "olmoe": ("Olmoe", {**ROUTED, **OWN_HEADS}),
    "granite-moe": ("GraniteMoe", {**GRANITE, **CHOSEN, **OWN_HEADS}),
    "granite-moe-shared": ("GraniteMoeShared", {**GRANITE, **CHOSEN, **OWN_HEADS, "shared_intermediate_size": 20}),
    "phi-moe": (
        "Phimoe",
        {**CHOSEN, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.3},
    ),
    "phi-moe-longrope": (
        "Phimoe",
        {
            **CHOSEN,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                **LONGROPE,
                "partial_rotary_factor": 1.0,
                "short_factor": [1.0, 1.9, 3.1, 4.0, 6.0],
                "long_factor": [1.0, 1.9, 3.1, 4.0, 6.0],
                "short_mscale": 1.24,
                "long_mscale": 1.24,
            },
        },
    ),
    "minimax-m2": ("MiniMaxM2", {**CHOSEN, "head_dim": 12, "rotary_dim": 6}),
    "ernie4_5-moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 5, "moe_k": 3, "moe_intermediate_size": 14, **OWN_HEADS},
    ),
    "ernie4_5-moe-biases": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 5,
            "moe_k": 2,
            "moe_intermediate_size": 14,
            "num_hidden_layers": 4,
            "moe_layer_interval": 2,
            "moe_num_shared_experts": 0,
            "use_bias": True,
            "tie_word_embeddings": False,
            **OWN_HEADS,
        },
    ),
    "hunyuan-moe": ("HunYuanMoEV1", {"num_experts": 5, "moe_topk": 3}),
    "llama4": (
        "Llama4",
        {
            "num_hidden_layers": 4,
            "num_local_experts": 5,
            "intermediate_size_mlp": 30,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 3,
            "attention_chunk_size": 8,
            "floor_scale": 5,
        },
    ),
    "llama4-plain": (
        "Llama4",
        {"num_local_experts": 3, "use_qk_norm": False, "attn_temperature_tuning": False, "rope_parameters": LLAMA3},
    ),
    "llama4-dense": ("Llama4", {"num_local_experts": 3, "moe_layers": [], "intermediate_size_mlp": 30}),
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "sliding_window": 8,
            "rope_parameters": {**YARN, "truncate": False, "rope_theta": 150000.0},
        },
    ),
    "phi": ("Phi", {**OWN_HEADS, "partial_rotary_factor": 0.7}),
    "phi3": ("Phi3", {"sliding_window": 9}),
    "phi3-longrope": (
        "Phi3",
        {"hidden_size": 60, "rope_parameters": LONGROPE, "original_max_position_embeddings": 4},
    ),
    "phi3-longrope-short": (  # all that is served lies within the original length
        "Phi3",
        {
            "hidden_size": 60,
            "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 128},
            "original_max_position_embeddings": 128,
        },
    ),
    "gemma": ("Gemma", {}),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": 7,
            "query_pre_attn_scalar": 17,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "olmo": ("Olmo", {"clip_qkv": 0.8}),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {
            "num_hidden_layers": 4,
            "sliding_window": 6,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "smollm3-sliding": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 8}),
    "granite": ("Granite", GRANITE),
    "cohere": ("Cohere", {"logit_scale": 0.3, **OWN_HEADS}),
    "cohere-norms": ("Cohere", {"use_qk_norm": True, "attention_bias": True, **OWN_HEADS}),
    "cohere2": ("Cohere2", {"num_hidden_layers": 4, "sliding_window": 7, **OWN_HEADS}),
    "stablelm": ("StableLm", {"partial_rotary_factor": 0.7, "use_qkv_bias": True, **OWN_HEADS}),
    "stablelm-parallel": (
        "StableLm",
        {"partial_rotary_factor": 0.7, "use_parallel_residual": True, "qk_layernorm": True, **OWN_HEADS},
    ),
    "glm": ("Glm", {"head_dim": 8}),
    "glm4": ("Glm4", {"head_dim": 8}),
    "seed-oss": ("SeedOss", {}),
    "exaone4": ("Exaone4", {"num_hidden_layers": 4, "sliding_window": 7}),
    "exaone4-full": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "hunyuan": ("HunYuanDenseV1", {}),
    "hunyuan-alpha": (
        "HunYuanDenseV1",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}},
    ),
    "arcee": ("Arcee", {"rope_parameters": YARN}),
    "jais2": ("Jais2", {}),
    "helium": ("Helium", {"head_dim": 6, "num_key_value_heads": 3}),
    "cwm": ("Cwm", {"sliding_window": 7, "num_hidden_layers": 5, "rope_parameters": LLAMA3}),
    "ministral": (
        "Ministral",
        {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "flex-olmo": ("FlexOlmo", {**ROUTED, **OWN_HEADS}),
    "youtu": ("Youtu", {**{key: value for key, value in LATENT.items() if "expert" not in key}, "q_lora_rank": 24}),
    "solar-open": ("SolarOpen", {**BALANCED, "intermediate_size": None, "first_k_dense_replace": None}),
    "vaultgemma": ("VaultGemma", {"sliding_window": 7, "query_pre_attn_scalar": 17, "attn_logit_softcapping": 2.0}),
    "exaone-moe": ("ExaoneMoe", {**EXPERTS, "num_hidden_layers": 4, "sliding_window": 7}),
    "mellum": (
        "Mellum",
        {
            **EXPERTS,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "granite-swa": ("GraniteSWA", {**GRANITE, **OWN_HEADS, "sliding_window": 7, "layer_rope_theta": [500.0, 0, 10.0]}),
    "nemotron": ("Nemotron", {"partial_rotary_factor": 0.4}),
    "starcoder2": ("Starcoder2", {"sliding_window": 8}),
    "gpt-neox": ("GPTNeoX", {**OWN_HEADS, "num_key_value_heads": None, "rotary_pct": 0.7}),
    "gpt-neox-serial": (
        "GPTNeoX",
        {**OWN_HEADS, "num_key_value_heads": None, "rotary_pct": 1.0, "use_parallel_residual": False},
    ),
    "ministral3": (
        "Ministral3",
        {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}},
    ),
    "mistral4": (
        "Mistral4",
        {
            **LATENT,
            "q_lora_rank": 24,
            "routed_scaling_factor": 1.7,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
        },
    ),
    "gpt2": ("GPT2", {**OLD, "hidden_size": 36}),
    "gpt2-scales": (
        "GPT2",
        {**OLD, "scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False, "n_inner": 20},
    ),
    "gpt-bigcode": ("GPTBigCode", OLD),
    "gpt-bigcode-heads": (
        "GPTBigCode",
        {**OLD, "multi_query": False, "tie_word_embeddings": False, "n_head": 6, "num_attention_heads": None},
    ),
    "gptj": ("GPTJ", {**OLD, "rotary_dim": 4}),
    "opt": ("OPT", {**OLD, "ffn_dim": 44}),
    "opt-projected": ("OPT", {**OLD, "ffn_dim": 44, "do_layer_norm_before": False, "word_embed_proj_dim": 20}),
    "opt-plain": ("OPT", {**OLD, "ffn_dim": 44, "enable_bias": False, "layer_norm_elementwise_affine": False}),
    "bloom": ("Bloom", {**OLD}),
    "mpt": ("Mpt", {**OLD, "attn_config": {"clip_qkv": 1.5, "softmax_scale": 0.3}}),
    "falcon": ("Falcon", {**OLD, "bias": True}),
    "falcon-groups": ("Falcon", {**OLD, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-groups-one-norm": (
        "Falcon",
        {**OLD, "new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-alibi": (
        "Falcon",
        {**OLD, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "ernie4_5": ("Ernie4_5", {}),
    "ernie4_5-biases": ("Ernie4_5", {"use_bias": True}),
    "lfm2": (
        "Lfm2",
        {**OWN_HEADS, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
    ),
    "lfm2-biases": (
        "Lfm2",
        {**OWN_HEADS, "full_attn_idxs": [2], "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False},
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        {**EXPERTS, **OWN_HEADS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"]},
    ),
    "gemma3n": ("Gemma3n", {**SHARED_KV, "activation_sparsity_pattern": [0.9, 0.8, 0.0, 0.0, 0.0, 0.0]}),
    "gemma3n-other-stream": (
        "Gemma3n",
        {**SHARED_KV, "altup_active_idx": 1, "altup_num_inputs": 3, "altup_correct_scale": False}
        | {"activation_sparsity_pattern": [0.6] * 6, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 90},
    ),
    "gemma4": ("Gemma4", {**SHARED_KV, "global_head_dim": 20, "use_double_wide_mlp": True}),
    "gemma4-moe": (
        "Gemma4",
        {**SHARED_KV, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True}
        | {"global_head_dim": 20, "num_global_key_value_heads": 3, "enable_moe_block": True, "num_experts": 5}
        | {"top_k_experts": 3, "moe_intermediate_size": 14, "final_logit_softcapping": 30.0},
    ),
    "qwen3-next": (
        "Qwen3Next",
        {**EXPERTS, **DELTA, "num_hidden_layers": 4, "shared_expert_intermediate_size": 10, "mlp_only_layers": [1]},
    ),
    "qwen3_5": ("Qwen3_5", {**DELTA, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}),
    "qwen3_5-moe": (
        "Qwen3_5Moe",
        {**EXPERTS, **DELTA, "num_hidden_layers": 4, "shared_expert_intermediate_size": 10},
    ),
    "mamba": ("Mamba", {**STATES, "time_step_rank": 5}),
    "mamba-biases": ("Mamba", {**STATES, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False}),
    "falcon-mamba": ("FalconMamba", STATES),
    "mamba2": ("Mamba2", {**STATES, "head_dim": 12, "num_heads": 6, "n_groups": 2, "chunk_size": 8}),
    "mamba2-limits": (
        "Mamba2",
        {**STATES, "head_dim": 12, "num_heads": 6, "n_groups": 1, "time_step_limit": [0.1, 0.9], "use_bias": True},
    ),
    "bamba": ("Bamba", {**SCAN, "attn_layer_indices": [1], "hidden_size": 48, "head_dim": 8}),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        {**GRANITE, **CHOSEN, **OWN_HEADS, **SCAN, "shared_intermediate_size": 20, "layer_types": MIXED},
    ),
    "granite-hybrid-dense": (
        "GraniteMoeHybrid",
        {
            **GRANITE,
            **OWN_HEADS,
            **SCAN,
            "num_local_experts": 0,
            "shared_intermediate_size": 20,
            "layer_types": MIXED,
            "position_embedding_type": "rope",
        },
    ),
    "falcon-h1": (
        "FalconH1",
        {
            **OWN_HEADS,
            **SCAN,
            "mamba_d_ssm": 48,
            "embedding_multiplier": 5.6,
            "lm_head_multiplier": 0.3,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.7,
            "key_multiplier": 0.8,
            "ssm_in_multiplier": 0.9,
            "ssm_out_multiplier": 0.6,
            "ssm_multipliers": [0.7, 1.2, 0.8, 1.1, 0.9],
            "mlp_multipliers": [0.8, 0.4],
        },
    ),
    "falcon-h1-normed": (
        "FalconH1",
        {**OWN_HEADS, **SCAN, "mamba_d_ssm": 48, "mamba_rms_norm": True, "mamba_proj_bias": True, "mlp_bias": True},
    ),
    "nemotron-h": (
        "NemotronH",
        {**UNGATED, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"]},
    ),
    "nemotron-h-latent": (
        "NemotronH",
        {**UNGATED, "layers_block_type": ["moe", "mlp", "linear_attention", "full_attention"], "moe_latent_size": 20}
        | {"n_group": 3, "topk_group": 2, "mlp_bias": True, "use_bias": True, "norm_topk_prob": False},
    ),
    "jamba-dense": (
        "Jamba",
        {**OWN_HEADS, "num_experts": 1, "num_experts_per_tok": 2, "attn_layer_period": 3, "attn_layer_offset": 1},
    ),
    "jamba": (
        "Jamba",
        {
            **OWN_HEADS,
            **ROUTED,
            "num_hidden_layers": 4,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "mamba_d_state": 6,
            "mamba_dt_rank": 5,
        },
    ),
}


def make(name: str, **fields: Any) -> transformers.PreTrainedModel:
    """A random model whose weights are large enough that every part matters to the logits."""
    architecture, special = FAMILIES[name]
    settings = {key: value for key, value in {**SIZES, **special, **fields}.items() if value is not None}
    if architecture in ("Gemma3", "Gemma3n", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe"):
        config = getattr(transformers, f"{architecture}TextConfig")(**settings)
    else:
        config = getattr(transformers, f"{architecture}Config")(**settings)
    config._attn_implementation = config._experts_implementation = "eager"
    if name == "falcon-alibi":
        config._attn_implementation = "sdpa"  # the other way counts distances twice
    torch.manual_seed(0)
    head = "LMHeadModel" if architecture == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{architecture}{head}")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            spread = 0.3 if "norm" in key or "sinks" in key or "bias" in key else 1.5 * parameter.shape[-1] ** -0.5
            parameter.normal_(0.0, spread)
            if "norm" in key and architecture not in AROUND_ONE:
                parameter += 1.0
        for key, buffer in model.named_buffers():
            if "correction_bias" in key:
                buffer.normal_(0.0, 0.3)
            if "layer_scalar" in key:
                buffer.uniform_(0.5, 1.5)
    return model


def save(name: str, folder: Path, **fields: Any) -> transformers.PreTrainedModel:
    """The same, saved as a checkpoint folder."""
    model = make(name, **fields)
    model.save_pretrained(folder)
    return model


def reference_logits(model: transformers.PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """transformers' logits of a whole prompt, [tokens, vocab]."""
    with torch.no_grad():
        return model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference in units of the logits' standard deviation."""
    return float((ours - theirs).abs().max() / theirs.std())


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, SIZES["vocab_size"], (length,), generator=generator).tolist()
