"""GGUF files of Gemma 3n and Gemma 4, laid out as converters do, compute what the Hugging Face folder computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from penstock.config.errors import CheckpointError
from penstock.weights.facts import model_facts
from penstock.weights.open import open_checkpoint
from tests.models import tiny
from tests.models.harness import Harness, check_logits, load
from tests.weights.test_gguf_decoders import Arrays, stored_arrays

FAMILIES = {
    "gemma3n": gguf.MODEL_ARCH.GEMMA3N,
    "gemma3n-other-stream": gguf.MODEL_ARCH.GEMMA3N,
    "gemma4": gguf.MODEL_ARCH.GEMMA4,
    "gemma4-moe": gguf.MODEL_ARCH.GEMMA4,
}
WHOLE = {  # names that have another ending in files
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "altup.correct_output_scale": "altup_correct_scale.weight",
}


def metadata(arch: str, config: Any) -> dict[str, Any]:
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    full = config.rope_parameters["full_attention"]
    pairs: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "rope.freq_base": full["rope_theta"],
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    if arch == "gemma3n":
        shares = torch.tensor(config.activation_sparsity_pattern)
        pairs |= {
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.key_length": config.head_dim,
            "feed_forward_length": config.intermediate_size,
            "altup.active_idx": config.altup_active_idx,
            "altup.num_inputs": config.altup_num_inputs,
            "activation_sparsity_scale": torch.distributions.Normal(0.0, 1.0).icdf(shares).tolist(),
        }
    else:
        own, first = config.per_layer_config, config.num_hidden_layers - config.num_kv_shared_layers
        wide = 2 if config.use_double_wide_mlp else 1
        layers = range(config.num_hidden_layers)
        pairs |= {
            "attention.head_count_kv": [own[layer].num_key_value_heads for layer in layers],
            "attention.key_length": own["full_attention"].head_dim,
            "attention.key_length_swa": own["sliding_attention"].head_dim,
            "rope.dimension_count": own["full_attention"].head_dim,
            "rope.dimension_count_swa": own["sliding_attention"].head_dim,
            "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
            "feed_forward_length": [config.intermediate_size * (1 if layer < first else wide) for layer in layers],
            "expert_count": config.num_experts,
            "expert_used_count": config.top_k_experts,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    return {f"{arch}.{key}": value for key, value in pairs.items() if value is not None}


def tensors(arch: gguf.MODEL_ARCH, arrays: Arrays, config: Any) -> Arrays:
    table, found = gguf.get_tensor_name_map(arch, config.num_hidden_layers), dict[str, np.ndarray]()
    for key, array in arrays.items():
        if key == "lm_head.weight" or ".altup_" in key:
            continue
        parts = key.split(".", 3)
        if parts[1] == "layers" and parts[3] in WHOLE:
            found[f"blk.{parts[2]}.{WHOLE[parts[3]]}"] = array
            continue
        renamed = table.get_name(key, (".weight", ".bias"))
        assert renamed is not None, key
        found[renamed] = array
    if arch == gguf.MODEL_ARCH.GEMMA3N:
        for name, stored in (("altup_projections", "altup_proj"), ("altup_unembed_projections", "altup_unembd_proj")):
            each = [arrays[f"model.{name}.{index}.weight"] for index in range(config.altup_num_inputs - 1)]
            found[f"{stored}.weight"] = np.stack(each)
    else:
        pairs = config.per_layer_config["full_attention"].head_dim // 2
        turned = int(pairs * config.rope_parameters["full_attention"]["partial_rotary_factor"])
        found["rope_freqs.weight"] = np.array([1.0] * turned + [1e30] * (pairs - turned), np.float32)
    return found


def twin(family: str, tmp_path: Path, write_gguf: Callable[..., Path], **changes: Any) -> tuple[Any, Path]:
    """transformers' model, saved, and its GGUF file with some metadata changed."""
    arch = FAMILIES[family]
    always = {"altup_correct_scale": True} if arch == gguf.MODEL_ARCH.GEMMA3N else {}  # no file says otherwise
    name, theirs = gguf.MODEL_ARCH_NAMES[arch], tiny.save(family, tmp_path / "hf", **always)
    pairs = metadata(name, theirs.config) | {f"{name}.{key}": value for key, value in changes.items()}
    found = tensors(arch, stored_arrays(tmp_path / "hf"), theirs.config)
    return theirs, write_gguf(tmp_path / "m.gguf", name, pairs, found)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits(family: str, tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    theirs, file = twin(family, tmp_path, write_gguf)
    ours, source = open_checkpoint(file), open_checkpoint(tmp_path / "hf")
    planned, expected = model_facts(ours), model_facts(source)
    assert planned.layers == expected.layers
    assert len(planned.layers) == theirs.config.num_hidden_layers - theirs.config.num_kv_shared_layers
    check_logits(file, theirs)


BLOCKS = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
QUANTISED: dict[str, dict[str, Any]] = {
    "gemma3n": {"hidden_size_per_layer_input": 32, "laurel_rank": 32, "vocab_size_per_layer_input": 90},
    "gemma4": {"global_head_dim": 64, "hidden_size_per_layer_input": 32},
    "gemma4-moe": {"global_head_dim": 64, "num_global_key_value_heads": 1, "moe_intermediate_size": 32},
}


@pytest.mark.parametrize("family", QUANTISED)
def test_quantised(family: str, tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    """Tables cut short, stacks of streams, keys that are values: all stay as they are stored."""
    arch, kind = FAMILIES[family], gguf.GGMLQuantizationType.Q8_0
    name, theirs = gguf.MODEL_ARCH_NAMES[arch], tiny.save(family, tmp_path / "hf", **BLOCKS, **QUANTISED[family])
    pairs, found = metadata(name, theirs.config), tensors(arch, stored_arrays(tmp_path / "hf"), theirs.config)
    kinds = {key: "Q8_0" for key, array in found.items() if array.ndim > 1 and array.shape[-1] % 32 == 0}
    assert len(kinds) > 50
    plain = {
        key: gguf.dequantize(gguf.quantize(np.ascontiguousarray(array, np.float32), kind), kind).reshape(array.shape)
        for key, array in found.items()
        if key in kinds
    }
    files = (
        write_gguf(tmp_path / "q.gguf", name, pairs, found, kinds),
        write_gguf(tmp_path / "p.gguf", name, pairs, {**found, **plain}),
    )
    quantised, expected = (Harness(load(file)).step({"row": tiny.prompt(30)})["row"] for file in files)
    assert float((quantised - expected).norm() / expected.norm()) < 0.12  # activations are rounded to eight bits


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("gemma4", {"feed_forward_length": [44, 44, 50, 44, 44, 44]}, "gemma4.feed_forward_length"),
        ("gemma4", {"attention.shared_kv_layers": 7}, "gemma4.attention.shared_kv_layers"),
        ("gemma4", {"attention.sliding_window_pattern": [True, False]}, "gemma4.attention.sliding_window_pattern"),
        ("gemma3n", {"altup.num_inputs": 6}, r"altup_proj.weight' has shape \(3, 36, 36\); \[5, out"),
    ],
)
def test_what_does_not_fit_is_named(
    family: str, changes: dict[str, Any], said: str, tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    _, file = twin(family, tmp_path, write_gguf, **changes)
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(file)
