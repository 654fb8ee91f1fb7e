"""GGUF files of Nemotron-H, laid out as converters do, compute what the Hugging Face folder computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from penstock.config.errors import CheckpointError
from penstock.weights.facts import model_facts
from penstock.weights.open import open_checkpoint
from tests.models import tiny
from tests.models.harness import check_logits

DENSE = {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]}
# name → (family of tiny.py, architecture of GGUF, changes)
CASES: dict[str, tuple[str, gguf.MODEL_ARCH, dict[str, Any]]] = {
    "nemotron-h": ("nemotron-h", gguf.MODEL_ARCH.NEMOTRON_H_MOE, {}),
    "nemotron-h-latent": ("nemotron-h-latent", gguf.MODEL_ARCH.NEMOTRON_H_MOE, {}),
    "nemotron-h-dense": ("nemotron-h", gguf.MODEL_ARCH.NEMOTRON_H, DENSE),
}


def metadata(arch: str, config: Any) -> dict[str, Any]:
    kinds = config.layers_block_type
    widths = {"mlp": config.intermediate_size, "moe": config.moe_intermediate_size}
    pairs: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": len(kinds),
        "feed_forward_length": [widths.get(kind, 0) for kind in kinds],
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [config.num_key_value_heads * (kind == "full_attention") for kind in kinds],
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.state_size": config.ssm_state_size,
        "ssm.time_step_rank": config.mamba_num_heads,
        "ssm.group_count": config.n_groups,
    }
    if arch.endswith("moe"):
        pairs |= {
            "expert_count": config.n_routed_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
            "expert_weights_norm": config.norm_topk_prob,
            "expert_weights_scale": config.routed_scaling_factor,
            "expert_group_count": config.n_group,
            "expert_group_used_count": config.topk_group,
            "moe_latent_size": config.moe_latent_size,
        }
    return {f"{arch}.{key}": value for key, value in pairs.items() if value is not None}


def tensors(arch: gguf.MODEL_ARCH, model: Any) -> dict[str, np.ndarray]:
    config = model.config
    table, found = gguf.get_tensor_name_map(arch, len(config.layers_block_type)), dict[str, np.ndarray]()
    for original, tensor in model.state_dict().items():
        array, key = tensor.float().numpy(), original.replace("model.", "backbone.")
        if key.endswith("A_log"):
            array = -np.exp(array)[:, None]
        elif key.endswith(".D"):
            array = array[:, None]
        elif key.endswith("mixer.norm.weight"):
            array = array.reshape(config.n_groups, -1)
        elif key.endswith("conv1d.weight"):
            array = array.squeeze(1)
        key = key.replace("dt_bias", "dt.bias").replace("e_score_correction_bias", "e_score_correction.bias")
        if ".experts." in key:
            key = key.replace("backbone.", "model.").replace("mixer.experts", "mlp.experts") + ".weight"
        renamed = table.get_name(key, (".weight", ".bias"))
        assert renamed is not None, key
        found[renamed] = np.ascontiguousarray(array)
    return found


def twin(name: str, tmp_path: Path, write_gguf: Callable[..., Path], **changes: Any) -> tuple[Any, Path]:
    """transformers' model, saved, and its GGUF file with some metadata changed."""
    family, arch, fields = CASES[name]
    theirs, named = tiny.save(family, tmp_path / "hf", **fields), gguf.MODEL_ARCH_NAMES[arch]
    pairs = metadata(named, theirs.config) | {f"{named}.{key}": value for key, value in changes.items()}
    return theirs, write_gguf(tmp_path / "m.gguf", named, pairs, tensors(arch, theirs))


@pytest.mark.parametrize("name", CASES)
def test_logits(name: str, tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    theirs, file = twin(name, tmp_path, write_gguf)
    planned, expected = model_facts(open_checkpoint(file)), model_facts(open_checkpoint(tmp_path / "hf"))
    assert planned.layers == expected.layers
    kept = [layer.elements_per_token > 0 for layer in planned.layers]
    assert kept == [kind == "full_attention" for kind in theirs.config.layers_block_type]
    check_logits(file, theirs)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ssm.inner_size": 49}, "ssm.inner_size is 49, no multiple of 4 heads"),
        ({"feed_forward_length": [14, 15]}, "feed_forward_length"),
    ],
)
def test_what_does_not_fit_is_named(
    changes: dict[str, Any], said: str, tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    _, file = twin("nemotron-h", tmp_path, write_gguf, **changes)
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(file)
