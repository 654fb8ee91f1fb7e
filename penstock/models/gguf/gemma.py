"""GGUF metadata of Gemma 3n and Gemma 4 → their config.json."""

from __future__ import annotations

import math
from statistics import NormalDist
from types import MappingProxyType
from typing import Any

import numpy as np

from penstock.config.errors import CheckpointError, quoted
from penstock.models.gguf.metadata import MAX_EXPERTS, MAX_LAYERS, Keys, Tensors

LAYER_INPUTS = MappingProxyType(
    {
        "ffn_norm": "pre_feedforward_layernorm",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
    }
)
STREAMS = MappingProxyType(
    {
        **LAYER_INPUTS,
        "altup_correct_coef": "altup.correction_coefs",
        "altup_correct_scale.weight": "altup.correct_output_scale",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    }
)
BESIDE_EXPERTS = MappingProxyType(
    {
        **LAYER_INPUTS,
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "layer_output_scale.weight": "layer_scalar",
    }
)


def _slides(keys: Keys, period: int) -> list[bool]:
    """Whether each layer slides: as the file's pattern says, else all but every `period`-th."""
    count, name = keys.integer("block_count", most=MAX_LAYERS), f"{keys.arch}.attention.sliding_window_pattern"
    found = keys.values.get(name, [(layer + 1) % period != 0 for layer in range(count)])
    if not isinstance(found, list) or len(found) != count or not all(type(item) in (bool, int) for item in found):
        raise CheckpointError(f"metadata key {name} is {quoted(str(found), 40)}; {count} truth values are needed.")
    return [bool(item) for item in found]


def _both(keys: Keys, tensors: Tensors, slides: list[bool]) -> dict[str, Any]:
    """What the two have in common."""
    table = tensors.get("per_layer_token_embd.weight")
    stored = {} if table is None else {"vocab_size_per_layer_input": table.shape[0]}
    return {
        "layer_types": ["sliding_attention" if sliding else "full_attention" for sliding in slides],
        "sliding_window": keys.integer("attention.sliding_window"),
        "num_kv_shared_layers": keys.integer("attention.shared_kv_layers", 0, most=len(slides), least=0),
        "hidden_size_per_layer_input": keys.integer("embedding_length_per_layer_input", 0, least=0),
        "partial_rotary_factor": None,
        "rope_theta": None,
        "rope_scaling": None,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "hidden_activation": "gelu_pytorch_tanh",
        **stored,
    }


def _widths(keys: Keys) -> list[int]:
    """The MLPs' sizes."""
    found = keys.per_layer("feed_forward_length")
    if 0 in found:
        raise CheckpointError(f"metadata key {keys.arch}.feed_forward_length has 0; at least 1 is needed.")
    return found


def gemma3n(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    """Sparsity is stated by the deviations above the mean from which a gate counts; none, by minus infinity."""
    slides, scales = _slides(keys, 5), keys.values.get(f"{keys.arch}.activation_sparsity_scale")
    low = tensors.get("blk.0.laurel_l.weight")
    found = _both(keys, tensors, slides) | {
        "intermediate_size": _widths(keys),
        "altup_active_idx": keys.integer("altup.active_idx", 0, least=0),
        "altup_num_inputs": keys.integer("altup.num_inputs", 4),
        "altup_correct_scale": "blk.0.altup_correct_scale.weight" in tensors,
        "laurel_rank": 64 if low is None else low.shape[0],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": keys.number("rope.freq_base", 1_000_000.0)},
            "sliding_attention": {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10_000.0)},
        },
    }
    if isinstance(scales, list) and all(type(item) in (float, int) for item in scales):
        shares = [NormalDist().cdf(item) if math.isfinite(item) else 0.0 for item in scales]
        found["activation_sparsity_pattern"] = shares
    return found


def _rotated_share(tensors: Tensors, dim: int) -> float:
    """The part of a full layer's pairs that turns: divisors of the others' frequencies are beyond all measure."""
    divisors = tensors.get("rope_freqs.weight")
    if divisors is None or divisors.format != "f32" or divisors.shape != (dim // 2,):
        return 1.0
    count = int(np.count_nonzero(divisors.decoded() < 1e6))
    return min(1.0, (count + 0.25) / (dim // 2))


def gemma4(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    """Sizes of heads and MLPs differ from layer to layer; where values are keys, full layers have no matrix of them."""
    slides = _slides(keys, 6)
    full, dim = keys.integer("attention.key_length", 512), keys.integer("attention.key_length_swa", 256)
    kv_heads, widths = keys.per_layer("attention.head_count_kv", most=2**16), _widths(keys)
    first = next((layer for layer, sliding in enumerate(slides) if not sliding), 0)
    own = {"head_dim": full, "num_key_value_heads": kv_heads[first]}
    rotated = {"rope_type": "proportional", "partial_rotary_factor": _rotated_share(tensors, full)}
    sliding = keys.integer("rope.dimension_count_swa", dim) / dim
    found = _both(keys, tensors, slides) | {
        "head_dim": dim,
        "num_key_value_heads": next(
            (heads for heads, slide in zip(kv_heads, slides, strict=True) if slide), kv_heads[0]
        ),
        "per_layer_config": {str(layer): own for layer, slide in enumerate(slides) if not slide},
        "attention_k_eq_v": f"blk.{first}.attn_v.weight" not in tensors,
        "intermediate_size": widths[0],
        "rope_parameters": {
            "full_attention": {**rotated, "rope_theta": keys.number("rope.freq_base", 1_000_000.0)},
            "sliding_attention": {
                "rope_type": "default",
                "partial_rotary_factor": sliding,
                "rope_theta": keys.number("rope.freq_base_swa", 10_000.0),
            },
        },
    }
    shared = found["num_kv_shared_layers"]
    found["use_double_wide_mlp"] = shared > 0 and widths[-1] == 2 * widths[0]
    wide = [
        widths[0] * (1 + found["use_double_wide_mlp"] * (layer >= len(widths) - shared)) for layer in range(len(widths))
    ]
    if wide != widths:
        problem = "the same for all is needed, or twice as much for layers without keys"
        raise CheckpointError(f"metadata key {keys.arch}.feed_forward_length is {quoted(str(widths), 80)}; {problem}.")
    if keys.integer("expert_count", 0, most=MAX_EXPERTS, least=0):
        chosen = keys.integer("expert_used_count", most=keys.integer("expert_count", most=MAX_EXPERTS))
        found |= {"enable_moe_block": True, "top_k_experts": chosen}
    return found
