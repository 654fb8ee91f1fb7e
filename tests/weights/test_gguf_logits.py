"""A GGUF file of a model computes the logits of the Hugging Face folder it was made from."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
import transformers

from tests.models import tiny
from tests.models.harness import check_logits
from tests.weights import test_gguf_recurrent

ARCHES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3-moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "gpt-oss": gguf.MODEL_ARCH.GPT_OSS,
}
# What a GGUF file cannot say, or says by convention, has the conventional value.
CONVENTIONAL: dict[str, dict[str, Any]] = {
    "qwen3-moe": {"mlp_only_layers": []},
    "gemma3": {"num_hidden_layers": 7, "layer_types": None, "query_pre_attn_scalar": 10, "rope_parameters": None},
    "gpt-oss": {"layer_types": None, "hidden_size": 64, "intermediate_size": 32},
}


def metadata(arch: str, config: transformers.PretrainedConfig) -> dict[str, Any]:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    pairs: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": config.head_dim if hasattr(config, "head_dim") else 6,
        "attention.value_length": config.head_dim if hasattr(config, "head_dim") else 6,
        "rope.freq_base": rope["rope_theta"],
    }
    if arch in ("gemma3", "gpt-oss"):
        pairs["attention.sliding_window"] = config.sliding_window
    if rope["rope_type"] == "yarn":
        pairs |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"]}
        pairs["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    experts = getattr(config, "num_local_experts", None)
    if experts:
        pairs |= {"expert_count": experts, "expert_used_count": config.num_experts_per_tok}
        pairs["expert_feed_forward_length"] = getattr(config, "moe_intermediate_size", config.intermediate_size)
    return {f"{arch}.{key}": value for key, value in pairs.items()}


def tensors(name: str, model: transformers.PreTrainedModel) -> dict[str, np.ndarray]:
    """The model's tensors as converters to GGUF lay them out."""
    arch, config = ARCHES[name], model.config
    table = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    stored: dict[str, np.ndarray] = {}
    for key, tensor in model.state_dict().items():
        array = tensor.numpy()
        if ".mlp.experts." in key:
            layer, part = key.split(".")[2], key.rsplit(".", 1)[1]
            suffix = "bias" if part.endswith("_bias") else "weight"
            if name == "gpt-oss" and suffix == "weight":
                array = array.swapaxes(1, 2)
            if part.startswith("down"):
                halves = {"down": array}
            elif name == "gpt-oss":
                halves = {"gate": array[:, ::2], "up": array[:, 1::2]}
            else:
                middle = array.shape[1] // 2
                halves = {"gate": array[:, :middle], "up": array[:, middle:]}
            stored |= {f"blk.{layer}.ffn_{half}_exps.{suffix}": np.ascontiguousarray(a) for half, a in halves.items()}
            continue
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        renamed = table.get_name(key, (".weight", ".bias"))
        assert renamed is not None
        renamed = renamed if renamed.endswith((".weight", ".bias")) else f"{renamed}.weight"
        if arch == gguf.MODEL_ARCH.LLAMA and ("q_proj" in key or "k_proj" in key):
            heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        if name == "gemma3" and "norm" in key:
            array = array + 1
        stored[renamed] = np.ascontiguousarray(array)
    return stored


@pytest.mark.parametrize(
    ("name", "writer"),
    [(name, writer) for writer in (sys.modules[__name__], test_gguf_recurrent) for name in writer.ARCHES],
)
def test_logits(name: str, writer: ModuleType, tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    theirs = tiny.make(name, **writer.CONVENTIONAL.get(name, {}))
    arch = gguf.MODEL_ARCH_NAMES[writer.ARCHES[name]]
    pairs, arrays = writer.metadata(arch, theirs.config), writer.tensors(name, theirs)
    check_logits(write_gguf(tmp_path / "model.gguf", arch, pairs, arrays), theirs)
