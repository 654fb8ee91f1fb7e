"""GGUF metadata → the dicts a Hugging Face folder of the same model has in config.json and its companions."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from penstock.config.errors import CheckpointError, quoted
from penstock.models.gguf import draft_heads
from penstock.models.gguf.decoders import DECODERS, UNEVEN, layer_types
from penstock.models.gguf.encoders import ENCODER_BUILDERS, gemma_embedding
from penstock.models.gguf.metadata import MAX_EXPERTS, MAX_LAYERS, Keys, StoredTensor, Tensors, shortest, token_id
from penstock.models.gguf.recurrent import RECURRENT_BUILDERS

_DTYPES = MappingProxyType(
    {"f32": "float32", "f64": "float32", "f16": "float16"}
)  # everything else is kept best in bfloat16
_LLAMA3_ORIGINAL_LENGTHS = (8192, 4096, 2048, 16384, 32768, 1024, 512, 256, 128, 64)
_GEMMA3_27B_LAYERS = 62
_MULTIPLIED = MappingProxyType(
    {"deepseek2": 0.1, "mistral4": 0.1, "mistral3": 1.0}
)  # what converters multiply mscale_all_dim by


def _rope_scaling(keys: Keys, head_dim: int, theta: float, tensors: Tensors) -> dict[str, Any] | None:
    kind = keys.values.get(f"{keys.arch}.rope.scaling.type", "none")
    if "rope_factors_long.weight" in tensors:
        return _longrope(keys, tensors)
    if kind == "linear":
        return {"rope_type": "linear", "factor": keys.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling: dict[str, Any] = {
            "rope_type": "yarn",
            "factor": keys.number("rope.scaling.factor"),
            "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
            "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
        }
        for name in ("attn_factor", "yarn_attn_factor"):
            if keys.has(f"rope.scaling.{name}"):
                scaling["attention_factor"] = keys.number(f"rope.scaling.{name}")
        if keys.arch in _MULTIPLIED and keys.has("rope.scaling.yarn_log_multiplier"):
            multiplier = shortest(keys.number("rope.scaling.yarn_log_multiplier") / _MULTIPLIED[keys.arch])
            scaling |= {"mscale": multiplier, "mscale_all_dim": multiplier}
        return scaling
    if kind != "none":
        raise CheckpointError(
            f"rope scaling of type {quoted(str(kind))} is not supported in GGUF; there are linear, yarn."
        )
    if keys.has("rope.scale_linear") and keys.number("rope.scale_linear") != 1.0:  # written before 2023-10
        return {"rope_type": "linear", "factor": keys.number("rope.scale_linear")}
    return _llama3_scaling(tensors.get("rope_freqs.weight"), head_dim, theta)


def _longrope(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    """LongRoPE's divisors, which files keep as tensors."""
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
    }
    for length in ("long", "short"):
        name = f"rope_factors_{length}.weight"
        stored = tensors.get(name)
        if stored is None or stored.format != "f32":
            raise CheckpointError(f"the file has no {name} in float32 beside the others; download it again.")
        scaling[f"{length}_factor"] = [shortest(value) for value in stored.decoded().tolist()]
    if keys.has("rope.scaling.attn_factor"):
        scaling["attention_factor"] = keys.number("rope.scaling.attn_factor")
    return scaling


def _llama3_factors(
    head_dim: int, theta: float, factor: float, original: int, high: float
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Divisors of the rotary frequencies under Llama 3.1's scaling with a low factor of 1."""
    turns = original / (2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim))
    smooth = np.clip((turns - 1.0) / (high - 1.0), 0.0, 1.0) if high > 1.0 else (turns >= 1.0).astype(np.float64)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def _llama3_scaling(freqs: StoredTensor | None, head_dim: int, theta: float) -> dict[str, Any] | None:
    """Recovers Llama 3.1's parameters from the per-frequency divisors a converter stored; None if there are none.

    Divisors that fit no such parameters leave the tensor among the others, where the loader names it as unused.
    """
    if freqs is None or freqs.format != "f32" or freqs.shape != (head_dim // 2,):
        return None
    stored = freqs.decoded()
    if not np.isfinite(stored).all():
        return None
    found = stored.astype(np.float64)
    factor = float(found.max())
    if found.min() < 1.0 or factor == 1.0:
        return None
    for original, high in itertools.product(_LLAMA3_ORIGINAL_LENGTHS, (4.0, 1.0)):  # Llama 3's factor and Llama 4's
        if np.allclose(_llama3_factors(head_dim, theta, factor, original, high), found, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": shortest(factor),
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    return None


def _compute_dtype(tensors: Tensors) -> str:
    """The type that loses nothing that matters: that of the format holding most bytes."""
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        sizes[tensor.format] = sizes.get(tensor.format, 0) + tensor.nbytes
    return _DTYPES.get(max(sizes, key=lambda fmt: sizes[fmt]), "bfloat16")


def _vocab_size(keys: Keys, tensors: Tensors) -> int:
    if keys.arch == draft_heads.EAGLE3:  # which may use its target's embedding
        return keys.integer("vocab_size")
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError("the file holds no embedding matrix token_embd.weight: it is a vocabulary, not a model.")
    return embedding.shape[0]


def _base(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    vocab_size, hidden = _vocab_size(keys, tensors), keys.integer("embedding_length")
    if keys.arch in ("mamba", "mamba2"):  # no layer attends
        heads = kv_heads = 1
    else:
        heads = keys.integer("attention.head_count", most=2**16)
        # some layers have no KV heads
        mixed = keys.arch in (*RECURRENT_BUILDERS, *UNEVEN) and keys.has(
            "attention.head_count_kv"
        )  # some layers have none
        layers = max(keys.per_layer("attention.head_count_kv", most=2**16)) if mixed else 0
        kv_heads = layers or keys.integer("attention.head_count_kv", heads, most=2**16)
    head_dim = keys.integer("attention.key_length", max(hidden // heads, 1))
    theta = keys.number("rope.freq_base", 10000.0)
    return {
        "hidden_size": hidden,
        "num_hidden_layers": keys.integer("block_count", most=MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": keys.integer("context_length"),
        **_norm_eps(keys),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(keys, head_dim, theta, tensors),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": token_id(keys.values, "bos", vocab_size),
        "eos_token_id": token_id(keys.values, "eos", vocab_size),
        "pad_token_id": token_id(keys.values, "padding", vocab_size),
        "torch_dtype": _compute_dtype(tensors),
    }


def _norm_eps(keys: Keys) -> dict[str, float]:
    if keys.has("attention.layer_norm_epsilon"):
        return {"layer_norm_eps": keys.number("attention.layer_norm_epsilon")}
    return {"rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon")}


def _llama(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    own: dict[str, Any] = {
        "intermediate_size": keys.integer("feed_forward_length"),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
    }
    if keys.has("expert_count") and keys.integer("expert_count", most=MAX_EXPERTS, least=0):
        own["num_local_experts"] = keys.integer("expert_count")
        own["num_experts_per_tok"] = keys.integer("expert_used_count", most=own["num_local_experts"])
        own["sliding_window"] = None
        return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **own}
    if keys.has("attention.sliding_window"):
        own["sliding_window"] = keys.integer("attention.sliding_window")
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", **own}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **own}


def _qwen2(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "intermediate_size": keys.integer("feed_forward_length"),
        "use_sliding_window": False,
        "sliding_window": None,
    }


def _qwen3(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    bias = "blk.0.attn_q.bias" in tensors
    judges = keys.values.get("qwen3.classifier.output_labels") == ["yes", "no"]
    return _qwen2(keys, tensors) | {
        **({"classifier_from_token": ["no", "yes"]} if judges else {}),
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": bias,
    }


def _qwen3moe(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    experts = keys.integer("expert_count", most=MAX_EXPERTS)
    width = keys.integer("expert_feed_forward_length")
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "intermediate_size": keys.integer("feed_forward_length", width),
        "moe_intermediate_size": width,
        "num_experts": experts,
        "num_experts_per_tok": keys.integer("expert_used_count", most=experts),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "use_sliding_window": False,
        "sliding_window": None,
    }


def _gemma3(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    layers = keys.integer("block_count", most=MAX_LAYERS)
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count", most=2**16)
    # The key exists for every size, but only the 27B model scales queries by the hidden size instead of the head's.
    scale = hidden // heads if layers == _GEMMA3_27B_LAYERS else keys.integer("attention.key_length", 256)
    period = keys.integer("attention.sliding_window_pattern", 6, most=MAX_LAYERS)
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "intermediate_size": keys.integer("feed_forward_length"),
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": keys.integer("attention.key_length", 256),
        "rope_theta": keys.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10_000.0),
        "query_pre_attn_scalar": scale,
        "sliding_window": keys.integer("attention.sliding_window"),
        "sliding_window_pattern": period,
        "layer_types": layer_types(layers, period),
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": (
            keys.number("final_logit_softcapping") if keys.has("final_logit_softcapping") else None
        ),
    }


def _gemma_embedding(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    return gemma_embedding(_gemma3(keys, tensors), keys, tensors)


def _gpt_oss(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    layers = keys.integer("block_count", most=MAX_LAYERS)
    experts = keys.integer("expert_count", most=MAX_EXPERTS)
    own: dict[str, Any] = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "num_local_experts": experts,
        "num_experts_per_tok": keys.integer("expert_used_count", most=experts),
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": layer_types(layers, 2),
        "attention_bias": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }
    down = tensors.get("blk.0.ffn_down_exps.weight")
    if down is not None and down.format == "mxfp4":
        own["quantization_config"] = {"quant_method": "mxfp4"}
    return own


BUILDERS: Mapping[str, Callable[[Keys, Tensors], dict[str, Any]]] = MappingProxyType(
    {
        "llama": _llama,
        "qwen2": _qwen2,
        "qwen3": _qwen3,
        "qwen3moe": _qwen3moe,
        "gemma3": _gemma3,
        "gpt-oss": _gpt_oss,
        **ENCODER_BUILDERS,
        "gemma-embedding": _gemma_embedding,
        **RECURRENT_BUILDERS,
        **{name: decoder.fields for name, decoder in DECODERS.items()},
    }
)


def gguf_config(metadata: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """The model's config.json, derived from metadata and tensor shapes.

    Raises:
        CheckpointError: an unsupported architecture, or a key that is missing or out of range.
    """
    keys = Keys(metadata)
    build = draft_heads.BUILDERS.get(keys.arch) or BUILDERS.get(keys.arch)
    if build is None:
        near = difflib.get_close_matches(keys.arch[:80], BUILDERS, 1, cutoff=0.0)[0]
        raise CheckpointError(
            f"general.architecture is {quoted(keys.arch)}, which is not supported; the nearest that is: {near}. "
            f"All: {', '.join(BUILDERS)}."
        )
    config = _base(keys, tensors) | build(keys, tensors)
    if keys.arch in _MULTIPLIED and keys.has("attention.temperature_scale") and config["rope_scaling"] is not None:
        own = {"rope_theta": config["rope_theta"], "llama_4_scaling_beta": keys.number("attention.temperature_scale")}
        config["rope_parameters"], config["rope_scaling"] = config["rope_scaling"] | own, None
    if keys.arch == "gpt-oss" and config["rope_scaling"] is not None:
        config["rope_scaling"]["truncate"] = False
    return config
