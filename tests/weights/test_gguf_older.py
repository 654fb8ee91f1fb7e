"""GGUF files of families with learned positions or ALiBi, and of Falcon, compute the logits of their folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import transformers

from penstock.config.errors import CheckpointError
from tests.models import tiny
from tests.models.harness import check_logits, load

ARCHES = {
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "gpt-bigcode": gguf.MODEL_ARCH.STARCODER,
    "bloom": gguf.MODEL_ARCH.BLOOM,
    "mpt": gguf.MODEL_ARCH.MPT,
    "falcon": gguf.MODEL_ARCH.FALCON,
    "falcon-groups": gguf.MODEL_ARCH.FALCON,
    "falcon-groups-one-norm": gguf.MODEL_ARCH.FALCON,
}
# What a GGUF file cannot say has the usual value.
USUAL: dict[str, dict[str, Any]] = {
    "mpt": {"attn_config": {"clip_qkv": 1.5, "alibi_bias_max": 8}},
    "falcon": {"bias": False},
}


def kv_heads(name: str, config: transformers.PretrainedConfig) -> int:
    if name in ("falcon", "gpt-bigcode"):
        return 1
    return int(getattr(config, "num_kv_heads", config.num_attention_heads))


def metadata(name: str, config: transformers.PretrainedConfig) -> dict[str, Any]:
    arch = gguf.MODEL_ARCH_NAMES[ARCHES[name]]
    pairs: dict[str, Any] = {
        "context_length": 128,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": 4 * config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": kv_heads(name, config),
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
    }
    if name == "mpt":
        pairs |= {"attention.clamp_kqv": config.attn_config.clip_qkv, "attention.max_alibi_bias": 8.0}
    return {f"{arch}.{key}": value for key, value in pairs.items()}


def tensors(name: str, model: transformers.PreTrainedModel) -> dict[str, np.ndarray]:
    """As converters lay them out: GPT-2's matrices turned, queries, keys and values one after the other."""
    config = model.config
    table = gguf.get_tensor_name_map(ARCHES[name], config.num_hidden_layers)
    stored: dict[str, np.ndarray] = {}
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight":
            continue
        array = tensor.numpy()
        if name == "gpt2" and key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            array = array.T
        if "query_key_value" in key:
            group, size = config.num_attention_heads // kv_heads(name, config), config.hidden_size // 6
            heads = array.reshape(kv_heads(name, config), group + 2, size, *array.shape[1:])
            parts = heads[:, :-2], heads[:, -2], heads[:, -1]
            array = np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])
        bare = key.removeprefix("transformer.")  # as BLOOM's first files have it
        renamed = table.get_name(key, (".weight", ".bias")) or table.get_name(bare, (".weight", ".bias"))
        assert renamed is not None, key
        stored[renamed] = np.ascontiguousarray(array)
    return stored


@pytest.mark.parametrize("name", ARCHES)
def test_logits(name: str, tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    theirs = tiny.make(name, **USUAL.get(name, {}))
    arch = gguf.MODEL_ARCH_NAMES[ARCHES[name]]
    file = write_gguf(tmp_path / "model.gguf", arch, metadata(name, theirs.config), tensors(name, theirs))
    check_logits(file, theirs)


def test_a_fused_projection_of_other_heads(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    theirs = tiny.make("bloom")
    pairs = metadata("bloom", theirs.config) | {"bloom.attention.head_count_kv": 2}
    file = write_gguf(tmp_path / "model.gguf", "bloom", pairs, tensors("bloom", theirs))
    with pytest.raises(CheckpointError, match=r"attn_qkv\.\w+'? has 108 rows; 60 are needed"):
        load(file)
