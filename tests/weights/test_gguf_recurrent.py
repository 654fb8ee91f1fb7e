"""GGUF files of recurrent families, laid out as converters do, compute what the Hugging Face folder computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import transformers

from penstock.config.errors import CheckpointError
from penstock.weights.open import open_checkpoint
from tests.models import tiny
from tests.models.harness import check_logits

ARCHES = {
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "lfm2-moe": gguf.MODEL_ARCH.LFM2MOE,
    "qwen3-next": gguf.MODEL_ARCH.QWEN3NEXT,
    "qwen3_5": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5-moe": gguf.MODEL_ARCH.QWEN35MOE,
    "mamba": gguf.MODEL_ARCH.MAMBA,
    "falcon-mamba": gguf.MODEL_ARCH.MAMBA,
    "mamba2": gguf.MODEL_ARCH.MAMBA2,
    "granite-hybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "granite-hybrid-dense": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "bamba": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "falcon-h1": gguf.MODEL_ARCH.FALCON_H1,
    "falcon-h1-normed": gguf.MODEL_ARCH.FALCON_H1,
    "jamba": gguf.MODEL_ARCH.JAMBA,
}
QWEN = ("qwen3next", "qwen35", "qwen35moe")
# What a GGUF file cannot say, or says by convention, has the conventional value.
CONVENTIONAL: dict[str, dict[str, Any]] = {
    "qwen3-next": {"mlp_only_layers": []},
    "qwen3_5": {"layer_types": None, "num_hidden_layers": 4},
    "falcon-h1-normed": {"mamba_norm_before_gate": False, "mamba_proj_bias": False, "mlp_bias": False},
}


def metadata(arch: str, config: Any) -> dict[str, Any]:
    def first(*names: str, default: Any = None) -> Any:
        return next((found for name in names if (found := getattr(config, name, None)) is not None), default)

    types = getattr(config, "layer_types", ())
    bamba = config.model_type == "bamba"
    if bamba:
        attending = config.attn_layer_indices
        types = ["full_attention" if i in attending else "" for i in range(config.num_hidden_layers)]
    heads = first("num_attention_heads", default=0)
    kv_heads = first("num_key_value_heads", default=0)
    if arch not in (*QWEN, "falcon-h1", "mamba", "mamba2"):
        kv_heads = [kv_heads if kind == "full_attention" else 0 for kind in types]
    inner = first("mamba_d_ssm", "linear_value_head_dim", "intermediate_size")
    if arch in QWEN:
        inner *= config.linear_num_value_heads
    elif arch != "mamba":
        inner = first("mamba_d_ssm", default=2 * config.hidden_size)
    hidden = first("intermediate_size", default=0)
    if arch == "lfm2":
        hidden = -(-(2 * hidden // 3) // config.block_multiple_of) * config.block_multiple_of
    rope = first("rope_parameters", default={}) or {}
    pairs: dict[str, Any] = {
        "context_length": first("max_position_embeddings", default=2**20),
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": 0 if arch in ("mamba", "mamba2") else hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_rms_epsilon": first("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
        "rope.freq_base": rope.get("rope_theta", 10000.0),
        "shortconv.l_cache": first("conv_L_cache"),
        "leading_dense_block_count": first("num_dense_layers"),
        "ssm.conv_kernel": first("mamba_d_conv", "linear_conv_kernel_dim", "conv_kernel"),
        "ssm.inner_size": inner,
        "ssm.state_size": first("mamba_d_state", "linear_key_head_dim", "state_size"),
        "ssm.time_step_rank": first(
            "mamba_dt_rank", "mamba_n_heads", "linear_num_value_heads", "num_heads", "time_step_rank"
        ),
        "ssm.group_count": first("mamba_n_groups", "linear_num_key_heads", "n_groups"),
        "expert_count": first("num_experts", "num_local_experts"),
        "expert_used_count": first("num_experts_per_tok"),
        "expert_feed_forward_length": first("moe_intermediate_size"),
        "expert_shared_feed_forward_length": first("shared_expert_intermediate_size", "shared_intermediate_size"),
        "attention.scale": first("attention_multiplier"),
        "embedding_scale": None if arch == "falcon-h1" else first("embedding_multiplier"),
        "residual_scale": first("residual_multiplier"),
        "logit_scale": first("logits_scaling"),
    }
    if arch in QWEN:
        pairs |= {"attention.key_length": config.head_dim, "rope.dimension_count": config.head_dim // 2}
        pairs["full_attention_interval"] = 4
    if arch == "mamba":
        pairs["ssm.dt_b_c_rms"] = config.model_type == "falcon_mamba"
    if arch == "granitehybrid":
        pairs["rope.scaling.finetuned"] = bamba or config.position_embedding_type == "rope"
        pairs["rope.dimension_count"] = round(config.head_dim * rope["partial_rotary_factor"]) if bamba else None
    return {f"{arch}.{key}": value for key, value in pairs.items() if value is not None}


def folded(key: str, array: np.ndarray, config: Any) -> np.ndarray:
    """Falcon-H1's factors go into the weights."""
    part = key.rsplit(".", 2)[-2]
    gates, outputs = config.mlp_multipliers
    factors = {
        "down_proj": outputs,
        "gate_proj": gates,
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    if part != "in_proj":
        return array * factors.get(part, 1.0)
    shared = config.mamba_n_groups * config.mamba_d_state
    sizes = (config.mamba_d_ssm, config.mamba_d_ssm, shared, shared, config.mamba_n_heads)
    return array * config.ssm_in_multiplier * np.repeat(config.ssm_multipliers, sizes)[:, None]


def parted(key: str, array: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors that are several in GGUF, under their names there; (key, array) for the others."""
    layer = key.split(".")[2] if ".layers." in key else ""
    if ".experts." in key:
        halves = (
            {"down": array} if "down" in key else dict(zip(("gate", "up"), np.split(array, 2, axis=1), strict=True))
        )
        yield from ((f"blk.{layer}.ffn_{half}_exps.weight", part) for half, part in halves.items())
    elif "shared_mlp" in key:
        ending = "_shexp" if config.num_local_experts else ""
        halves = {"down": array} if "output" in key else dict(zip(("gate", "up"), np.split(array, 2), strict=True))
        yield from ((f"blk.{layer}.ffn_{half}{ending}.weight", part) for half, part in halves.items())
    elif "in_proj_qkvz" in key:
        size, wide = config.linear_key_head_dim, config.linear_value_head_dim
        share = config.linear_num_value_heads // config.linear_num_key_heads * wide
        heads = array.reshape(config.linear_num_key_heads, -1, array.shape[1])
        q, k, v, z = (part.reshape(-1, array.shape[1]) for part in np.split(heads, np.cumsum((size, size, share)), 1))
        yield f"blk.{layer}.attn_qkv.weight", np.concatenate((q, k, v))
        yield f"blk.{layer}.attn_gate.weight", z
    else:
        yield key, array


def changed(arch: str, key: str, array: np.ndarray, config: Any) -> np.ndarray:
    if key.endswith("A_log"):
        array = -np.exp(array)
    if "conv1d.weight" in key or "conv.conv.weight" in key:
        array = array.squeeze(1)
    if arch in ("mamba2", "granitehybrid", "falcon-h1") and key.endswith(("A_log", ".D")):
        array = array[:, None]
    if arch in ("mamba2", "granitehybrid", "falcon-h1") and key.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        array = array.reshape(config.n_groups if arch == "mamba2" else config.mamba_n_groups, -1)
    if arch in QWEN and key.endswith("norm.weight") and not key.endswith("linear_attn.norm.weight"):
        array = array + 1
    if key.endswith("shared_expert_gate.weight"):
        array = array[0]
    if arch == "granitehybrid" and key.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
        array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    if arch in QWEN[1:] and ".linear_attn." in key:
        array = tiled(key, array, config)
    return folded(key, array, config) if arch == "falcon-h1" else array


def tiled(key: str, array: np.ndarray, config: Any) -> np.ndarray:
    """The value heads of one key head lie apart: of rows, channels and the output's columns."""
    keys, share = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    before = 2 * keys * config.linear_key_head_dim if "qkv" in key or "conv1d" in key else 0

    def turned(part: np.ndarray) -> np.ndarray:
        return part.reshape(keys, share, -1, *part.shape[1:]).swapaxes(0, 1).reshape(part.shape)

    if key.endswith("linear_attn.norm.weight"):
        return array
    if "out_proj" in key:
        return turned(array.T).T
    return np.concatenate((array[:before], turned(array[before:])))


def tensors(name: str, model: transformers.PreTrainedModel) -> dict[str, np.ndarray]:
    arch, config = ARCHES[name], model.config
    table = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    stored: dict[str, np.ndarray] = {}
    for original, tensor in model.state_dict().items():
        array = changed(gguf.MODEL_ARCH_NAMES[arch], original, tensor.float().numpy(), config)
        if (original == "lm_head.weight" and config.tie_word_embeddings) or original.endswith("mup_vector"):
            continue
        for key, part in parted(original, array, config):
            if key.startswith("blk."):
                stored[key] = np.ascontiguousarray(part)
                continue
            layered = key.replace(".dt_bias", ".dt_proj.bias").replace(".expert_bias", ".expert_bias.bias")
            layered = layered.replace("block_sparse_moe.router", "block_sparse_moe.gate")
            renamed = table.get_name(layered, (".weight", ".bias")) or table.get_name(key)
            assert renamed is not None, key
            stored[renamed] = np.ascontiguousarray(part)
    return stored


def test_projections_by_head_as_older_files_have_them(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    theirs = tiny.make("qwen3-next", **CONVENTIONAL["qwen3-next"])
    found = tensors("qwen3-next", theirs)
    for layer in range(3):
        del found[f"blk.{layer}.attn_qkv.weight"], found[f"blk.{layer}.attn_gate.weight"]
        whole = theirs.state_dict()[f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"]
        found[f"blk.{layer}.ssm_in.weight"] = whole.numpy()
    file = write_gguf(tmp_path / "model.gguf", "qwen3next", metadata("qwen3next", theirs.config), found)
    check_logits(file, theirs)


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("lfm2", {"lfm2.attention.head_count_kv": [0, 2]}, "lfm2.attention.head_count_kv is .*3 integers"),
        ("qwen3-next", {"qwen3next.ssm.inner_size": 25}, "qwen3next.ssm.inner_size is 25, no multiple of 4 heads"),
        ("mamba", {"mamba.ssm.state_size": 0}, "mamba.ssm.state_size is '0'"),
    ],
)
def test_refusals_name_the_key(
    name: str, change: dict[str, Any], named: str, tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    theirs = tiny.make(name)
    arch = gguf.MODEL_ARCH_NAMES[ARCHES[name]]
    pairs = metadata(arch, theirs.config) | change
    file = write_gguf(tmp_path / "model.gguf", arch, pairs, {"token_embd.weight": np.zeros((101, 36), np.float32)})
    with pytest.raises(CheckpointError, match=named):
        open_checkpoint(file)
