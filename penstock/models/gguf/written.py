"""config.json → GGUF metadata: the inverse of `configuration`, for the families of which files can be written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.config.errors import CheckpointError

_FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "LlamaForCausalLM": "llama",
        "MistralForCausalLM": "llama",
        "MixtralForCausalLM": "llama",
        "Qwen2ForCausalLM": "qwen2",
        "Qwen3ForCausalLM": "qwen3",
        "Qwen3MoeForCausalLM": "qwen3moe",
        "Gemma3ForCausalLM": "gemma3",
        "Gemma3ForConditionalGeneration": "gemma3",
    }
)


def architecture_of(config: Mapping[str, Any]) -> str:
    """`general.architecture` of a Hugging Face config.

    Raises:
        CheckpointError: GGUF files of the family cannot be written.
    """
    names = config.get("architectures") or ["?"]
    found = next((_FAMILIES[name] for name in names if name in _FAMILIES), None)
    if found is None:
        raise CheckpointError(
            f"GGUF files of {', '.join(map(str, names))} cannot be written; families: {', '.join(_FAMILIES)}. "
            "Formats that need none: int8, int4, fp8, nvfp4."
        )
    return found


def rope_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rotary parameters, from wherever the config's age puts them."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return found.get("full_attention", found) if isinstance(found, Mapping) else {}


def head_size(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def llama3_divisors(config: Mapping[str, Any]) -> npt.NDArray[np.float32] | None:
    """What Llama 3.1's scaling divides the rotary frequencies by, [head / 2]; None for models without it."""
    rope = rope_settings(config)
    if rope.get("rope_type", rope.get("type")) != "llama3":
        return None
    theta = float(rope.get("rope_theta") or config.get("rope_theta", 10_000.0))
    size = head_size(config)
    low, high = float(rope.get("low_freq_factor", 1.0)), float(rope.get("high_freq_factor", 4.0))
    wavelengths = 2 * math.pi * theta ** (np.arange(0, size, 2) / size)
    turns = float(rope["original_max_position_embeddings"]) / wavelengths
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / float(rope["factor"]) + smooth)).astype(np.float32)


def _rope(arch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    rope = rope_settings(config)
    found: dict[str, Any] = {"rope.freq_base": float(rope.get("rope_theta") or config.get("rope_theta", 10_000.0))}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("linear", "yarn"):
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        found["rope.scaling.original_context_length"] = int(
            rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
        )
        for name in ("beta_fast", "beta_slow"):
            if rope.get(name) is not None:
                found[f"rope.scaling.yarn_{name}"] = float(rope[name])
        if rope.get("attention_factor") is not None:
            found["rope.scaling.attn_factor"] = float(rope["attention_factor"])
    elif kind not in ("linear", "llama3", "default", None):
        raise CheckpointError(f"rope scaling of type {kind!r} cannot be written to GGUF; linear, yarn, llama3 can.")
    return found


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    count = config.get("num_local_experts") or config.get("num_experts")
    if not count:
        return {}
    found = {"expert_count": int(count), "expert_used_count": int(config["num_experts_per_tok"])}
    if config.get("moe_intermediate_size"):
        found["expert_feed_forward_length"] = int(config["moe_intermediate_size"])
    return found


def _check_expressible(arch: str, config: Mapping[str, Any]) -> None:
    """GGUF has no keys for some variants; readers would silently compute something else."""
    layers = config["num_hidden_layers"]
    wrong: dict[str, Any] = {}
    if arch.startswith("qwen") and config.get("use_sliding_window"):
        wrong["use_sliding_window"] = True
    if arch == "qwen3moe":
        for name, only in (("mlp_only_layers", []), ("decoder_sparse_step", 1), ("norm_topk_prob", True)):
            if config.get(name, only) != only:
                wrong[name] = config[name]
    if arch == "gemma3":
        full = [layer for layer, kind in enumerate(config.get("layer_types") or []) if kind == "full_attention"]
        if config.get("layer_types") and full != list(range(5, layers, 6)):
            wrong["layer_types"] = config["layer_types"]
        scale = config["hidden_size"] // config["num_attention_heads"] if layers == 62 else head_size(config)
        if config.get("query_pre_attn_scalar", scale) != scale:
            wrong["query_pre_attn_scalar"] = config["query_pre_attn_scalar"]
    if wrong:
        found = ", ".join(f"{name} {str(value)[:60]}" for name, value in wrong.items())
        raise CheckpointError(f"GGUF files of {arch} cannot express {found}. Formats that can: int8, int4, fp8, nvfp4.")


def model_metadata(arch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that say what the model is, without the tokenizer.

    Raises:
        CheckpointError: the architecture cannot be written, or a size is missing.
    """
    if arch not in _FAMILIES.values():
        known = ", ".join(dict.fromkeys(_FAMILIES.values()))
        raise CheckpointError(f"architecture {arch!r} cannot be written; there are: {known}.")
    _check_expressible(arch, config)
    size = head_size(config)
    sizes: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config.get("max_position_embeddings", 2048),
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size", 4 * config["hidden_size"]),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config.get("num_key_value_heads", config["num_attention_heads"]),
        "attention.layer_norm_rms_epsilon": float(config.get("rms_norm_eps", 1e-6)),
        "attention.key_length": size,
        "attention.value_length": size,
        "vocab_size": config["vocab_size"],
    }
    if arch == "llama":
        sizes["rope.dimension_count"] = size
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window") is not False:
        sizes["attention.sliding_window"] = int(window)
    if arch == "gemma3":
        sliding = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
        theta = sliding.get("rope_theta") or config.get("rope_local_base_freq", 10_000.0)
        sizes["rope.freq_base_swa"] = float(theta)
        if config.get("final_logit_softcapping"):
            sizes["final_logit_softcapping"] = float(config["final_logit_softcapping"])
    return {f"{arch}.{key}": value for key, value in (sizes | _rope(arch, config) | _experts(config)).items()}
