"""What configurations of a model type leave out (the reference implementation's defaults), or name in their own way."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

RECURRENT_LAYERS = ("linear_attention", "mamba", "conv")
"""What configurations call layers that keep a state instead of keys and values."""
MEMORYLESS_LAYERS = ("moe", "mlp")
"""What they call layers that keep nothing."""
STORED_TURNED: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"gpt2": (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")}
)
"""Model type → ends of the names of matrices that are stored as [inputs, outputs]."""

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
        "arcee": MappingProxyType({"rms_norm_eps": 1e-5}),
        "cwm": MappingProxyType({"head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 8192}),
        "exaone_moe": MappingProxyType(
            {"rms_norm_eps": 1e-5, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "sliding_window": 4096}
        ),
        "granite_swa": MappingProxyType({"rms_norm_eps": 1e-5, "sliding_window": 128, "tie_word_embeddings": True}),
        "helium": MappingProxyType({"head_dim": 128, "rms_norm_eps": 1e-8}),
        "iquestcoder": MappingProxyType({"head_dim": 128, "rms_norm_eps": 1e-5}),
        "jais2": MappingProxyType({"layer_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True}),
        "mellum": MappingProxyType({"head_dim": 128, "sliding_window": 1024}),
        "solar_open": MappingProxyType({"head_dim": 128, "rms_norm_eps": 1e-5}),
        "youtu": MappingProxyType({"tie_word_embeddings": True}),
        "bloom": MappingProxyType({"max_position_embeddings": 2048, "expansion_ratio": 4}),
        "falcon": MappingProxyType({"max_position_embeddings": 2048, "multi_query": True, "expansion_ratio": 4}),
        "gpt2": MappingProxyType({"layer_norm_eps": 1e-5, "expansion_ratio": 4}),
        "gpt_bigcode": MappingProxyType({"layer_norm_eps": 1e-5, "multi_query": True, "expansion_ratio": 4}),
        "gptj": MappingProxyType({"layer_norm_eps": 1e-5, "rotary_dim": 64, "expansion_ratio": 4}),
        "ministral3": MappingProxyType({"head_dim": 128, "rms_norm_eps": 1e-5}),
        "mpt": MappingProxyType({"layer_norm_eps": 1e-5, "expansion_ratio": 4}),
        "opt": MappingProxyType({"layer_norm_eps": 1e-5}),
        "glm4_moe": MappingProxyType({"partial_rotary_factor": 0.5}),
        "glm4_moe_lite": MappingProxyType({"first_k_dense_replace": 1}),
        "cohere": MappingProxyType({"layer_norm_eps": 1e-5}),
        "cohere2": MappingProxyType({"layer_norm_eps": 1e-5, "sliding_window": 4096}),
        "ernie4_5": MappingProxyType({"head_dim": 128, "rms_norm_eps": 1e-5}),
        "ernie4_5_moe": MappingProxyType({"rms_norm_eps": 1e-5}),
        "llama4": MappingProxyType({"rms_norm_eps": 1e-5, "head_dim": 128}),
        "phimoe": MappingProxyType({"rms_norm_eps": 1e-5}),
        "bert": MappingProxyType({"layer_norm_eps": 1e-12, "type_vocab_size": 2}),
        "distilbert": MappingProxyType({"layer_norm_eps": 1e-12}),
        "eurobert": MappingProxyType({"rms_norm_eps": 1e-5}),
        "roberta": MappingProxyType({"layer_norm_eps": 1e-12, "type_vocab_size": 2}),
        "nomic_bert": MappingProxyType({"layer_norm_eps": 1e-12, "max_position_embeddings": 2048}),
        "gte": MappingProxyType({"layer_norm_eps": 1e-12, "type_vocab_size": 1}),
        "jina_embeddings_v3": MappingProxyType({"layer_norm_eps": 1e-5, "type_vocab_size": 1}),
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
        "gemma3n_text": MappingProxyType(
            {
                "num_key_value_heads": 2,
                "head_dim": 256,
                "vocab_size_per_layer_input": 262_144,
                "hidden_size_per_layer_input": 256,
                "max_position_embeddings": 32_768,
                "sliding_window": 512,
                "num_kv_shared_layers": 15,
                "final_logit_softcapping": 30.0,
            }
        ),
        "gemma4_text": MappingProxyType(
            {
                "num_key_value_heads": 4,
                "head_dim": 256,
                "global_head_dim": 512,
                "vocab_size_per_layer_input": 262_144,
                "hidden_size_per_layer_input": 256,
                "max_position_embeddings": 131_072,
                "sliding_window": 512,
                "rope_parameters": MappingProxyType(
                    {
                        "full_attention": MappingProxyType(
                            {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0}
                        ),
                        "sliding_attention": MappingProxyType({"rope_type": "default", "rope_theta": 10_000.0}),
                    }
                ),
            }
        ),
        "glm": MappingProxyType(
            {"head_dim": 128, "rms_norm_eps": 1.5625e-07, "partial_rotary_factor": 0.5, "attention_bias": True}
        ),
        "gpt_neox": MappingProxyType({"layer_norm_eps": 1e-5, "attention_bias": True}),
        "hunyuan": MappingProxyType({"rms_norm_eps": 1e-5}),
        "internlm3": MappingProxyType({"head_dim": 128, "rms_norm_eps": 1e-5}),
        "nemotron": MappingProxyType({"norm_eps": 1e-5, "partial_rotary_factor": 0.5}),
        "nemotron_h": MappingProxyType(
            {"layer_norm_epsilon": 1e-5, "num_key_value_heads": 8, "head_dim": 128, "n_groups": 8}
        ),
        "olmo": MappingProxyType({"rms_norm_eps": 1e-5}),
        "olmo3": MappingProxyType({"rms_norm_eps": 1e-5, "sliding_window": 4096}),
        "phi": MappingProxyType({"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5}),
        "phi3": MappingProxyType({"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}),
        "bamba": MappingProxyType({"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "mamba_d_state": 256}),
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
        "gpt_oss": MappingProxyType({"sliding_window": 128, "head_dim": 64, "attention_bias": True}),
        "qwen3": MappingProxyType({"head_dim": 128}),
    }
)


# Names that older model types have for fields.
SYNONYMS: Mapping[str, str] = MappingProxyType(
    {
        "dim": "hidden_size",
        "hidden_dim": "intermediate_size",
        "n_embd": "hidden_size",
        "n_embed": "hidden_size",
        "d_model": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_layers": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "n_positions": "max_position_embeddings",
        "max_seq_len": "max_position_embeddings",
        "seq_length": "max_position_embeddings",
        "model_max_length": "max_position_embeddings",
        "n_inner": "intermediate_size",
        "ffn_dim": "intermediate_size",
        "ffn_hidden_size": "intermediate_size",
        "layer_norm_epsilon": "layer_norm_eps",
    }
)


def with_defaults(model_type: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the type's defaults where it says nothing; an explicit null says nothing too.

    Fields that only stand under an older name, or follow from others, are there under their own too.
    """
    stated = {name: value for name, value in config.items() if value is not None}
    named = {ours: stated[theirs] for theirs, ours in SYNONYMS.items() if theirs in stated}
    values = {**MODEL_DEFAULTS.get(model_type, {}), **named, **stated}
    if values.get("multi_query") is True and values.get("new_decoder_architecture") is not True:
        values["num_key_value_heads"] = 1
    if model_type == "gemma4_text":
        _full_layers(values)
    if model_type == "nemotron_h":
        _layers_of_pattern(values)
    hidden, ratio = values.get("hidden_size"), values.get("expansion_ratio")
    if type(hidden) is int and type(ratio) is int:
        values.setdefault("intermediate_size", ratio * hidden)
    return values


def _full_layers(values: dict[str, Any]) -> None:
    """Gemma 4's last layer is a full one, and full layers' heads are named one by one: as `per_layer_config`."""
    count = values.get("num_hidden_layers")
    if type(count) is not int or not 0 < count <= 4096:
        return
    usual = ["sliding_attention" if (index + 1) % 6 else "full_attention" for index in range(count)]
    types = values.setdefault("layer_types", usual)
    if not isinstance(types, (list, tuple)) or not types:
        return
    values["layer_types"] = [*types[:-1], "full_attention"]
    own = {"head_dim": values["global_head_dim"]}
    if values.get("attention_k_eq_v") is True and "num_global_key_value_heads" in values:
        own["num_key_value_heads"] = values["num_global_key_value_heads"]
    full = (index for index, kind in enumerate(values["layer_types"]) if kind == "full_attention")
    values.setdefault("per_layer_config", {str(index): own for index in full})


def _layers_of_pattern(values: dict[str, Any]) -> None:
    """Nemotron-H's layers as a list where they are stated as text, and their number, which follows from it."""
    pattern = values.get("hybrid_override_pattern")
    letters = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
    stated = "layers_block_type" in values or "layer_types" in values
    if not stated and isinstance(pattern, str) and set(pattern) <= set(letters):
        values["layers_block_type"] = [letters[letter] for letter in pattern]
    types = values.get("layer_types", values.get("layers_block_type"))
    if isinstance(types, (list, tuple)) and types:
        values.setdefault("num_hidden_layers", len(types))
